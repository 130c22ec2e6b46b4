//! How far a start is, for whoever watches it from another thread.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// What takes long in a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Nothing that takes long, or not begun.
    Quick,
    /// Bytes of the arena.
    Reserving,
    /// Segments on disk.
    Recovering,
}

/// Written by the start, read by anybody; the three numbers may be of slightly different moments.
#[derive(Debug, Default)]
pub struct Progress {
    phase: AtomicU8,
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// `phase` begins, with so much to do.
    pub fn begin(&self, phase: Phase, total: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// So much more is done.
    pub fn advance(&self, by: u64) {
        self.done.fetch_add(by, Ordering::Relaxed);
    }

    /// The phase, what is done of it, and all there is to do.
    pub fn read(&self) -> (Phase, u64, u64) {
        let phase = match self.phase.load(Ordering::Relaxed) {
            1 => Phase::Reserving,
            2 => Phase::Recovering,
            _ => Phase::Quick,
        };
        (phase, self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }
}
