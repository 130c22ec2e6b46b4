//! Reading many blocks plane by plane, so that the first layers can be used while others arrive.
//!
//! Holds the blocks' leases until it is dropped. What it has copied is verified, plane by plane. A
//! block that turns out corrupt ends the reading there: it and those after it are given up.

use std::ops::Range;

use super::{Client, Deadline, Lease, checked, leading};
use crate::block::{Decoder, Planes};
use crate::error::Result;
use crate::key::Key;
use crate::wire::{Caller, MAX_ITEMS, Origin};

/// Leading present blocks of a chain, on their way into buffers.
pub struct Reading {
    blocks: Vec<(Lease, Planes)>,
    /// One for each thread that copies.
    decoders: Vec<Decoder>,
}

impl Client {
    /// Lease the leading present blocks of `keys`, those of `nbytes` bytes each, to be read on up to
    /// `threads` threads.
    pub fn open<'a>(
        &self,
        keys: &[Key],
        nbytes: usize,
        threads: usize,
        caller: impl Into<Caller<'a>>,
        deadline: Deadline,
    ) -> Result<Reading> {
        let caller = checked(caller)?;
        let mut blocks = Vec::with_capacity(keys.len());
        for keys in keys.chunks(MAX_ITEMS) {
            let wanted = blocks.len() + keys.len();
            let leases =
                self.lease_some(keys, caller, Some(keys.len()), deadline)?.into_iter().flatten();
            blocks.extend(leases.map_while(|lease| {
                let fits = lease.raw_bytes() == Ok(nbytes);
                let planes = fits.then(|| lease.planes().ok())??;
                Some((lease, planes))
            }));
            if blocks.len() < wanted {
                break;
            }
        }
        let threads = threads.clamp(1, blocks.len().max(1));
        Ok(Reading { blocks, decoders: (0..threads).map(|_| Decoder::new()).collect() })
    }
}

impl Reading {
    /// Blocks that can still be read.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Where each of them was when it was asked for.
    pub fn origins(&self) -> impl Iterator<Item = Origin> {
        self.blocks.iter().map(|(lease, _)| lease.origin())
    }

    /// Copy some planes of every block to their places in its buffer; how many blocks are left. The
    /// one at which the deadline passes, and those after it, are given up.
    pub fn read_planes(
        &mut self,
        planes: &Range<u32>,
        buffers: &mut [&mut [u8]],
        deadline: Deadline,
    ) -> usize {
        let readers = self.decoders.iter_mut().map(|decoder| {
            |((lease, of), buffer): (&(Lease, Planes), &mut &mut [u8])| {
                let read = lease.read_planes(of, decoder, planes.clone(), buffer);
                read.is_ok() && !deadline.passed()
            }
        });
        let left = leading(self.blocks.iter().zip(buffers), readers.collect());
        self.blocks.truncate(left);
        self.blocks.len()
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        Lease::end_all(self.blocks.drain(..).map(|(lease, _)| lease).collect());
    }
}
