//! Moving down: which blocks are written to disk, and what becomes of each.
//!
//! `next_demotions` keeps the bytes of the chosen blocks in place like a lease does, and charges their
//! tenants for them, until `demoted` says how the write went.

use super::{Charge, bytes_on_disk};
use crate::alloc::ExtentId;
use crate::index::{Index, NONE, NodeId, hash};
use crate::key::Key;
use crate::log::EntryId;

/// Most blocks remembered as worth writing; beyond it they wait until memory runs short.
const WORTH_MAX: usize = 1 << 16;
/// Victims looked at in one go.
const VICTIMS: usize = 64;

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

enum Taken {
    Yes(Demotion),
    /// Larger than what may still be taken.
    NoRoom,
    No,
}

impl Index {
    /// Whether blocks are held in place while they are written.
    pub fn is_demoting(&self) -> bool {
        self.below.as_ref().is_some_and(|below| !below.held.is_empty())
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

    /// The form to be written takes `len` bytes: its tenant is charged for those. False, and nothing
    /// changes, if they are above its quota.
    pub fn recharge(&mut self, demotion: &Demotion, len: u32) -> bool {
        let held = self.below.as_ref().and_then(|below| below.held.get(&demotion.extent));
        let Some(&Charge { row, bytes }) = held else { return false };
        self.tenants.refund_disk(row, bytes);
        let within = self.disk_in_quota(row, bytes_on_disk(len));
        let bytes = if within { bytes_on_disk(len) } else { bytes };
        self.tenants.charge_disk(row, bytes);
        self.below.iter_mut().for_each(|below| {
            below.held.insert(demotion.extent, Charge { row, bytes });
        });
        within
    }

    /// The bytes of a demotion were copied and written as `entry`, or not.
    pub fn demoted(&mut self, demotion: &Demotion, entry: Option<EntryId>) {
        let held = self.below.as_mut().and_then(|below| below.held.remove(&demotion.extent));
        if let Some(Charge { row, bytes }) = held {
            self.tenants.refund_disk(row, bytes);
        }
        let node = self.alloc.owner(demotion.extent).node;
        let waiting = node != NONE && self.nodes[node as usize].disk == NONE;
        if let Some(entry) = entry {
            if waiting {
                self.place(node, entry);
                self.counters.demoted += 1;
            } else {
                self.erase_entry(entry);
            }
        }
        self.let_go(demotion.extent, false);
        self.assert_accounted();
    }

    /// Remember to write a block that was read for the first time.
    pub(in crate::index) fn worth_keeping(&mut self, node: NodeId) {
        let record = &self.nodes[node as usize];
        let here = record.disk == NONE && record.body != NONE;
        if let Some(below) = self.below.as_mut().filter(|b| here && b.worth.len() < WORTH_MAX) {
            below.worth.push_back(node);
        }
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
        let len = self.alloc.owner(extent).len;
        let stored = self.table.find(hash(&record.key), |&other| other == node).is_some();
        let (row, bytes) = (record.tenant(), bytes_on_disk(len));
        let held = self.below.as_ref().is_none_or(|below| below.held.contains_key(&extent));
        if held || !self.disk_in_quota(row, bytes) {
            return Taken::No;
        }
        if len == 0 || !stored || !self.log().is_some_and(|log| log.takes(len)) {
            return Taken::No;
        }
        if u64::from(len) > left {
            return Taken::NoRoom;
        }
        self.hold(extent);
        self.tenants.charge_disk(row, bytes);
        self.below.iter_mut().for_each(|below| {
            below.held.insert(extent, Charge { row, bytes });
        });
        let parent = (record.parent != NONE).then(|| self.nodes[record.parent as usize].key);
        let (offset, tenant) = (self.alloc.offset(extent), self.tenants.print(row));
        Taken::Yes(Demotion { extent, offset, len, key: record.key, parent, tenant })
    }
}
