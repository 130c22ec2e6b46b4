//! A disk in memory that fails as it is told to, by a seed.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::disk::io::{Io, Queue, Read};

/// Bytes a device writes at once or not at all.
const SECTOR: usize = 512;

/// A generator that gives the same numbers for the same seed everywhere.
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 16) % bound
    }

    /// True once in `odds`; never for 0.
    pub(super) fn one_in(&mut self, odds: u64) -> bool {
        odds > 0 && self.below(odds) == 0
    }
}

/// How often each fault happens: once in so many operations; 0 never.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Faults {
    pub(super) read_error: u64,
    pub(super) write_error: u64,
    pub(super) no_space: u64,
    /// Bytes that read back other than they were written.
    pub(super) rot: u64,
    /// Bytes written to another place than asked for.
    pub(super) misdirected: u64,
}

pub(super) struct Disk {
    pub(super) bytes: Vec<u8>,
    pub(super) faults: Faults,
    pub(super) rng: Rng,
    /// The machine dies in the middle of the write after so many.
    pub(super) dies_after: Option<u64>,
    pub(super) dead: bool,
    /// Largest offset that space was ever reserved up to.
    pub(super) allocated: u64,
}

#[derive(Clone)]
pub(super) struct Fake(Arc<Mutex<Disk>>);

impl Fake {
    pub(super) fn new(seed: u64, bytes: usize, faults: Faults) -> Self {
        Self(Arc::new(Mutex::new(Disk {
            bytes: vec![0; bytes],
            faults,
            rng: Rng::new(seed ^ 0xd15c),
            dies_after: None,
            dead: false,
            allocated: 0,
        })))
    }

    pub(super) fn disk(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().expect("no panic while locked")
    }
}

fn failed() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

impl Io for Fake {
    fn read_at(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let mut disk = self.disk();
        let odds = disk.faults.read_error;
        if disk.dead || disk.rng.one_in(odds) {
            return Err(failed());
        }
        let start = offset as usize;
        target.copy_from_slice(&disk.bytes[start..start + target.len()]);
        let odds = disk.faults.rot;
        if disk.rng.one_in(odds) {
            let bit = disk.rng.below(target.len() as u64 * 8) as usize;
            target[bit / 8] ^= 1 << (bit % 8);
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut disk = self.disk();
        if disk.dead {
            return Err(failed());
        }
        let dies = disk.dies_after.is_some_and(|left| left == 0);
        disk.dies_after = disk.dies_after.map(|left| left.saturating_sub(1));
        let (errors, misdirected) = (disk.faults.write_error, disk.faults.misdirected);
        let fails = disk.rng.one_in(errors);
        let mut start = offset as usize;
        if disk.rng.one_in(misdirected) {
            let pages = (disk.bytes.len() - bytes.len()) / 4096;
            start = disk.rng.below(pages as u64 + 1) as usize * 4096;
        }
        for (at, sector) in bytes.chunks(SECTOR).enumerate() {
            // What was not finished is torn anywhere, in no order.
            if (dies || fails) && disk.rng.one_in(2) {
                continue;
            }
            let at = start + at * SECTOR;
            disk.bytes[at..at + sector.len()].copy_from_slice(sector);
        }
        disk.dead |= dies;
        if dies || fails { Err(failed()) } else { Ok(()) }
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut disk = self.disk();
        let odds = disk.faults.no_space;
        if disk.rng.one_in(odds) {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        disk.allocated = disk.allocated.max(offset + len);
        Ok(())
    }
}

/// Reads that happen when they are waited for, out of order.
pub(super) struct Late {
    fake: Fake,
    reads: Vec<Read>,
}

impl Late {
    pub(super) fn new(fake: &Fake) -> Self {
        Self { fake: fake.clone(), reads: Vec::new() }
    }
}

impl Queue for Late {
    unsafe fn start(&mut self, read: Read) {
        self.reads.push(read);
    }

    fn wait(&mut self, _patience: Duration, ended: &mut Vec<(u64, io::Result<()>)>) {
        if self.reads.is_empty() {
            return;
        }
        let pick = self.fake.disk().rng.below(self.reads.len() as u64) as usize;
        let read = self.reads.swap_remove(pick);
        // SAFETY: whoever started the read gave this memory to it alone.
        let target = unsafe { std::slice::from_raw_parts_mut(read.target, read.len) };
        ended.push((read.id, self.fake.read_at(read.offset, target)));
    }
}
