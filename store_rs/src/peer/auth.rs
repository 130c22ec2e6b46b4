//! The greeting: both sides prove that they know the cluster's token, without showing it.
//!
//! ```text
//! client → "MKPR" version nonce
//! server → "MKPR" version nonce proof(server)
//! client → proof(client)
//! ```
//!
//! A proof is a keyed BLAKE3 of a role and both nonces, compared in constant time. Without a token
//! the key is that of an empty one, so two stores of which one has a token part with a message that
//! names the setting. The token proves who connects; what follows is neither encrypted nor signed,
//! which is what TLS is for on a network that others can write to.

use std::io::{self, IoSlice, Read};

use super::link::{Link, read_exact, write_all};
use crate::error::{Error, Result};

const MAGIC: [u8; 4] = *b"MKPR";
const VERSION: u16 = 1;
const NONCE: usize = 32;
const HEAD: usize = MAGIC.len() + 2 + NONCE;
const CONTEXT: &str = "mooncake_serve 2026 peer token v1";

/// The key that stands for the cluster's token.
#[derive(Clone)]
pub(crate) struct Secret([u8; 32]);

impl Secret {
    pub(crate) fn new(token: Option<&[u8]>) -> Self {
        Self(blake3::derive_key(CONTEXT, token.unwrap_or_default()))
    }

    fn proof(&self, role: &[u8], client: &[u8; NONCE], server: &[u8; NONCE]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(client).update(server).update(role);
        hasher.finalize()
    }

    /// `blake3::Hash` compares in constant time.
    fn check(
        &self,
        role: &[u8],
        client: &[u8; NONCE],
        server: &[u8; NONCE],
        shown: [u8; 32],
    ) -> Result<()> {
        if self.proof(role, client, server) == blake3::Hash::from_bytes(shown) {
            return Ok(());
        }
        Err(Error::refused("the peer's token is another one; give every store one token_file"))
    }
}

/// Prove ourselves to the store that we connected to, and it to us.
pub(crate) fn greet_server(link: &mut dyn Link, secret: &Secret) -> Result<()> {
    let ours = nonce()?;
    send(link, &head(&ours))?;
    let theirs = receive_head(link)?;
    let mut shown = [0; 32];
    receive(link, &mut shown)?;
    secret.check(b"server", &ours, &theirs, shown)?;
    send(link, secret.proof(b"client", &ours, &theirs).as_bytes())
}

/// Prove ourselves to a store that connected to us, and it to us.
pub(crate) fn greet_client(link: &mut dyn Link, secret: &Secret) -> Result<()> {
    let theirs = receive_head(link)?;
    let ours = nonce()?;
    let mut reply = head(&ours).to_vec();
    reply.extend(secret.proof(b"server", &theirs, &ours).as_bytes());
    send(link, &reply)?;
    let mut shown = [0; 32];
    receive(link, &mut shown)?;
    secret.check(b"client", &theirs, &ours, shown)
}

fn head(nonce: &[u8; NONCE]) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&MAGIC);
    head[4..6].copy_from_slice(&VERSION.to_le_bytes());
    head[6..].copy_from_slice(nonce);
    head
}

fn receive_head(link: &mut dyn Link) -> Result<[u8; NONCE]> {
    let mut head = [0; HEAD];
    receive(link, &mut head)?;
    let version = u16::from_le_bytes([head[4], head[5]]);
    if head[..4] != MAGIC {
        return Err(Error::protocol("what answers there is no store; check the peer's address"));
    }
    if version != VERSION {
        return Err(Error::protocol(format!(
            "the peer speaks version {version}, this store {VERSION}; run one version everywhere"
        )));
    }
    let mut nonce = [0; NONCE];
    nonce.copy_from_slice(&head[6..]);
    Ok(nonce)
}

fn nonce() -> Result<[u8; NONCE]> {
    let mut bytes = [0; NONCE];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| Error::io("read /dev/urandom", error))?;
    Ok(bytes)
}

fn send(link: &mut dyn Link, bytes: &[u8]) -> Result<()> {
    write_all(link, &mut [IoSlice::new(bytes)]).map_err(failed)
}

fn receive(link: &mut dyn Link, into: &mut [u8]) -> Result<()> {
    read_exact(link, into).map_err(failed)
}

fn failed(error: io::Error) -> Error {
    Error::io("greet a peer", error)
}
