//! A lease: the right to read one block's bytes in place, until it is dropped.
//!
//! Holds the connection, so that the session outlives every lease, and the mapping, so that the
//! bytes stay readable even after the store died. The bytes are a view: unverified until `verify`
//! or a copy through `read_into`.

use std::ops::Range;
use std::sync::Arc;

use super::connection::Connection;
use crate::arena::ArenaView;
use crate::block::{self, Corrupt, Decoder, Planes};
use crate::wire::{BlockShape, LeaseEntry, Origin, Request};

/// A leased block. Dropping it ends the lease.
pub struct Lease {
    connection: Arc<Connection>,
    arena: Arc<ArenaView>,
    entry: LeaseEntry,
    /// Ended by its batch, in one message for all.
    ended: bool,
}

impl Lease {
    pub(super) fn new(
        connection: Arc<Connection>,
        arena: Arc<ArenaView>,
        entry: LeaseEntry,
    ) -> Self {
        Self { connection, arena, entry, ended: false }
    }

    /// The block's container, as stored.
    pub fn container(&self) -> &[u8] {
        // SAFETY: leased until `self` is dropped; the range was checked when the lease was made.
        unsafe { self.arena.slice(self.entry.offset, self.entry.len as usize) }
    }

    /// Where the block was when it was asked for.
    pub fn origin(&self) -> Origin {
        self.entry.origin
    }

    /// Bytes of the block.
    pub fn raw_bytes(&self) -> Result<usize, Corrupt> {
        block::raw_bytes(self.container()).inspect_err(|_| self.report())
    }

    /// Shape of the block, and the codec's number of how it is stored.
    pub fn form(&self) -> Result<(BlockShape, u8), Corrupt> {
        block::form(self.container()).inspect_err(|_| self.report())
    }

    /// The block's own bytes in place, unverified; None if they are stored coded.
    pub fn payload(&self) -> Result<Option<&[u8]>, Corrupt> {
        let container = self.container();
        let range = block::payload(container).inspect_err(|_| self.report())?;
        Ok(range.map(|range| &container[range]))
    }

    /// Check every byte. A corrupt block is reported to the store, which drops it.
    pub fn verify(&self) -> Result<(), Corrupt> {
        block::verify(self.container()).inspect_err(|_| self.report())
    }

    /// Copy or decode the block into `out`, verified. Reported to the store if corrupt.
    pub fn read_into(&self, out: &mut [u8]) -> Result<(), Corrupt> {
        block::read_into(self.container(), out).inspect_err(|_| self.report())
    }

    /// The block's planes, to be read one by one.
    pub(super) fn planes(&self) -> Result<Planes, Corrupt> {
        Planes::of(self.container()).inspect_err(|_| self.report())
    }

    /// Copy or decode some planes to their places in `out`, verified. Reported if corrupt.
    pub(super) fn read_planes(
        &self,
        of: &Planes,
        decoder: &mut Decoder,
        planes: Range<u32>,
        out: &mut [u8],
    ) -> Result<(), Corrupt> {
        of.read(decoder, self.container(), planes, out).inspect_err(|_| self.report())
    }

    /// Whether this process was forked from the one that holds the lease; it maps nothing then.
    pub fn is_forked(&self) -> bool {
        self.connection.is_forked()
    }

    fn report(&self) {
        // One way: if it does not arrive, the next reader reports it.
        let _ = self.connection.send(&Request::Corrupt { token: self.entry.token });
    }

    /// End many leases of one connection with one message.
    pub(super) fn end_all(mut leases: Vec<Self>) {
        let Some(connection) = leases.first().map(|lease| Arc::clone(&lease.connection)) else {
            return;
        };
        let mut tokens = Vec::with_capacity(leases.len());
        for lease in &mut leases {
            lease.ended = true;
            tokens.push(lease.entry.token.to_le_bytes());
        }
        // On failure the connection is broken, and its end frees the leases.
        let _ = connection.send(&Request::Release { tokens: &tokens });
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.ended && !self.is_forked() {
            let tokens = [self.entry.token.to_le_bytes()];
            // On failure the connection is broken, and its end frees the lease.
            let _ = self.connection.send(&Request::Release { tokens: &tokens });
        }
    }
}
