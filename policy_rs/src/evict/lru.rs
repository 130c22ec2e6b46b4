//! Least recently used, the control every other policy is measured against.
//!
//! Owns nothing but a counter: a block's priority is the time of its last touch. Leaf-first order
//! makes it tail-first: a request touches its blocks from the root on, and its tail is their leaf.

use super::{BlockId, EvictionPolicy, Forest, Rank, Touch};

/// See the module.
#[derive(Debug)]
pub struct Lru {
    forest: Forest,
    now: i64,
}

impl Lru {
    /// A cache of about `capacity` blocks.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { forest: Forest::with_capacity(capacity), now: 0 }
    }

    fn next_rank(&mut self) -> Rank {
        self.now += 1;
        Rank { priority: self.now, ..Rank::default() }
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, _key: u64, parent: Option<BlockId>, _touch: Touch) -> BlockId {
        let rank = self.next_rank();
        self.forest.insert(parent, rank)
    }

    fn touch(&mut self, block: BlockId, _touch: Touch) {
        let rank = self.next_rank();
        self.forest.set_rank(block, rank);
    }

    fn pin(&mut self, block: BlockId) {
        self.forest.pin(block);
    }

    fn unpin(&mut self, block: BlockId) {
        self.forest.unpin(block);
    }

    fn victim(&mut self) -> Option<BlockId> {
        self.forest.first_leaf(0)
    }

    fn remove(&mut self, block: BlockId, _key: u64, _evicted: bool) {
        self.forest.remove(block);
    }

    fn len(&self) -> usize {
        self.forest.len()
    }

    fn state_bytes(&self) -> usize {
        self.forest.bytes()
    }
}
