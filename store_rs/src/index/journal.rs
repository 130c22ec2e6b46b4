//! What changed in the index, in order: what routers and other stores follow.
//!
//! Owns the last [`KEPT`] changes, numbered from 0. A follower that fell further behind, or knows
//! an earlier start of this store, takes a snapshot: it notes the next number, reads all entries
//! in parts, and then applies the changes from that number on. Changes that a part already
//! shows are applied twice, which changes nothing.

use std::collections::VecDeque;

use super::{Index, NONE, NodeId, hash};
use crate::key::Key;

/// Changes kept for followers.
pub(super) const KEPT: usize = 1 << 14;

/// Bytes of them.
pub const JOURNAL_BYTES: u64 = (KEPT * size_of::<Entry>()) as u64;

/// One key and where its block is: 80 bits of it, enough to be wrong never in practice, and a
/// wrong entry costs a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The key's first 64 bits.
    pub fingerprint: u64,
    /// The 16 bits after them.
    pub check: u16,
    /// The tier that holds it.
    pub tier: Tier,
}

/// Where a block is on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Tier {
    /// In shared memory.
    Dram = 0,
    /// On disk.
    Nvme = 1,
    /// In the pool of a replica, for that replica alone.
    Pool = 2,
    /// No longer there.
    Gone = 255,
}

impl Tier {
    /// The tier of this number.
    pub fn from_u8(number: u8) -> Option<Self> {
        let all = [Self::Dram, Self::Nvme, Self::Pool, Self::Gone];
        all.into_iter().find(|tier| *tier as u8 == number)
    }
}

impl Entry {
    /// The entry of `key` in `tier`.
    pub fn new(key: &Key, tier: Tier) -> Self {
        let check = u16::from_le_bytes([key[8], key[9]]);
        Self { fingerprint: hash(key), check, tier }
    }
}

#[derive(Default)]
pub(super) struct Journal {
    ring: VecDeque<Entry>,
    next: u64,
}

impl Journal {
    pub(super) fn record(&mut self, key: &Key, tier: Tier) {
        if self.ring.len() == KEPT {
            self.ring.pop_front();
        }
        self.ring.push_back(Entry::new(key, tier));
        self.next += 1;
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        (self.ring.len() * size_of::<Entry>()) as u64
    }
}

impl Index {
    /// The number the next change will have.
    pub fn next_change(&self) -> u64 {
        self.journal.next
    }

    /// Up to `most` changes from number `from` on, appended to `out`; false if some are forgotten.
    pub fn changes(&self, from: u64, most: usize, out: &mut Vec<Entry>) -> bool {
        let Journal { ring, next } = &self.journal;
        let first = next - ring.len() as u64;
        if from < first || from > *next {
            return false;
        }
        out.extend(ring.iter().skip((from - first) as usize).take(most));
        true
    }

    /// Entries of up to `most` nodes from `start` on, appended to `out`; where to go on.
    pub fn entries(&self, start: usize, most: usize, out: &mut Vec<Entry>) -> Option<usize> {
        let end = self.nodes.len().min(start.saturating_add(most));
        for node in start..end {
            match self.tier_of(node as u32) {
                Tier::Gone => {}
                tier => out.push(Entry::new(&self.nodes[node].key, tier)),
            }
        }
        (end < self.nodes.len()).then_some(end)
    }

    /// The key before `key` in its chain.
    pub fn parent_of(&self, key: &Key) -> Option<Key> {
        let parent = self.nodes[self.find(key)? as usize].parent;
        (parent != NONE).then(|| self.nodes[parent as usize].key)
    }

    /// Tell followers where a block is from now on.
    pub(super) fn tell(&mut self, node: NodeId) {
        let tier = self.tier_of(node);
        self.journal.record(&self.nodes[node as usize].key, tier);
    }

    /// The fastest tier that has a block. A removed node keeps its record until the id is used
    /// again, but neither a body nor a place on disk.
    fn tier_of(&self, node: NodeId) -> Tier {
        match () {
            () if self.readable(node) => Tier::Dram,
            () if self.on_disk(node) => Tier::Nvme,
            () => Tier::Gone,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Eviction, Hint, Kind, Limits, Reserve, Stored, Wish};

    fn put(index: &mut Index, key: u8, parent: Option<u8>) {
        let parent = parent.map(|parent| [parent; 32]);
        let (key, parent) = (&[key; 32], parent.as_ref());
        let wish = Wish { key, parent, bytes: 100, tenant: "", hint: Hint::NONE };
        let Reserve::Granted(extent, _) = index.reserve(&wish, 0) else { panic!("no room") };
        index.publish(extent, Stored { len: 100, kind: Kind::default() });
    }

    fn index() -> Index {
        let limits = Limits {
            max_blocks: 100,
            max_leases: 10,
            tenant_bytes: u64::MAX,
            tenant_disk_bytes: u64::MAX,
        };
        Index::new(1 << 20, limits, Eviction::Lru.build(100))
    }

    #[test]
    fn followers_see_what_came_and_went() {
        let mut index = index();
        put(&mut index, 1, None);
        put(&mut index, 2, Some(1));
        index.evict(&[[2; 32]]);
        let mut seen = Vec::new();
        assert!(index.changes(0, 10, &mut seen));
        let wanted = [(1, Tier::Dram), (2, Tier::Dram), (2, Tier::Gone)];
        assert_eq!(seen, wanted.map(|(key, tier)| Entry::new(&[key; 32], tier)));
        assert_eq!(index.next_change(), 3);
        let mut held = Vec::new();
        assert_eq!(index.entries(0, 100, &mut held), None);
        assert_eq!(held, [Entry::new(&[1; 32], Tier::Dram)]);
        assert_eq!((index.parent_of(&[1; 32]), index.parent_of(&[9; 32])), (None, None));
        assert!(!index.changes(4, 10, &mut seen), "the future is not known");
    }

    #[test]
    fn a_follower_too_far_behind_is_told() {
        let mut journal = Journal::default();
        for _ in 0..KEPT + 1 {
            journal.record(&[1; 32], Tier::Dram);
        }
        let mut index = index();
        index.journal = journal;
        assert!(!index.changes(0, 1, &mut Vec::new()));
        assert!(index.changes(1, 1, &mut Vec::new()));
    }
}
