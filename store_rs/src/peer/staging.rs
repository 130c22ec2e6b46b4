//! Memory that a transfer engine may touch: a few buffers, registered once and used again.
//!
//! The arena is never registered, so nothing that a fabric delivers or a peer asks of it can reach a
//! stored block. A buffer stays mapped and registered until the process ends, because the other side
//! may still read it after its link has ended here. One whose own transfer did not end in time is
//! not used again: the engine may write to it at any later time.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Bytes moved at once.
pub(super) const SLOT: usize = 512 << 10;

/// What moves bytes between registered memory of two processes, such as RDMA reads.
pub trait Engine: Send + Sync {
    /// What other engines call this one.
    fn session(&self) -> &str;

    /// Let `len` bytes at `start`, which stay mapped until the process ends, be read by others.
    fn register(&self, start: usize, len: usize) -> io::Result<()>;

    /// Fill `len` registered bytes at `target` here with those at `source` of the engine `session`.
    /// `TimedOut` if that has not ended within `patience`, and may still happen.
    fn read(
        &self,
        session: &str,
        source: u64,
        target: usize,
        len: usize,
        patience: Duration,
    ) -> io::Result<()>;
}

/// One registered buffer of [`SLOT`] bytes.
pub(super) struct Buffer {
    bytes: Option<&'static mut [u8]>,
    pool: Arc<Staging>,
}

/// All buffers of one store, and the engine that knows them.
pub(super) struct Staging {
    pub(super) engine: Box<dyn Engine>,
    free: Mutex<Vec<&'static mut [u8]>>,
}

impl Staging {
    pub(super) fn new(engine: Box<dyn Engine>) -> Arc<Self> {
        Arc::new(Self { engine, free: Mutex::default() })
    }

    /// A buffer that nobody uses; made and registered if there is none.
    pub(super) fn take(self: &Arc<Self>) -> io::Result<Buffer> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let bytes = match free {
            Some(bytes) => bytes,
            None => {
                let bytes = Box::leak(vec![0; SLOT].into_boxed_slice());
                self.engine.register(bytes.as_ptr() as usize, SLOT)?;
                bytes
            }
        };
        Ok(Buffer { bytes: Some(bytes), pool: Arc::clone(self) })
    }
}

impl Buffer {
    pub(super) fn address(&self) -> usize {
        self.bytes.as_ref().map_or(0, |bytes| bytes.as_ptr() as usize)
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        self.bytes.as_deref_mut().unwrap_or_default()
    }

    /// Fill the first `len` bytes from another engine's memory.
    pub(super) fn pull(
        &mut self,
        session: &str,
        source: u64,
        len: usize,
        patience: Duration,
    ) -> io::Result<()> {
        let target = self.address();
        let pulled = self.pool.engine.read(session, source, target, len, patience);
        if pulled.is_err() {
            self.bytes = None;
        }
        pulled
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(bytes) = self.bytes.take() {
            self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(bytes);
        }
    }
}
