//! Adaptive replacement cache (FAST'03) over leaves.
//!
//! Owns: the blocks seen once (T1) and more than once (T2), both by recency, the keys that left
//! them (B1, B2), and the target size of T1, which moves towards the side whose ghosts are asked
//! for again.

use super::ghost::{Ghost, GhostTable};
use super::{BlockId, EvictionPolicy, Forest, Rank, Touch};

const ONCE: u8 = 0;
const OFTEN: u8 = 1;

/// See the module.
#[derive(Debug)]
pub struct Arc {
    forest: Forest,
    ghosts: GhostTable,
    now: i64,
    capacity: usize,
    once_target: f64,
}

impl Arc {
    /// A cache of about `capacity` blocks.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            forest: Forest::with_capacity(capacity),
            ghosts: GhostTable::new(capacity),
            now: 0,
            capacity,
            once_target: 0.0,
        }
    }

    /// Which list a returning key came from decides who gets more room.
    fn adapt(&mut self, ghost_of: u8, once: usize, often: usize) {
        let ratio = |other: usize, own: usize| (other as f64 / own.max(1) as f64).max(1.0);
        let step = if ghost_of == ONCE { ratio(often, once) } else { -ratio(once, often) };
        self.once_target = (self.once_target + step).clamp(0.0, self.capacity as f64);
    }
}

impl EvictionPolicy for Arc {
    fn insert(&mut self, key: u64, parent: Option<BlockId>, _touch: Touch) -> BlockId {
        let ghosts = (self.ghosts.count(ONCE), self.ghosts.count(OFTEN));
        let seen = self.ghosts.recall(key);
        if let Some(ghost) = seen {
            self.adapt(ghost.value, ghosts.0, ghosts.1);
        }
        self.now += 1;
        let queue = if seen.is_some() { OFTEN } else { ONCE };
        self.forest.insert(parent, Rank { priority: self.now, queue, ..Rank::default() })
    }

    fn touch(&mut self, block: BlockId, _touch: Touch) {
        self.now += 1;
        self.forest.set_rank(block, Rank { priority: self.now, queue: OFTEN, ..Rank::default() });
    }

    fn pin(&mut self, block: BlockId) {
        self.forest.pin(block);
    }

    fn unpin(&mut self, block: BlockId) {
        self.forest.unpin(block);
    }

    fn victim(&mut self) -> Option<BlockId> {
        let (once, often) = (self.forest.first_leaf(ONCE), self.forest.first_leaf(OFTEN));
        let once_is_full = self.forest.queue_len(ONCE) as f64 > self.once_target;
        if once_is_full { once.or(often) } else { often.or(once) }
    }

    fn remove(&mut self, block: BlockId, key: u64, evicted: bool) {
        if evicted {
            let value = self.forest.rank(block).queue;
            self.ghosts.remember(key, Ghost { value, stamp: 0 });
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
