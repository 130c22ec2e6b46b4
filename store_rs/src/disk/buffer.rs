//! Memory for direct I/O: zeroed, and aligned to a page.

use crate::log::PAGE;

pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// `len` bytes.
    pub(super) fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE];
        // A byte pointer can always be aligned within a page.
        let start = bytes.as_ptr().align_offset(PAGE);
        Self { bytes, start, len }
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}
