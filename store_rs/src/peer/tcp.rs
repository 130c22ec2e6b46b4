//! TCP, plain or under TLS: the transport that is built in.
//!
//! Blocks are copied into the kernel like anything else: `sendfile` from the arena was measured at half
//! the rate, since it goes page by page and the receiver's copy has to follow.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::link::{Accepting, Cutter, Link, Transport};
use super::settings::PeerSettings;
use super::tls::{Tls, TlsLink};
use crate::error::{Error, Result};

/// See the module.
pub struct Tcp {
    listen: Option<String>,
    tls: Option<Tls>,
}

impl Tcp {
    /// From settings, which are checked here; reads the TLS files.
    pub fn new(settings: &PeerSettings) -> Result<Self> {
        let tls = settings.tls.as_ref().map(Tls::load).transpose()?;
        if let Some(listen) = &settings.listen {
            check_listen(listen, tls.is_some() || settings.token.is_some())?;
        }
        Ok(Self { listen: settings.listen.clone(), tls })
    }
}

impl Transport for Tcp {
    fn connect(&self, address: &str, deadline: Instant) -> Result<Box<dyn Link>> {
        let failed = |error: io::Error| Error::io(&format!("connect to the peer {address}"), error);
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(&resolve(address)?, left).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        match &self.tls {
            Some(tls) => Ok(Box::new(TlsLink::new(tls.client()?, stream))),
            None => Ok(Box::new(stream)),
        }
    }

    fn listen(&self) -> Result<Option<Box<dyn Accepting>>> {
        let Some(listen) = &self.listen else { return Ok(None) };
        let listener = TcpListener::bind(resolve(listen)?).map_err(|error| {
            Error::config("store.peer.listen", format!("cannot listen on {listen}: {error}"))
        })?;
        Ok(Some(Box::new(Listening { listener, tls: self.tls.clone() })))
    }
}

struct Listening {
    listener: TcpListener,
    tls: Option<Tls>,
}

impl Accepting for Listening {
    fn accept(&self) -> Result<Box<dyn Link>> {
        let failed = |error| Error::io("accept a peer", error);
        let (stream, _) = self.listener.accept().map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        match &self.tls {
            Some(tls) => Ok(Box::new(TlsLink::new(tls.server()?, stream))),
            None => Ok(Box::new(stream)),
        }
    }

    fn address(&self) -> String {
        self.listener.local_addr().map_or_else(|_| String::new(), |address| address.to_string())
    }

    fn cutter(&self) -> io::Result<Cutter> {
        let listener = self.listener.try_clone()?;
        Ok(Cutter::new(move || {
            // Fails only if it is shut down already.
            let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
        }))
    }
}

impl Link for TcpStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Read::read(self, into)
    }

    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write_vectored(parts)
    }

    fn set_patience(&mut self, read: Duration, write: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(read))?;
        self.set_write_timeout(Some(write))
    }

    fn cutter(&self) -> io::Result<Cutter> {
        let stream = self.try_clone()?;
        Ok(Cutter::new(move || {
            // Fails only if the peer hung up first.
            let _ = stream.shutdown(Shutdown::Both);
        }))
    }
}

fn resolve(address: &str) -> Result<SocketAddr> {
    let wrong = |why: String| {
        Error::config("store.peer.listen", format!("{address:?} is no host:port ({why})"))
    };
    let mut found = address.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    found.next().ok_or_else(|| wrong("the name has no address".to_owned()))
}

/// An address that other machines can reach needs peers that prove themselves.
fn check_listen(listen: &str, proven: bool) -> Result<()> {
    if proven || resolve(listen)?.ip().is_loopback() {
        return Ok(());
    }
    Err(Error::config(
        "store.peer.listen",
        format!(
            "{listen} is open to other machines; set store.peer.token_file or store.peer.tls first"
        ),
    ))
}
