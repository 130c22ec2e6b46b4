//! The index's view of the disk: which nodes have an entry in the log, what is worth one, and the
//! steps of moving a block down and up.
//!
//! Moving down: `next_demotions` keeps the bytes of the chosen blocks in place like a lease does,
//! until `demoted` says what became of each. Moving up: `promote` reserves an extent and keeps the
//! segment from being overwritten, until `read_ended`. In between the caller copies and does I/O
//! without the index. Whatever happened to the block meanwhile wins: an entry whose block was
//! evicted is dropped again.
//!
//! A disk that does not serve holds nothing as far as a match can tell; its entries stay, and count
//! again once it does.

use std::collections::VecDeque;

use super::{Index, NONE, NodeId, Tick};
use crate::alloc::ExtentId;
use crate::key::Key;
use crate::log::{EntryId, Log, PAGE, Place, Record, pages};

/// Most blocks remembered as worth writing; beyond it they wait for their next read.
const WORTH_MAX: usize = 1 << 16;
/// Victims looked at in one go.
const VICTIMS: usize = 64;

pub(super) struct Below {
    pub(super) log: Log,
    serving: bool,
    /// Read since they came, and not on disk yet.
    worth: VecDeque<NodeId>,
    /// Dropped before their segment goes: to be cleared in its directory.
    erased: Vec<Erased>,
    /// Blocks held in place while they are written.
    held: usize,
}

/// A slot of the log's directory whose record must not come back after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Erased {
    /// Which segment.
    pub segment: u32,
    /// Its generation at that time.
    pub generation: u64,
    /// Which slot.
    pub slot: u32,
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

/// A block on its way to disk.
#[derive(Debug, Clone, Copy)]
pub struct Demotion {
    /// Its extent, held until `demoted`.
    pub extent: ExtentId,
    /// Where in the arena its container is.
    pub offset: u64,
    /// Bytes of it.
    pub len: u32,
    /// Its key.
    pub key: Key,
    /// Its parent's.
    pub parent: Option<Key>,
    /// Fingerprint of its tenant.
    pub tenant: u64,
}

/// A block on its way from disk.
#[derive(Debug, Clone, Copy)]
pub struct Promotion {
    /// The extent reserved for it.
    pub extent: ExtentId,
    /// Where in the arena, aligned for direct I/O; whole pages.
    pub offset: u64,
    /// Where on disk.
    pub place: Place,
    /// The same as an offset in the file.
    pub file_offset: u64,
}

