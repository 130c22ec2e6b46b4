//! A node of the key tree: a key, its place in the tree, and where its block's bytes are.
//!
//! 60 bytes; the time of the last use, the tenant and the reads share one word, since a million
//! nodes are a matter of bytes.

use super::{NONE, NodeId, Tick};
use crate::alloc::ExtentId;
use crate::key::Key;
use crate::log::EntryId;

const TICK_BITS: u32 = 48;
const TENANT_BITS: u32 = 12;
const READS_SHIFT: u32 = TICK_BITS + TENANT_BITS;
const READS_MAX: u64 = 15;

/// Rows of the tenants' table that a node can name.
pub(super) const MAX_TENANTS: usize = 1 << TENANT_BITS;

#[derive(Clone, Copy)]
pub(super) struct Node {
    pub(super) key: Key,
    used: Used,
    pub(super) parent: NodeId,
    /// Nodes below.
    pub(super) children: u32,
    /// Nodes below that have a body.
    pub(super) warm: u32,
    /// The block's bytes in DRAM, or NONE.
    pub(super) body: ExtentId,
    /// Where they are on disk, or NONE.
    pub(super) disk: EntryId,
}

/// 48 bits of time (9 years of microseconds), 12 of tenant, 4 of reads.
#[derive(Clone, Copy)]
#[repr(C, packed(4))]
struct Used(u64);

impl Node {
    pub(super) fn new(key: Key, parent: NodeId) -> Self {
        Self { key, used: Used(0), parent, children: 0, warm: 0, body: NONE, disk: NONE }
    }

    /// Neither bytes nor children: nothing needs it.
    pub(super) fn is_empty(&self) -> bool {
        self.body == NONE && self.disk == NONE && self.children == 0
    }

    pub(super) fn last_used(&self) -> Tick {
        self.word() & ((1 << TICK_BITS) - 1)
    }

    pub(super) fn touch(&mut self, now: Tick) {
        let time = (1 << TICK_BITS) - 1;
        self.used = Used(self.word() & !time | now & time);
    }

    pub(super) fn tenant(&self) -> u32 {
        (self.word() >> TICK_BITS) as u32 & (MAX_TENANTS as u32 - 1)
    }

    pub(super) fn set_tenant(&mut self, row: u32) {
        let bits = (MAX_TENANTS as u64 - 1) << TICK_BITS;
        self.used = Used(self.word() & !bits | u64::from(row) << TICK_BITS & bits);
    }

    /// How often it was wanted since it came; saturates.
    pub(super) fn reads(&self) -> u64 {
        self.word() >> READS_SHIFT
    }

    pub(super) fn count_read(&mut self) {
        if self.reads() < READS_MAX {
            self.used = Used(self.word() + (1 << READS_SHIFT));
        }
    }

    fn word(&self) -> u64 {
        self.used.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_word_keeps_its_parts_apart() {
        assert_eq!(size_of::<Node>(), 60);
        let mut node = Node::new([0; 32], NONE);
        node.set_tenant(4095);
        node.touch(1 << 47);
        for _ in 0..20 {
            node.count_read();
        }
        node.set_tenant(7);
        assert_eq!((node.last_used(), node.tenant(), node.reads()), (1 << 47, 7, 15));
    }
}
