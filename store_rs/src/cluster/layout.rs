//! How the cluster index lies in its memfd, for the store that writes it and the processes that
//! read it.
//!
//! ```text
//! 0        header: magic, slots, moved, entries, node rows, replica rows
//! 4 KiB    nodes, 128 bytes each: one per store
//! 132 KiB  replicas, 64 bytes each
//! 260 KiB  slots, 16 bytes each
//! ```
//!
//! All words are atomics, so that a reference to them is sound whoever writes. The file's size is
//! sealed, and checked against the number of slots before a row is touched.

use std::sync::atomic::{AtomicU64, Ordering};

use super::slot::{Row, Slot};
use crate::error::{Error, Result};

/// Stores a cluster may have.
pub const NODES_MAX: usize = 1024;
/// Replicas a cluster may have.
pub const REPLICAS_MAX: usize = 2048;

pub(super) const NODE_WORDS: usize = 15;
pub(super) const REPLICA_WORDS: usize = 7;

const MAGIC: u64 = u64::from_le_bytes(*b"MKCLUST1");
const NODES_AT: usize = 4096;
const REPLICAS_AT: usize = NODES_AT + NODES_MAX * 8 * (NODE_WORDS + 1);
const SLOTS_AT: usize = REPLICAS_AT + REPLICAS_MAX * 8 * (REPLICA_WORDS + 1);
const SLOT_BYTES: usize = 16;

#[repr(C)]
pub(super) struct Header {
    magic: AtomicU64,
    slots: AtomicU64,
    /// 1 once a larger index took over.
    pub(super) moved: AtomicU64,
    /// Slots in use.
    pub(super) entries: AtomicU64,
    /// Node rows that were ever written.
    pub(super) nodes: AtomicU64,
    /// Replica rows that were ever written.
    pub(super) replicas: AtomicU64,
}

/// Bytes of an index with this many slots.
pub(super) fn bytes_of(slots: usize) -> usize {
    SLOTS_AT + slots * SLOT_BYTES
}

/// Slots that fit `bytes`.
pub(super) fn slots_in(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX).saturating_sub(SLOTS_AT) / SLOT_BYTES
}

/// References into a mapping, which must outlive it.
#[derive(Clone, Copy)]
pub(super) struct Region {
    base: *const u8,
    slots: usize,
}

// SAFETY: everything reachable is atomics in a mapping that the owner keeps.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Lay out a fresh mapping.
    ///
    /// # Safety
    /// `base` must be page aligned, zeroed, writable for `bytes_of(slots)` and mapped as long as
    /// the region is used.
    pub(super) unsafe fn create(base: *mut u8, slots: usize) -> Self {
        let region = Self { base: base.cast_const(), slots };
        region.header().magic.store(MAGIC, Ordering::Relaxed);
        region.header().slots.store(slots as u64, Ordering::Release);
        region
    }

    /// Check and take what a store laid out.
    ///
    /// # Safety
    /// `base` must be page aligned, readable for `bytes` and mapped as long as the region is used.
    pub(super) unsafe fn open(base: *const u8, bytes: usize) -> Result<Self> {
        let region = Self { base, slots: slots_in(bytes as u64) };
        let header = region.header();
        let slots = header.slots.load(Ordering::Acquire);
        let same = header.magic.load(Ordering::Relaxed) == MAGIC && region.slots > 0;
        if same && slots <= region.slots as u64 {
            return Ok(Self { base, slots: slots as usize });
        }
        Err(Error::protocol("the store passed another kind of cluster index; restart it"))
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: the mapping is larger than the header and aligned; all fields are atomics.
        unsafe { &*self.base.cast() }
    }

    pub(super) fn node(&self, at: usize) -> &Row<NODE_WORDS> {
        assert!(at < NODES_MAX, "no node row {at}");
        // SAFETY: just checked to lie between the header and the replicas; all atomics.
        unsafe { &*self.base.add(NODES_AT).cast::<Row<NODE_WORDS>>().add(at) }
    }

    pub(super) fn replica(&self, at: usize) -> &Row<REPLICA_WORDS> {
        assert!(at < REPLICAS_MAX, "no replica row {at}");
        // SAFETY: just checked to lie between the nodes and the slots; all atomics.
        unsafe { &*self.base.add(REPLICAS_AT).cast::<Row<REPLICA_WORDS>>().add(at) }
    }

    pub(super) fn slots(&self) -> &[Slot] {
        // SAFETY: `slots` of them fit the mapping (by the constructors); all atomics.
        unsafe { std::slice::from_raw_parts(self.base.add(SLOTS_AT).cast(), self.slots) }
    }

    /// Where a fingerprint belongs: the bits of a key are uniform as they are.
    pub(super) fn home(&self, fingerprint: u64) -> usize {
        ((u128::from(fingerprint) * self.slots as u128) >> 64) as usize
    }
}

/// What a slot means, packed into one word that is never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Meaning {
    pub(super) check: u16,
    pub(super) holder: u16,
    pub(super) tier: u8,
    /// When it was written, in steps of 16 s.
    pub(super) age: u16,
}

impl Meaning {
    pub(super) fn pack(self) -> u64 {
        1 << 63
            | u64::from(self.age) << 40
            | u64::from(self.tier) << 32
            | u64::from(self.holder) << 16
            | u64::from(self.check)
    }

    pub(super) fn unpack(word: u64) -> Self {
        Self {
            check: word as u16,
            holder: (word >> 16) as u16,
            tier: (word >> 32) as u8,
            age: (word >> 40) as u16,
        }
    }
}

const _: () = {
    assert!(size_of::<Row<NODE_WORDS>>() == 128 && size_of::<Row<REPLICA_WORDS>>() == 64);
    assert!(size_of::<Slot>() == SLOT_BYTES && size_of::<Header>() <= NODES_AT);
};
