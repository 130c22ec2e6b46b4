//! A node of the key tree: a key, its place in the tree, and where its block's bytes are.
//!
//! 64 bytes; the time of the last use, the tenant, and what the eviction policy remembers share two
//! words, since a million nodes are a matter of bytes.

use mooncake_policy::evict::Trace;

use super::{NONE, NodeId, Tick};
use crate::alloc::ExtentId;
use crate::key::Key;
use crate::log::EntryId;

/// Times are kept in units of 512 µs.
const TICK_SHIFT: u32 = 9;
const TIME: Field = Field { shift: 0, bits: 37 };
const TENANT: Field = Field { shift: 37, bits: 12 };
const CLASS: Field = Field { shift: 49, bits: 8 };
const RUN: Field = Field { shift: 57, bits: 5 };
const READ: Field = Field { shift: 62, bits: 1 };
const COUNTED: Field = Field { shift: 63, bits: 1 };

/// Rows of the tenants' table that a node can name.
pub(super) const MAX_TENANTS: usize = 1 << TENANT.bits;

#[derive(Clone, Copy)]
pub(super) struct Node {
    pub(super) key: Key,
    fields: Fields,
    stamp: u32,
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

/// 37 bits of time (2 years), 12 of tenant, 13 of the policy's, 2 flags.
#[derive(Clone, Copy)]
#[repr(C, packed(4))]
struct Fields(u64);

struct Field {
    shift: u32,
    bits: u32,
}

impl Fields {
    fn get(self, field: &Field) -> u64 {
        self.0 >> field.shift & ((1 << field.bits) - 1)
    }

    fn set(&mut self, field: &Field, value: u64) {
        let mask = ((1 << field.bits) - 1) << field.shift;
        self.0 = self.0 & !mask | value << field.shift & mask;
    }
}

impl Node {
    pub(super) fn new(key: Key, parent: NodeId) -> Self {
        let (fields, stamp) = (Fields(0), 0);
        Self { key, fields, stamp, parent, children: 0, warm: 0, body: NONE, disk: NONE }
    }

    /// Neither bytes nor children: nothing needs it.
    pub(super) fn is_empty(&self) -> bool {
        self.body == NONE && self.disk == NONE && self.children == 0
    }

    /// When it was last used, rounded down.
    pub(super) fn last_used(&self) -> Tick {
        self.fields.get(&TIME) << TICK_SHIFT
    }

    /// Whether it was used at `now` or later, as far as is known.
    pub(super) fn used_since(&self, now: Tick) -> bool {
        self.fields.get(&TIME) >= now >> TICK_SHIFT
    }

    pub(super) fn touch(&mut self, now: Tick) {
        self.fields.set(&TIME, now >> TICK_SHIFT);
    }

    pub(super) fn tenant(&self) -> u32 {
        self.fields.get(&TENANT) as u32
    }

    pub(super) fn set_tenant(&mut self, row: u32) {
        self.fields.set(&TENANT, row.into());
    }

    /// Whether it was wanted again since it came; says so only once.
    pub(super) fn is_first_read(&mut self) -> bool {
        let first = self.fields.get(&READ) == 0;
        self.fields.set(&READ, 1);
        first
    }

    /// Whether its latest use was counted when it came.
    pub(super) fn is_counted(&self) -> bool {
        self.fields.get(&COUNTED) == 1
    }

    pub(super) fn set_counted(&mut self, counted: bool) {
        self.fields.set(&COUNTED, counted.into());
    }

    /// What the policy remembers of it.
    pub(super) fn trace(&self) -> Trace {
        let (class, run) = (self.fields.get(&CLASS) as u8, self.fields.get(&RUN) as u8);
        Trace { stamp: self.stamp, class, run }
    }

    pub(super) fn set_trace(&mut self, trace: Trace) {
        self.stamp = trace.stamp;
        self.fields.set(&CLASS, trace.class.into());
        self.fields.set(&RUN, trace.run.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_word_keeps_its_parts_apart() {
        assert_eq!(size_of::<Node>(), 64);
        let mut node = Node::new([0; 32], NONE);
        node.set_tenant(4095);
        node.touch(1 << 45);
        let trace = Trace { stamp: u32::MAX, class: 0xa5, run: 31 };
        node.set_trace(trace);
        node.set_counted(true);
        assert!(node.is_first_read() && !node.is_first_read());
        node.set_tenant(7);
        assert_eq!((node.last_used(), node.tenant(), node.trace()), (1 << 45, 7, trace));
        assert!(node.is_counted() && node.used_since(1 << 45) && !node.used_since(1 << 46));
    }
}
