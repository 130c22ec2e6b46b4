//! The index's view of the disk: which nodes have an entry in the log, and how they lose it.
//!
//! `down` chooses what is written, `up` what is read. In between the caller copies and does I/O
//! without the index. Whatever happened to the block meanwhile wins: an entry whose block was
//! evicted is dropped again.
//!
//! A disk that does not serve holds nothing as far as a match can tell; its entries stay, and count
//! again once it does.

mod down;
mod up;

use std::collections::{HashMap, VecDeque};

use super::{Hint, Index, NONE, NodeId};
use crate::alloc::ExtentId;
use crate::key::Key;
use crate::log::{EntryId, Log, PAGE, Place, Record, pages};
pub use down::Demotion;
pub use up::Promotion;

pub(super) struct Below {
    pub(super) log: Log,
    serving: bool,
    /// Read since they came, and not on disk yet.
    worth: VecDeque<NodeId>,
    /// Dropped before their segment goes: to be cleared in its directory.
    erased: Vec<Erased>,
    /// Blocks held in place while they are written, and what their tenants are charged meanwhile.
    held: HashMap<ExtentId, Charge>,
}

/// Bytes of disk that are not written yet count for their tenant, so that no batch exceeds a quota.
#[derive(Clone, Copy)]
struct Charge {
    row: u32,
    bytes: u64,
}

/// A slot of the log's directory whose record must not come back after a restart, or all of a
/// segment's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Erased {
    /// Which segment.
    pub segment: u32,
    /// Its generation at that time.
    pub generation: u64,
    /// Which slot; None for all, of a segment that is free.
    pub slot: Option<u32>,
}

/// What a record says of a block wherever it is.
#[derive(Debug, Clone, Copy)]
pub struct Header {
    /// Its key.
    pub key: Key,
    /// Its parent's.
    pub parent: Option<Key>,
    /// Fingerprint of its tenant.
    pub tenant: u64,
    /// Bytes of its container.
    pub len: u32,
    /// Their checksum.
    pub sum: u32,
}

impl Index {
    /// Use `log` as the tier below DRAM.
    pub fn set_log(&mut self, mut log: Log) {
        log.set_max_entries(self.limits.max_blocks);
        let (worth, erased, held) = (VecDeque::new(), Vec::new(), HashMap::new());
        self.below = Some(Below { log, serving: true, worth, erased, held });
    }

    /// The log, if there is one.
    pub fn log(&self) -> Option<&Log> {
        self.below.as_ref().map(|below| &below.log)
    }

    /// The log, to plan writes.
    pub fn log_mut(&mut self) -> Option<&mut Log> {
        self.below.as_mut().map(|below| &mut below.log)
    }

    /// Whether the disk's blocks can be read.
    pub fn set_serving(&mut self, serving: bool) {
        if let Some(below) = &mut self.below {
            below.serving = serving;
        }
    }

    /// Slots to clear; those that were not are given back with `put_back_erased`.
    pub fn take_erased(&mut self) -> Vec<Erased> {
        self.below.as_mut().map(|below| std::mem::take(&mut below.erased)).unwrap_or_default()
    }

    /// Slots that are still to be cleared.
    pub fn put_back_erased(&mut self, erased: &[Erased]) {
        self.below.iter_mut().for_each(|below| below.erased.extend_from_slice(erased));
    }

    /// Drop entries of a segment that is to go; their blocks stay if they are in DRAM.
    pub fn drop_entries(&mut self, entries: &[EntryId]) {
        for &entry in entries {
            let Some(log) = self.log_mut() else { return };
            let node = log.owner(entry);
            if node == NONE {
                log.drop_entry(entry);
                continue;
            }
            if self.nodes[node as usize].body == NONE {
                self.leaves_for_good(node);
            }
            self.take_entry(node);
            self.remove_if_empty(node);
        }
    }

    /// The node an entry belongs to, and what its record says, but for its place. None if its block
    /// was evicted.
    pub fn entry_header(&self, entry: EntryId) -> Option<(NodeId, Header)> {
        let log = self.log()?;
        let node = log.owner(entry);
        let record = self.nodes.get(node as usize).filter(|record| record.disk == entry)?;
        let Place { len, sum, .. } = log.place(entry);
        let parent = (record.parent != NONE).then(|| self.nodes[record.parent as usize].key);
        let tenant = self.tenants.print(record.tenant());
        Some((node, Header { key: record.key, parent, tenant, len, sum }))
    }

