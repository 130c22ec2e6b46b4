//! Mutual TLS 1.3: both sides show a certificate of one authority.
//!
//! Peers are known by addresses that change, so what is checked beside the signature is one name,
//! the same for every store of a cluster, that each certificate must carry.

use std::fs;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::ops::DerefMut;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, ConnectionCommon, RootCertStore, ServerConfig,
    ServerConnection, SideData, StreamOwned,
};

use super::link::{Cutter, Link};
use super::settings::TlsFiles;
use crate::error::{Error, Result};

/// Most plaintext handed to rustls at once: it buffers what it encrypts.
const CHUNK: usize = 256 << 10;

/// Both roles of one store, from its files.
#[derive(Clone)]
pub(super) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// Read and check the files.
    pub(super) fn load(files: &TlsFiles) -> Result<Self> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let wrong = |error: rustls::Error| Error::config("store.peer.tls", error.to_string());
        let mut roots = RootCertStore::empty();
        for certificate in certificates("store.peer.tls.ca", &files.ca)? {
            roots.add(certificate).map_err(wrong)?;
        }
        let roots = Arc::new(roots);
        let chain = certificates("store.peer.tls.certificate", &files.certificate)?;
        let key = |path| -> Result<PrivateKeyDer<'static>> {
            PrivateKeyDer::from_pem_slice(&read("store.peer.tls.key", path)?).map_err(|error| {
                Error::config("store.peer.tls.key", format!("no private key: {error}"))
            })
        };
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(|error| Error::config("store.peer.tls.ca", error.to_string()))?;
        let versions = &[&rustls::version::TLS13];
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(wrong)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key(&files.key)?)
            .map_err(wrong)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(wrong)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key(&files.key)?)
            .map_err(wrong)?;
        let name = ServerName::try_from(files.name.clone())
            .map_err(|error| Error::config("store.peer.tls.name", error.to_string()))?;
        Ok(Self { client: Arc::new(client), server: Arc::new(server), name })
    }

    pub(super) fn client(&self) -> Result<ClientConnection> {
        ClientConnection::new(Arc::clone(&self.client), self.name.clone())
            .map_err(|error| Error::unavailable(error.to_string()))
    }

    pub(super) fn server(&self) -> Result<ServerConnection> {
        ServerConnection::new(Arc::clone(&self.server))
            .map_err(|error| Error::unavailable(error.to_string()))
    }
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>> {
    fs::read(path)
        .map_err(|error| Error::config(field, format!("cannot read {}: {error}", path.display())))
}

fn certificates(field: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let wrong = |why: String| Error::config(field, format!("{}: {why}", path.display()));
    let found: std::result::Result<Vec<_>, _> =
        CertificateDer::pem_slice_iter(&read(field, path)?).collect();
    let found = found.map_err(|error| wrong(error.to_string()))?;
    if found.is_empty() { Err(wrong("holds no certificate".to_owned())) } else { Ok(found) }
}

/// A TCP stream under TLS. The handshake happens with the first bytes.
pub(super) struct TlsLink<C: DerefMut<Target = ConnectionCommon<S>>, S: SideData>(
    StreamOwned<C, TcpStream>,
);

impl<C: DerefMut<Target = ConnectionCommon<S>>, S: SideData> TlsLink<C, S> {
    pub(super) fn new(session: C, stream: TcpStream) -> Self {
        Self(StreamOwned::new(session, stream))
    }
}

impl<C, S> Link for TlsLink<C, S>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Send,
    S: SideData,
{
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        io::Read::read(&mut self.0, into)
    }

    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut written = 0;
        for part in parts {
            let room = (CHUNK - written).min(part.len());
            let taken = io::Write::write(&mut self.0, &part[..room])?;
            written += taken;
            if taken < part.len() || written == CHUNK {
                break;
            }
        }
        // What stays in the session's buffer would wait for the next write.
        io::Write::flush(&mut self.0)?;
        Ok(written)
    }

    fn set_patience(&mut self, read: Duration, write: Duration) -> io::Result<()> {
        self.0.sock.set_patience(read, write)
    }

    fn cutter(&self) -> io::Result<Cutter> {
        self.0.sock.cutter()
    }
}
