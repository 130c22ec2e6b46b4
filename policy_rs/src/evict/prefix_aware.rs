//! The product's policy: recency, corrected by how likely blocks of a kind are used again.
//!
//! Were all blocks alike, the one whose last use is longest ago would be the least likely to be
//! wanted, and least recently used would be right. They are not alike, and if the chance of a next
//! use fades with the age like `exp(−age/τ)`, then two blocks are equally worth keeping when
//!
//! ```text
//! last use + τ·ln(odds of being used again)
//! ```
//!
//! is equal. So that is the priority. The odds are counted per class (uses so far, turn of the
//! conversation, distance behind the matched prefix, partial, hint) and τ is the mean gap between
//! uses; blocks that left are remembered for a while, so what leaves too early is noticed. Nothing
//! is tuned to a workload: where the classes do not differ, this is least recently used.
//!
//! Owns: the leaves ordered by that priority, the ghosts, the counts. The priority of a block
//! changes only when it is touched, so nothing ages in the background.

use super::ghost::{Ghost, GhostTable};
use super::reuse::{Class, ReuseStats};
use super::{BlockId, EvictionPolicy, Forest, Rank, Touch};

/// The mean gap is taken over blocks still remembered, so it falls short of τ.
const GAP_SCALE: f64 = 1.5;
/// Bounds the correction, in units of τ: a wrong guess delays an eviction, it does not prevent it.
const LOG_ODDS_MAX: f64 = 3.0;
/// Capacities a block loses when another cache took a copy of it.
const COPIED_WEIGHT: f64 = 2.0;
/// Ghosts remembered per resident block.
const GHOSTS_PER_BLOCK: usize = 2;

/// See the module.
#[derive(Debug)]
pub struct PrefixAware {
    forest: Forest,
    ghosts: GhostTable,
    stats: ReuseStats,
    now: u64,
    capacity: f64,
}

impl PrefixAware {
    /// A cache of about `capacity` blocks; the real figure is taken whenever the cache is full.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            forest: Forest::with_capacity(capacity),
            ghosts: GhostTable::new(GHOSTS_PER_BLOCK * capacity),
            stats: ReuseStats::new(),
            now: 0,
            capacity: capacity as f64,
        }
    }

    fn rank(&mut self, class: Class, run: u16) -> Rank {
        self.now += 1;
        self.stats.entered(class);
        let gap = self.stats.mean_gap().unwrap_or(self.capacity);
        let log_odds = self.stats.log_odds(class).clamp(-LOG_ODDS_MAX, LOG_ODDS_MAX);
        let priority = self.now as i64 + (GAP_SCALE * gap * log_odds) as i64;
        Rank { priority, stamp: self.now as u32, run, count: class.byte(), queue: 0 }
    }

    /// A block of this class and stamp is used again; its next class.
    fn reuse(&mut self, class: u8, stamp: u32) -> Class {
        let class = Class::from_byte(class);
        self.stats.reused(class, (self.now as u32).wrapping_sub(stamp));
        class.used_again()
    }

    /// The class of a block seen for the first time, and its place among the request's new blocks.
    fn first_class(&self, parent: Option<BlockId>, touch: Touch) -> (Class, u16) {
        let parent = parent.map(|parent| self.forest.rank(parent));
        let matched = parent.map(|rank| Class::from_byte(rank.count));
        let run = parent.map_or(1, |rank| rank.run.saturating_add(1));
        let class = if touch.partial { Class::partial() } else { Class::new_block(matched, run) };
        (class, run)
    }
}

impl EvictionPolicy for PrefixAware {
    fn insert(&mut self, key: u64, parent: Option<BlockId>, touch: Touch) -> BlockId {
        let (class, run) = match self.ghosts.recall(key) {
            Some(ghost) => (self.reuse(ghost.value, ghost.stamp), 0),
            None => self.first_class(parent, touch),
        };
        let rank = self.rank(class.with_hint(touch.hint.strength()), run);
        self.forest.insert(parent, rank)
    }

    fn touch(&mut self, block: BlockId, touch: Touch) {
        let last = self.forest.rank(block);
        let class = self.reuse(last.count, last.stamp).with_hint(touch.hint.strength());
        let rank = self.rank(class, 0);
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
            let rank = self.forest.rank(block);
            self.ghosts.remember(key, Ghost { value: rank.count, stamp: rank.stamp });
        }
        self.forest.remove(block);
    }

    fn len(&self) -> usize {
        self.forest.len()
    }

    fn state_bytes(&self) -> usize {
        self.forest.bytes() + self.ghosts.bytes() + size_of::<Self>()
    }
}
