//! One tier of one simulated node: an eviction policy and the blocks it speaks of.
//!
//! Invariants: never more than `capacity` blocks; a block that is resident had a resident parent
//! when it was admitted, and keeps it as long as it stays.

use std::collections::HashMap;

use crate::evict::{BlockId, EvictionPolicy, Touch};

/// See the module.
pub(super) struct Cache {
    policy: Box<dyn EvictionPolicy>,
    capacity: usize,
    ids: HashMap<u32, BlockId>,
    blocks: Vec<u32>,
}

impl Cache {
    pub(super) fn new(policy: Box<dyn EvictionPolicy>, capacity: usize) -> Self {
        Self { policy, capacity, ids: HashMap::new(), blocks: Vec::new() }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn contains(&self, block: u32) -> bool {
        self.ids.contains_key(&block)
    }

    /// Another cache took a copy.
    pub(super) fn copied(&mut self, block: u32) {
        if let Some(&id) = self.ids.get(&block) {
            self.policy.copied(id);
        }
    }

    /// A request used the chain `blocks`, root first, which follows the resident block `after`:
    /// touch what is here and admit the rest, until the cache refuses. Admitted and evicted blocks
    /// are appended to the two lists.
    pub(super) fn commit(
        &mut self,
        after: Option<u32>,
        blocks: impl Iterator<Item = (u32, Touch)>,
        admitted: &mut Vec<u32>,
        evicted: &mut Vec<u32>,
    ) {
        let mut parent: Option<BlockId> = after.map(|block| self.ids[&block]);
        if let Some(parent) = parent {
            self.policy.pin(parent);
        }
        for (block, touch) in blocks {
            let id = match self.ids.get(&block).copied() {
                Some(id) => {
                    self.policy.touch(id, touch);
                    id
                }
                None if self.make_room(block, evicted) => {
                    admitted.push(block);
                    self.admit(block, parent, touch)
                }
                None => break,
            };
            self.policy.pin(id);
            if let Some(parent) = parent.replace(id) {
                self.policy.unpin(parent);
            }
        }
        if let Some(parent) = parent {
            self.policy.unpin(parent);
        }
    }

    fn admit(&mut self, block: u32, parent: Option<BlockId>, touch: Touch) -> BlockId {
        let id = self.policy.insert(key(block), parent, touch);
        if self.blocks.len() <= id as usize {
            self.blocks.resize(id as usize + 1, 0);
        }
        self.blocks[id as usize] = block;
        self.ids.insert(block, id);
        assert!(self.policy.len() <= self.capacity);
        id
    }

    fn make_room(&mut self, block: u32, evicted: &mut Vec<u32>) -> bool {
        if self.capacity == 0 {
            return false;
        }
        while self.policy.len() >= self.capacity {
            let Some(victim) = self.policy.victim() else {
                return false;
            };
            if !self.policy.admits(key(block), victim) {
                return false;
            }
            let leaving = self.blocks[victim as usize];
            self.policy.remove(victim, key(leaving), true);
            self.ids.remove(&leaving);
            evicted.push(leaving);
        }
        true
    }
}

/// The 64-bit key of a block of a trace.
pub(super) fn key(block: u32) -> u64 {
    u64::from(block)
}
