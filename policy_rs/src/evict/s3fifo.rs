//! S3-FIFO (SOSP'23) over leaves, with half of the cache as its small queue.
//!
//! Owns: a small and a main FIFO and the keys that left the small one. A new block enters the small
//! queue, or the main one if its key left recently; a block used again while in the small queue
//! moves on to the main one instead of leaving; the main queue gives second chances.

use super::ghost::{Ghost, GhostTable};
use super::{BlockId, EvictionPolicy, Forest, Rank, Touch};

const SMALL: u8 = 0;
const MAIN: u8 = 1;
const COUNT_MAX: u8 = 3;

/// See the module.
#[derive(Debug)]
pub struct S3Fifo {
    forest: Forest,
    ghosts: GhostTable,
    now: i64,
    small_capacity: usize,
}

impl S3Fifo {
    /// A cache of about `capacity` blocks.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            forest: Forest::with_capacity(capacity),
            ghosts: GhostTable::new(capacity / 2),
            now: 0,
            small_capacity: capacity / 2,
        }
    }

    /// Move the block to the main queue with its ancestors: they stay as long as it does, and would
    /// fill the small queue with blocks that cannot leave.
    fn promote(&mut self, block: BlockId) {
        let mut next = Some(block);
        while let Some(block) = next.filter(|&block| self.forest.rank(block).queue == SMALL) {
            self.append(block, MAIN, 0);
            next = self.forest.parent(block);
        }
    }

    fn append(&mut self, block: BlockId, queue: u8, count: u8) {
        self.now += 1;
        self.forest.set_rank(block, Rank { priority: self.now, queue, count, ..Rank::default() });
    }
}

impl EvictionPolicy for S3Fifo {
    fn insert(&mut self, key: u64, parent: Option<BlockId>, _touch: Touch) -> BlockId {
        let queue = if self.ghosts.recall(key).is_some() { MAIN } else { SMALL };
        self.now += 1;
        self.forest.insert(parent, Rank { priority: self.now, queue, ..Rank::default() })
    }

    fn touch(&mut self, block: BlockId, _touch: Touch) {
        let mut rank = self.forest.rank(block);
        rank.count = COUNT_MAX.min(rank.count + 1);
        self.forest.set_rank(block, rank);
    }

    fn pin(&mut self, block: BlockId) {
        self.forest.pin(block);
    }

    fn unpin(&mut self, block: BlockId) {
        self.forest.unpin(block);
    }

    fn victim(&mut self) -> Option<BlockId> {
        loop {
            let small = self.forest.first_leaf(SMALL);
            let main = self.forest.first_leaf(MAIN);
            let small_is_full = self.forest.queue_len(SMALL) >= self.small_capacity;
            let block = if small_is_full { small.or(main) } else { main.or(small) }?;
            let rank = self.forest.rank(block);
            if rank.count == 0 {
                return Some(block);
            }
            // Each round moves a block to the main queue or lowers a count: the loop ends.
            if rank.queue == SMALL {
                self.promote(block);
            } else {
                self.append(block, MAIN, rank.count - 1);
            }
        }
    }

    fn remove(&mut self, block: BlockId, key: u64, evicted: bool) {
        if evicted && self.forest.rank(block).queue == SMALL {
            self.ghosts.remember(key, Ghost { value: 0, stamp: 0 });
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
