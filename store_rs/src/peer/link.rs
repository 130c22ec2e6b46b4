//! The seam to the network: ordered byte streams between two stores.
//!
//! Everything above it (proofs, frames, blocks) is the same on every fabric. An implementation must
//! deliver bytes in order or fail; it need not check them, since blocks carry checksums. Each call
//! ends within the patience that was set, so that a silent peer costs its own thread only.

use std::io::{self, IoSlice};
use std::time::{Duration, Instant};

use crate::error::Result;

/// One connected stream. Dropping it closes it.
pub trait Link: Send {
    /// Read some bytes; 0 at the end of the stream.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// Write some bytes of `parts`, from the first on.
    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Write some bytes of a block, which stay as they are until the other side has said that it has
    /// them: a fabric may send them without a copy.
    fn write_block(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write(&[IoSlice::new(bytes)])
    }

    /// How long one read, and one write, may wait; `TimedOut` or `WouldBlock` after that.
    fn set_patience(&mut self, read: Duration, write: Duration) -> io::Result<()>;

    /// What ends this link from another thread.
    fn cutter(&self) -> io::Result<Cutter>;
}

/// Ends a link; its reads and writes then fail at once.
pub struct Cutter(Box<dyn Fn() + Send + Sync>);

impl Cutter {
    /// From what ends the link. Calling it twice must be harmless.
    pub fn new(cut: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Box::new(cut))
    }

    /// End the link.
    pub fn cut(&self) {
        (self.0)();
    }
}

/// Makes links.
pub trait Transport: Send + Sync {
    /// Connect to `address`, as another store advertises it, before `deadline`.
    fn connect(&self, address: &str, deadline: Instant) -> Result<Box<dyn Link>>;

    /// Start listening, if this store is to be reached by others.
    fn listen(&self) -> Result<Option<Box<dyn Accepting>>>;
}

/// A transport that listens.
pub trait Accepting: Send {
    /// The next link. An error concerns one peer only, and the caller goes on.
    fn accept(&self) -> Result<Box<dyn Link>>;

    /// What others connect to.
    fn address(&self) -> String;

    /// What makes a waiting `accept` return, from another thread.
    fn cutter(&self) -> io::Result<Cutter>;
}

/// Read exactly `into.len()` bytes.
pub(crate) fn read_exact(link: &mut dyn Link, mut into: &mut [u8]) -> io::Result<()> {
    while !into.is_empty() {
        match link.read(into) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => into = &mut into[read..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Write all of `bytes`; see [`Link::write_block`].
pub(crate) fn write_all_of_block(link: &mut dyn Link, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match link.write_block(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Write everything.
pub(crate) fn write_all(link: &mut dyn Link, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
    let mut parts = parts;
    IoSlice::advance_slices(&mut parts, 0);
    while !parts.is_empty() {
        match link.write(parts) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut parts, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
