//! How much a block is worth keeping: recency, corrected by how likely its kind is used again.
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
//! Owns: the counts, the ghosts and the clock, which is the number of uses so far. What it must
//! remember of a block that stays is a [`Trace`], which the owner of the block keeps.

use super::ghost::{Ghost, GhostTable};
use super::reuse::{Class, ReuseStats};
use super::{Hint, Touch};

/// The mean gap is taken over blocks still remembered, so it falls short of τ.
const GAP_SCALE: f64 = 1.5;
/// Bounds the correction, in units of τ: a wrong guess delays an eviction, it does not prevent it.
const LOG_ODDS_MAX: f64 = 3.0;
/// Longer runs say nothing more.
const RUN_MAX: u8 = 31;

/// What is remembered of a block between two uses: 45 bits that matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Uses of all blocks until its last one, modulo 2³².
    pub stamp: u32,
    /// Its class.
    pub class: u8,
    /// How many new blocks before it came with the same request, 0 to 31.
    pub run: u8,
}

/// See the module.
#[derive(Debug)]
pub struct Appraiser {
    ghosts: GhostTable,
    stats: ReuseStats,
    now: u64,
    capacity: f64,
}

impl Appraiser {
    /// Of a cache of about `capacity` blocks, which remembers about `ghosts` of those that left.
    #[must_use]
    pub fn new(capacity: usize, ghosts: usize) -> Self {
        Self {
            ghosts: GhostTable::new(ghosts),
            stats: ReuseStats::new(),
            now: 0,
            capacity: capacity as f64,
        }
    }

    /// Blocks that the cache holds when it is full.
    pub(super) fn capacity(&self) -> f64 {
        self.capacity
    }

    /// How many blocks the cache holds when it is full.
    pub fn set_capacity(&mut self, blocks: usize) {
        self.capacity = blocks as f64;
    }

    /// A block came, behind `parent` if that is here. `key` is 64 bits of its content key.
    pub fn first(&mut self, key: u64, parent: Option<Trace>, touch: Touch) -> Trace {
        let (class, run) = match self.ghosts.recall(key) {
            Some(ghost) => (self.reuse(ghost.value, ghost.stamp), 0),
            None => {
                let matched = parent.map(|parent| Class::from_byte(parent.class));
                let run = parent.map_or(1, |parent| RUN_MAX.min(parent.run + 1));
                let new = || Class::new_block(matched, run.into());
                (if touch.partial { Class::partial() } else { new() }, run)
            }
        };
        self.enter(class, run, touch)
    }

    /// A block is used again.
    pub fn again(&mut self, last: Trace, touch: Touch) -> Trace {
        let class = self.reuse(last.class, last.stamp);
        self.enter(class, 0, touch)
    }

    /// Something was said about the next use of a block, without using it.
    pub fn hinted(&mut self, last: Trace, hint: Hint) -> Trace {
        let class = Class::from_byte(last.class).rehinted(hint.strength());
        if class.byte() != last.class {
            self.stats.entered(class);
        }
        Trace { class: class.byte(), ..last }
    }

    /// A block left for want of room.
    pub fn left(&mut self, key: u64, last: Trace) {
        self.ghosts.remember(key, Ghost { value: last.class, stamp: last.stamp });
    }

    /// When a block should go, by what is known now: smaller first.
    #[must_use]
    pub fn priority(&self, trace: Trace) -> i64 {
        let age = (self.now as u32).wrapping_sub(trace.stamp);
        let gap = self.stats.mean_gap().unwrap_or(self.capacity);
        let log_odds = self.stats.log_odds(Class::from_byte(trace.class));
        let log_odds = log_odds.clamp(-LOG_ODDS_MAX, LOG_ODDS_MAX);
        self.now as i64 - i64::from(age) + (GAP_SCALE * gap * log_odds) as i64
    }

    /// Bytes of bookkeeping.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.ghosts.bytes()
    }

    fn enter(&mut self, class: Class, run: u8, touch: Touch) -> Trace {
        let class = class.with_hint(touch.hint.strength());
        self.now += 1;
        self.stats.entered(class);
        Trace { stamp: self.now as u32, class: class.byte(), run }
    }

    /// A block of this class and stamp is used again; its next class.
    fn reuse(&mut self, class: u8, stamp: u32) -> Class {
        let class = Class::from_byte(class);
        self.stats.reused(class, (self.now as u32).wrapping_sub(stamp));
        class.used_again()
    }
}
