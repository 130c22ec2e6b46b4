//! Which block to evict first: the seam to the policies.
//!
//! A policy gives every block a trace, which is kept with the block, and ranks blocks by their
//! traces. It never decides *whether* a block may go: the index offers evictable leaves only. Its
//! time is the number of uses so far, so a policy is a pure state machine.

use mooncake_policy::evict::{Appraiser, Hint, Touch, Trace};

use super::hash;
use crate::error::{Error, Result};
use crate::key::Key;

/// Ranks blocks.
pub trait EvictionPolicy: Send {
    /// A block came, behind `parent` if that is known.
    fn came(&mut self, key: &Key, parent: Option<Trace>, hint: Hint) -> Trace;

    /// A block was wanted again.
    fn used(&mut self, last: Trace, hint: Hint) -> Trace;

    /// A match found a block: it may be wanted soon.
    fn seen(&mut self, last: Trace) -> Trace;

    /// Something was said about the next use of a block.
    fn hinted(&mut self, last: Trace, hint: Hint) -> Trace;

    /// A block left for want of room.
    fn left(&mut self, key: &Key, last: Trace);

    /// What has the smallest rank goes first.
    fn rank(&self, trace: Trace) -> i64;

    /// So many blocks are all there is room for.
    fn filled(&mut self, blocks: usize);

    /// Bytes of memory in use, and how much it may become.
    fn memory_bytes(&self) -> u64;
}

/// The policies a store can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// Recency, corrected by the learnt odds of being used again.
    Ours,
    /// Least recently used: the control.
    Lru,
}

impl Eviction {
    /// The choice a person writes as `name`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "ours" => Ok(Self::Ours),
            "lru" => Ok(Self::Lru),
            _ => {
                Err(Error::config("eviction", format!("{name:?} is no policy; choose ours or lru")))
            }
        }
    }

    /// What the statistics call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Lru => "lru",
        }
    }

    /// A policy for an index of up to `max_blocks`.
    pub fn build(self, max_blocks: usize) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Ours => Box::new(Ours(Appraiser::new(max_blocks, max_blocks / BLOCKS_PER_GHOST))),
            Self::Lru => Box::new(Lru::default()),
        }
    }
}

/// The index is sized for small blocks: of usual ones this remembers many times what is held.
const BLOCKS_PER_GHOST: usize = 2;

/// The simulator's policy.
struct Ours(Appraiser);

impl EvictionPolicy for Ours {
    fn came(&mut self, key: &Key, parent: Option<Trace>, hint: Hint) -> Trace {
        self.0.first(hash(key), parent, Touch { hint, partial: false })
    }

    fn used(&mut self, last: Trace, hint: Hint) -> Trace {
        self.0.again(last, Touch { hint, partial: false })
    }

    /// What was found is mostly leased next, and that counts.
    fn seen(&mut self, last: Trace) -> Trace {
        last
    }

    fn hinted(&mut self, last: Trace, hint: Hint) -> Trace {
        self.0.hinted(last, hint)
    }

    fn left(&mut self, key: &Key, last: Trace) {
        self.0.left(hash(key), last);
    }

    fn rank(&self, trace: Trace) -> i64 {
        self.0.priority(trace)
    }

    fn filled(&mut self, blocks: usize) {
        self.0.set_capacity(blocks);
    }

    fn memory_bytes(&self) -> u64 {
        self.0.bytes() as u64
    }
}

/// Least recently used first, exactly; a match is a use.
#[derive(Default)]
struct Lru {
    uses: u64,
}

impl Lru {
    fn next(&mut self) -> Trace {
        self.uses += 1;
        Trace { stamp: self.uses as u32, ..Trace::default() }
    }
}

impl EvictionPolicy for Lru {
    fn came(&mut self, _: &Key, _: Option<Trace>, _: Hint) -> Trace {
        self.next()
    }

    fn used(&mut self, _: Trace, _: Hint) -> Trace {
        self.next()
    }

    fn seen(&mut self, _: Trace) -> Trace {
        self.next()
    }

    fn hinted(&mut self, last: Trace, _: Hint) -> Trace {
        last
    }

    fn left(&mut self, _: &Key, _: Trace) {}

    fn rank(&self, trace: Trace) -> i64 {
        let age = (self.uses as u32).wrapping_sub(trace.stamp);
        self.uses as i64 - i64::from(age)
    }

    fn filled(&mut self, _: usize) {}

    fn memory_bytes(&self) -> u64 {
        size_of::<Self>() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[test]
    fn what_is_said_to_be_over_goes_before_what_was_used_earlier() {
        for (eviction, first) in [(Eviction::Ours, 1), (Eviction::Lru, 0)] {
            let mut policy = eviction.build(1000);
            policy.filled(100);
            // A workload in which such hints come true, fifty uses later.
            let mut waiting = VecDeque::new();
            for round in 0..4000u32 {
                let key = *blake3::hash(&round.to_le_bytes()).as_bytes();
                let over = round % 2 == 0;
                let hint = Hint::new(if over { -1.0 } else { 1.0 });
                let trace = policy.came(&key, None, hint);
                if !over {
                    waiting.push_back(trace);
                }
                if waiting.len() > 25 {
                    waiting.pop_front().map(|trace| policy.used(trace, Hint::NONE));
                }
            }
            let earlier = policy.came(&[1; 32], None, Hint::NONE);
            let later = policy.came(&[2; 32], None, Hint::NONE);
            let over = policy.hinted(later, Hint::new(-1.0));
            let ranks = [policy.rank(earlier), policy.rank(over)];
            let least = if ranks[0] <= ranks[1] { 0 } else { 1 };
            assert_eq!(least, first, "{}: {ranks:?}", eviction.name());
        }
    }

    #[test]
    fn ranks_outlive_the_stamps_wrap() {
        let mut lru = Lru { uses: (1 << 32) - 2 };
        let ranks: Vec<_> = (0..4).map(|_| lru.next()).collect();
        let ranks: Vec<_> = ranks.into_iter().map(|trace| lru.rank(trace)).collect();
        assert!(ranks.is_sorted(), "{ranks:?}");
    }
}
