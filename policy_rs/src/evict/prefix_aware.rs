//! The product's policy, as the simulator runs it: the leaves in the order of their worth.
//!
//! Owns: the leaves ordered by priority; the [`Appraiser`] says what that is. The priority of a
//! block changes only when it is touched, so nothing ages in the background. The store runs the
//! same appraiser over its own tree.

use super::{Appraiser, BlockId, EvictionPolicy, Forest, Rank, Touch, Trace};

/// Capacities a block loses when another cache took a copy of it.
const COPIED_WEIGHT: f64 = 2.0;
/// Ghosts remembered per resident block.
const GHOSTS_PER_BLOCK: usize = 2;

/// See the module.
#[derive(Debug)]
pub struct PrefixAware {
    forest: Forest,
    appraiser: Appraiser,
}

impl PrefixAware {
    /// A cache of about `capacity` blocks; the real figure is taken whenever the cache is full.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            forest: Forest::with_capacity(capacity),
            appraiser: Appraiser::new(capacity, GHOSTS_PER_BLOCK * capacity),
        }
    }

    fn rank(&self, trace: Trace) -> Rank {
        let Trace { stamp, class, run } = trace;
        let priority = self.appraiser.priority(trace);
        Rank { priority, stamp, run: run.into(), count: class, queue: 0 }
    }

    fn trace(&self, block: BlockId) -> Trace {
        let rank = self.forest.rank(block);
        Trace { stamp: rank.stamp, class: rank.count, run: rank.run as u8 }
    }
}

impl EvictionPolicy for PrefixAware {
    fn insert(&mut self, key: u64, parent: Option<BlockId>, touch: Touch) -> BlockId {
        let above = parent.map(|parent| self.trace(parent));
        let trace = self.appraiser.first(key, above, touch);
        self.forest.insert(parent, self.rank(trace))
    }

    fn touch(&mut self, block: BlockId, touch: Touch) {
        let trace = self.appraiser.again(self.trace(block), touch);
        self.forest.set_rank(block, self.rank(trace));
    }

    fn copied(&mut self, block: BlockId) {
        let mut rank = self.forest.rank(block);
        rank.priority -= (COPIED_WEIGHT * self.appraiser.capacity()) as i64;
        self.forest.set_rank(block, rank);
    }

    fn pin(&mut self, block: BlockId) {
        self.forest.pin(block);
    }

    fn unpin(&mut self, block: BlockId) {
        self.forest.unpin(block);
    }

    fn victim(&mut self) -> Option<BlockId> {
        self.appraiser.set_capacity(self.forest.len());
        self.forest.first_leaf(0)
    }

    fn remove(&mut self, block: BlockId, key: u64, evicted: bool) {
        if evicted {
            self.appraiser.left(key, self.trace(block));
        }
        self.forest.remove(block);
    }

    fn len(&self) -> usize {
        self.forest.len()
    }

    fn state_bytes(&self) -> usize {
        self.forest.bytes() + self.appraiser.bytes()
    }
}
