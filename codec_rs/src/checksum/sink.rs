//! A block written in pieces, checksummed as it is written.

use super::{STRIPE, State, Write};
use crate::isa::Isa;

/// Takes decoded pieces into the caller's buffer. A piece still lies in the cache when it arrives, so
/// each byte of the block goes to memory once.
pub(crate) struct Sink<'a> {
    out: &'a mut [u8],
    at: usize,
    write: Write,
    state: State,
}

impl<'a> Sink<'a> {
    /// Fill `out` from its start.
    pub(crate) fn new(out: &'a mut [u8]) -> Self {
        let write = Write::to(out.as_ptr(), out.len());
        Self { out, at: 0, write, state: State::new(Isa::current()) }
    }

    /// Append a piece: whole stripes, unless it is the last.
    ///
    /// # Panics
    /// When the pieces are more than the buffer holds.
    pub(crate) fn push(&mut self, piece: &[u8]) {
        let target = &mut self.out[self.at..self.at + piece.len()];
        debug_assert!(self.at.is_multiple_of(STRIPE));
        // SAFETY: both slices are `piece.len()` bytes long and, being borrowed, do not overlap.
        unsafe {
            self.state.absorb(piece.as_ptr(), target.as_mut_ptr(), piece.len(), self.write);
        }
        self.at += piece.len();
    }

    /// The checksum of the whole buffer, once it is full.
    pub(crate) fn finish(self) -> u64 {
        assert!(self.at == self.out.len(), "the block was not written to its end");
        self.write.fence();
        self.state.finish()
    }
}
