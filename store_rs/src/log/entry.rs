//! An entry: what the log remembers of one block, in as few bytes as it takes.

use super::record::{PAGE, pages};

/// Names an entry until its segment goes: segment and slot.
pub type EntryId = u32;

/// An entry: 14 bytes. `owner` is the index's node.
#[derive(Clone, Copy)]
#[repr(C, packed(2))]
pub(super) struct Entry {
    pub(super) owner: u32,
    /// Bytes of the container, which is below a segment, and on top whether it was read since.
    pub(super) len_read: u32,
    pub(super) sum: u32,
    pub(super) page: u16,
}

pub(super) const READ: u32 = 1 << 31;

impl Entry {
    /// What is left of a dropped one.
    pub(super) const DEAD: Self = Self { owner: u32::MAX, len_read: 0, sum: 0, page: 0 };

    pub(super) fn len(self) -> u32 {
        self.len_read & !READ
    }

    pub(super) fn is_read(self) -> bool {
        self.len_read & READ != 0
    }

    /// Bytes on disk.
    pub(super) fn bytes(self) -> u64 {
        u64::from(pages(self.len())) * PAGE as u64
    }
}

pub(super) fn id(segment: u32, slot: u32) -> EntryId {
    segment << 16 | slot
}

/// Segment and slot.
pub(super) fn parts(id: EntryId) -> (u32, u32) {
    (id >> 16, id & 0xffff)
}
