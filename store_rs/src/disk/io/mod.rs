//! Reading and writing the log's file, behind two small traits, so that tests can be the disk.
//!
//! [`Io`] blocks and is what the writer, the recovery and the probes use. [`Queue`] keeps many
//! reads in flight and is what promotions use: io_uring where the kernel allows it, else threads
//! that call [`Io`]. Every transfer is whole or an error: short ones go on where they stopped, and
//! EINTR and EAGAIN are tried again.

mod file;
mod pool;
mod uring;

use std::io;
use std::time::Duration;

pub(super) use file::LogFile;
pub(super) use pool::Pool;
pub(super) use uring::Uring;

/// Positional transfers of whole pages, from and to memory aligned to a page.
pub(super) trait Io: Send + Sync {
    /// Fill `target` from `offset` on.
    fn read_at(&self, offset: u64, target: &mut [u8]) -> io::Result<()>;

    /// Write all of `bytes` at `offset`.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Have the file's blocks from `offset` on reserved, so that writing them cannot lack space.
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()>;
}

/// One read of a [`Queue`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Read {
    /// Comes back with its end.
    pub(super) id: u64,
    /// Where in the file; a multiple of a page.
    pub(super) offset: u64,
    /// Where to; aligned to a page.
    pub(super) target: *mut u8,
    /// Whole pages.
    pub(super) len: usize,
}

// SAFETY: the pointer is passed on, never shared; `Queue::start` says who may use the memory.
unsafe impl Send for Read {}

/// Reads in flight.
pub(super) trait Queue: Send {
    /// Begin a read.
    ///
    /// # Safety
    /// `target` must be writable for `len` bytes, and nobody else may use them, until `wait` has
    /// returned the read's id: also after a deadline, and also if the queue is dropped.
    unsafe fn start(&mut self, read: Read);

    /// Hand to the disk what was started, without waiting; `wait` does so too.
    fn submit(&mut self) {}

    /// Wait until a read has ended, for `patience` at most; ids with how they ended.
    fn wait(&mut self, patience: Duration, ended: &mut Vec<(u64, io::Result<()>)>);
}

/// Errors after which the same transfer is tried again.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}