    /// An entry was copied to another segment: the block is there from now on. False, and the copy
    /// is dropped, if it was evicted meanwhile.
    pub fn moved(&mut self, node: NodeId, from: EntryId, to: EntryId) -> bool {
        let there = self.nodes.get(node as usize).is_some_and(|node| node.disk == from);
        if there && self.log().is_some_and(|log| log.owner(from) == node) {
            self.take_entry(node);
            self.place(node, to);
            return true;
        }
        self.erase_entry(to);
        false
    }

    /// Take back a record that a restart found; records come oldest first. False if it was not
    /// taken: out of place, or the index is full.
    pub fn restore(&mut self, record: &Record) -> bool {
        if self.table.len() + 2 > self.limits.max_blocks {
            return false;
        }
        let Some(entry) = self.log_mut().and_then(|log| log.restore(record)) else { return false };
        let parent = match record.parent {
            Some(key) => self.find(&key).or_else(|| self.new_node(&key, NONE)).unwrap_or(NONE),
            None => NONE,
        };
        let found = self.find(&record.key);
        let Some(node) = found.or_else(|| self.new_node(&record.key, parent)) else { return false };
        self.link(node, parent);
        self.erase(node);
        let row = self.tenants.row_of_print(record.tenant);
        self.nodes[node as usize].set_tenant(row);
        self.comes(node, Hint::NONE);
        self.place(node, entry);
        true
    }

    /// Whether `node` is on a disk that serves.
    pub(super) fn on_disk(&self, node: NodeId) -> bool {
        self.nodes[node as usize].disk != NONE && self.below.as_ref().is_some_and(|b| b.serving)
    }

    /// Drop a node's entry, for good: a restart must not bring it back.
    pub(super) fn erase(&mut self, node: NodeId) {
        if let Some(entry) = self.take_entry(node) {
            self.push_erased(entry);
        }
    }

    /// Give up the segment that loses least. False if there is none.
    pub(super) fn forget_coldest_segment(&mut self) -> bool {
        let Some(log) = self.log() else { return false };
        let Some(victim) = log.victim() else { return false };
        let entries = [log.entries_of(victim, false), log.entries_of(victim, true)].concat();
        self.drop_entries(&entries);
        self.free_segment(victim);
        true
    }

    /// A segment that holds nothing any more is free. Its records stay on disk until they are
    /// cleared: a block dropped with it may be put anew and evicted, and then must not come back.
    pub fn free_segment(&mut self, segment: u32) {
        let Some(log) = self.log_mut() else { return };
        let generation = log.generation_of(segment);
        log.free(segment);
        self.push_erased(Erased { segment, generation, slot: None });
    }

    fn place(&mut self, node: NodeId, entry: EntryId) {
        let row = self.nodes[node as usize].tenant();
        self.nodes[node as usize].disk = entry;
        let Some(log) = self.log_mut() else { return };
        log.adopt(entry, node);
        let bytes = bytes_on_disk(log.place(entry).len);
        self.tenants.charge_disk(row, bytes);
        if !self.readable(node) {
            self.tell(node);
        }
    }

    /// Part a node from its entry, which is dropped; the slot it had.
    fn take_entry(&mut self, node: NodeId) -> Option<Erased> {
        let entry = std::mem::replace(&mut self.nodes[node as usize].disk, NONE);
        if entry == NONE {
            return None;
        }
        let row = self.nodes[node as usize].tenant();
        let log = self.log_mut()?;
        let place = log.place(entry);
        let (segment, slot) = log.drop_entry(entry);
        self.tenants.refund_disk(row, bytes_on_disk(place.len));
        self.counters.disk_dropped += 1;
        if !self.readable(node) {
            self.tell(node);
        }
        Some(Erased { segment, generation: place.generation, slot: Some(slot) })
    }

    /// Drop an entry that no node has, for good.
    pub fn erase_entry(&mut self, entry: EntryId) {
        let Some(log) = self.log_mut() else { return };
        let generation = log.place(entry).generation;
        let (segment, slot) = log.drop_entry(entry);
        self.push_erased(Erased { segment, generation, slot: Some(slot) });
    }

    fn push_erased(&mut self, erased: Erased) {
        if let Some(below) = &mut self.below {
            below.erased.push(erased);
        }
    }
}

/// What a container of `len` bytes takes there.
fn bytes_on_disk(len: u32) -> u64 {
    u64::from(pages(len)) * PAGE as u64
}

#[cfg(test)]
impl Index {
    /// Whether a block is on disk.
    pub(crate) fn is_on_disk(&self, key: &Key) -> bool {
        self.find(key).is_some_and(|node| self.nodes[node as usize].disk != NONE)
    }
}
