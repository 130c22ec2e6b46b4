//! The product's policy: recency corrected by what is known about a block's chance to be used again.
//!
//! A block's priority is the time of its last touch, in blocks touched, plus bonuses in units of the
//! capacity C, which is what recency alone would let a block live:
//!
//! ```text
//! now + 0.8·C·log2(uses, evicted life included) + 0.8·C·hint − 0.9·C·(partial and never matched)
//! ```
//!
//! Owns: the leaves ordered by that priority and the use counts of blocks that left (the ghosts).
//! The priority of a block changes only when it is touched, so nothing ages in the background.

use super::ghost::GhostTable;
use super::{BlockId, EvictionPolicy, Forest, Rank, Touch};

/// Capacities a block gains for every doubling of its uses.
const FREQUENCY_WEIGHT: f64 = 0.8;
/// Capacities a sure hint is worth; under one, so that a wrong hint costs a delay, not a block.
const HINT_WEIGHT: f64 = 0.8;
/// Capacities a partial block loses until it was matched once.
const PARTIAL_WEIGHT: f64 = 0.9;
/// Capacities a block loses when another cache took a copy of it.
const COPIED_WEIGHT: f64 = 2.0;
/// Ghosts remembered per resident block.
const GHOSTS_PER_BLOCK: usize = 2;

/// See the module.
#[derive(Debug)]
pub struct PrefixAware {
    forest: Forest,
    ghosts: GhostTable,
    now: i64,
    capacity: f64,
}

impl PrefixAware {
    /// A cache of about `capacity` blocks; the real figure is taken whenever the cache is full.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            forest: Forest::new(),
            ghosts: GhostTable::new(GHOSTS_PER_BLOCK * capacity),
            now: 0,
            capacity: capacity as f64,
        }
    }

    fn rank(&mut self, uses: u8, touch: Touch) -> Rank {
        self.now += 1;
        let mut bonus = FREQUENCY_WEIGHT * f64::from(uses).log2();
        bonus += HINT_WEIGHT * f64::from(touch.hint.strength());
        if touch.partial && uses == 1 {
            bonus -= PARTIAL_WEIGHT;
        }
        let priority = self.now + (bonus * self.capacity) as i64;
        Rank { priority, queue: 0, count: uses }
    }
}

impl EvictionPolicy for PrefixAware {
    fn insert(&mut self, key: u64, parent: Option<BlockId>, touch: Touch) -> BlockId {
        let uses = self.ghosts.recall(key).unwrap_or(0).saturating_add(1);
        let rank = self.rank(uses, touch);
        self.forest.insert(parent, rank)
    }

    fn touch(&mut self, block: BlockId, touch: Touch) {
        let uses = self.forest.rank(block).count.saturating_add(1);
        let rank = self.rank(uses, touch);
        self.forest.set_rank(block, rank);
    }

    fn copied(&mut self, block: BlockId) {
        let mut rank = self.forest.rank(block);
        rank.priority -= (COPIED_WEIGHT * self.capacity) as i64;
        self.forest.set_rank(block, rank);
    }

    fn pin(&mut self, block: BlockId) {
        self.forest.pin(block);
    }

    fn unpin(&mut self, block: BlockId) {
        self.forest.unpin(block);
    }

    fn victim(&mut self) -> Option<BlockId> {
        self.capacity = self.forest.len() as f64;
        self.forest.first_leaf(0)
    }

    fn remove(&mut self, block: BlockId, key: u64, evicted: bool) {
        if evicted {
            self.ghosts.remember(key, self.forest.rank(block).count);
        }
        self.forest.remove(block);
    }

    fn len(&self) -> usize {
        self.forest.len()
    }

    fn state_bytes(&self) -> usize {
        self.forest.bytes() + self.ghosts.bytes()
    }
}