impl Index {
    /// Use `log` as the tier below DRAM.
    pub fn set_log(&mut self, log: Log) {
        let (worth, erased) = (VecDeque::new(), Vec::new());
        self.below = Some(Below { log, serving: true, worth, erased, held: 0 });
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

    /// Slots to clear, each given out once.
    pub fn take_erased(&mut self) -> Vec<Erased> {
        self.below.as_mut().map(|below| std::mem::take(&mut below.erased)).unwrap_or_default()
    }

    /// Whether blocks are held in place while they are written.
    pub fn is_demoting(&self) -> bool {
        self.below.as_ref().is_some_and(|below| below.held > 0)
    }

    /// Whether free memory runs short, so that blocks are about to be evicted.
    pub fn is_pressed(&self) -> bool {
        self.alloc.free_bytes() < self.alloc.capacity() / 8
    }

    /// Blocks to write next, `most` bytes of them: those that were read; with `cold`, also those
    /// that go from DRAM next. Each must be given to `demoted`.
    pub fn next_demotions(&mut self, most: u64, cold: bool) -> Vec<Demotion> {
        let mut chosen = Vec::new();
        let mut left = most;
        while let Some(node) = self.below.as_mut().and_then(|below| below.worth.pop_front()) {
            match self.demotion(node, left) {
                Taken::No => {}
                Taken::NoRoom => {
                    self.below.as_mut().into_iter().for_each(|b| b.worth.push_front(node));
                    return chosen;
                }
                Taken::Yes(demotion) => {
                    left -= u64::from(demotion.len);
                    chosen.push(demotion);
                }
            }
        }
        if cold {
            self.demote_victims(left, &mut chosen);
        }
        chosen
    }

    /// As `next_demotions`, of every block not on disk, from node `from` on; where to go on.
    pub fn next_drained(&mut self, from: NodeId, most: u64) -> (Vec<Demotion>, Option<NodeId>) {
        let mut chosen = Vec::new();
        let mut left = most;
        for node in from..self.nodes.len() as NodeId {
            match self.demotion(node, left) {
                Taken::No => {}
                Taken::NoRoom => return (chosen, Some(node)),
                Taken::Yes(demotion) => {
                    left -= u64::from(demotion.len);
                    chosen.push(demotion);
                }
            }
        }
        (chosen, None)
    }

    /// The bytes of a demotion were copied and written as `entry`, or not.
    pub fn demoted(&mut self, demotion: &Demotion, entry: Option<EntryId>) {
        let node = self.bodies[demotion.extent as usize].node;
        let waiting = node != NONE && self.nodes[node as usize].disk == NONE;
        if let Some(entry) = entry {
            if waiting {
                self.place(node, entry);
                self.counters.demoted += 1;
            } else {
                self.erase_entry(entry);
            }
        }
        self.below.iter_mut().for_each(|below| below.held -= 1);
        self.drop_lease(demotion.extent, false);
        self.assert_accounted();
    }

    /// Reserve room for a block that is on disk only. What was used since `now` makes no room for it.
    pub fn promote(&mut self, key: &Key, now: Tick) -> Option<Promotion> {
        let node = self.find(key).filter(|&node| self.on_disk(node))?;
        if self.body(node).is_some() {
            return None;
        }
        let entry = self.nodes[node as usize].disk;
        let place = self.log_mut()?.pin_for_read(entry);
        let bytes = u64::from(pages(place.len)) * PAGE as u64;
        if !self.room_in_quota(node, bytes) {
            self.log_mut()?.unpin(&place);
            return None;
        }
        let Some(extent) = self.attach(node, bytes, PAGE as u64, now) else {
            self.log_mut()?.unpin(&place);
            return None;
        };
        let file_offset = self.log()?.offset(&place);
        Some(Promotion { extent, offset: self.alloc.offset(extent), place, file_offset })
    }

    /// Whether a block is on disk only.
    pub fn is_below(&self, key: &Key) -> bool {
        let node = self.find(key).filter(|&node| self.on_disk(node));
        node.is_some_and(|node| self.body(node).is_none())
    }

    /// A promotion's read has ended; if it failed, its entry goes.
    pub fn read_ended(&mut self, key: &Key, place: &Place, good: bool) {
        self.counters.promoted += u64::from(good);
        self.checked(key, place, good);
    }

    /// A block's place on disk, kept from being overwritten until `checked`, and its offset.
    pub fn pin_on_disk(&mut self, key: &Key) -> Option<(Place, u64)> {
        let node = self.find(key).filter(|&node| self.on_disk(node))?;
        let entry = self.nodes[node as usize].disk;
        let log = self.log_mut()?;
        let place = log.place(entry);
        log.pin(&place);
        Some((place, log.offset(&place)))
    }

    /// The bytes at a pinned place were read; if they were wrong, the entry goes.
    pub fn checked(&mut self, key: &Key, place: &Place, good: bool) {
        let Some(log) = self.log_mut() else { return };
        log.unpin(place);
        if good {
            return;
        }
        self.counters.disk_misses += 1;
        let Some(node) = self.find(key) else { return };
        let entry = self.nodes[node as usize].disk;
        let same = entry != NONE && self.log().is_some_and(|log| log.place(entry) == *place);
        if same {
            self.erase(node);
            self.remove_if_empty(node);
        }
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
        self.place(node, entry);
        true
    }

    /// Whether `node` is on a disk that serves.
    pub(super) fn on_disk(&self, node: NodeId) -> bool {
        self.nodes[node as usize].disk != NONE && self.below.as_ref().is_some_and(|b| b.serving)
    }

    /// Remember to write a block that was read for the first time.
    pub(super) fn worth_keeping(&mut self, node: NodeId) {
        let record = &self.nodes[node as usize];
        let first = record.reads() == 1 && record.disk == NONE && record.body != NONE;
        if let Some(below) = self.below.as_mut().filter(|b| first && b.worth.len() < WORTH_MAX) {
            below.worth.push_back(node);
        }
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
        self.log_mut().into_iter().for_each(|log| log.free(victim));
        true
    }

    fn demote_victims(&mut self, mut left: u64, chosen: &mut Vec<Demotion>) {
        let mut seen = Vec::new();
        while seen.len() < VICTIMS {
            let Some(node) = self.next_victim() else { break };
            seen.push(node);
            match self.demotion(node, left) {
                Taken::No => {}
                Taken::NoRoom => break,
                Taken::Yes(demotion) => {
                    left -= u64::from(demotion.len);
                    chosen.push(demotion);
                }
            }
        }
        for node in seen {
            self.offer(node);
        }
    }

    fn demotion(&mut self, node: NodeId, left: u64) -> Taken {
        let Some(&record) = self.nodes.get(node as usize) else { return Taken::No };
        let Some(extent) = self.body(node).filter(|_| record.disk == NONE) else {
            return Taken::No;
        };
        let len = self.bodies[extent as usize].len;
        let stored = self.table.find(super::hash(&record.key), |&other| other == node).is_some();
        let bytes = u64::from(pages(len)) * PAGE as u64;
        if !self.disk_in_quota(record.tenant(), bytes) {
            return Taken::No;
        }
        if len == 0 || !stored || !self.log().is_some_and(|log| log.takes(len)) {
            return Taken::No;
        }
        if u64::from(len) > left {
            return Taken::NoRoom;
        }
        self.change(extent, |body| body.leases += 1);
        self.below.iter_mut().for_each(|below| below.held += 1);
        let parent = (record.parent != NONE).then(|| self.nodes[record.parent as usize].key);
        let (offset, tenant) = (self.alloc.offset(extent), self.tenants.print(record.tenant()));
        Taken::Yes(Demotion { extent, offset, len, key: record.key, parent, tenant })
    }

    fn place(&mut self, node: NodeId, entry: EntryId) {
        let row = self.nodes[node as usize].tenant();
        self.nodes[node as usize].disk = entry;
        let Some(log) = self.log_mut() else { return };
        log.adopt(entry, node);
        let bytes = u64::from(pages(log.place(entry).len)) * PAGE as u64;
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
        self.tenants.refund_disk(row, u64::from(pages(place.len)) * PAGE as u64);
        self.counters.disk_dropped += 1;
        if !self.readable(node) {
            self.tell(node);
        }
        Some(Erased { segment, generation: place.generation, slot })
    }

    fn erase_entry(&mut self, entry: EntryId) {
        let Some(log) = self.log_mut() else { return };
        let generation = log.place(entry).generation;
        let (segment, slot) = log.drop_entry(entry);
        self.push_erased(Erased { segment, generation, slot });
    }

    fn push_erased(&mut self, erased: Erased) {
        if let Some(below) = &mut self.below {
            below.erased.push(erased);
        }
    }
}

enum Taken {
    Yes(Demotion),
    /// Larger than what may still be taken.
    NoRoom,
    No,
}

#[cfg(test)]
impl Index {
    /// Whether a block is on disk.
    pub(crate) fn is_on_disk(&self, key: &Key) -> bool {
        self.find(key).is_some_and(|node| self.nodes[node as usize].disk != NONE)
    }
}
