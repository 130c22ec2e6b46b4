//! Belady's rule with bypass: the block whose next use is furthest away leaves, or is never taken.
//!
//! Owns: the future, which only a simulator has. An upper bound on what any policy could reach.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::trace::Trace;
use crate::evict::{BlockId, EvictionPolicy, Forest, Rank, Touch};

/// The requests that use each block, in order.
pub(super) struct Future {
    starts: Vec<u32>,
    uses: Vec<u32>,
    now: AtomicU32,
}

impl Future {
    pub(super) fn of(trace: &Trace) -> Self {
        let mut starts = vec![0; trace.unique_blocks + 1];
        for block in trace.requests.iter().flat_map(|request| &request.blocks) {
            starts[*block as usize + 1] += 1;
        }
        for block in 1..starts.len() {
            starts[block] += starts[block - 1];
        }
        let mut ends = starts.clone();
        let mut uses = vec![0; starts[starts.len() - 1] as usize];
        for (number, request) in trace.requests.iter().enumerate() {
            for &block in &request.blocks {
                uses[ends[block as usize] as usize] = number as u32;
                ends[block as usize] += 1;
            }
        }
        Self { starts, uses, now: AtomicU32::new(0) }
    }

    /// The request that is being served.
    pub(super) fn set_now(&self, request: usize) {
        self.now.store(request as u32, Ordering::Relaxed);
    }

    /// The first request after `request` that uses `block`.
    pub(super) fn next_use(&self, block: u32, request: u32) -> Option<u32> {
        let range = self.starts[block as usize] as usize..self.starts[block as usize + 1] as usize;
        let uses = &self.uses[range];
        uses.get(uses.partition_point(|&user| user <= request)).copied()
    }

    /// Larger is sooner.
    fn priority(&self, key: u64) -> i64 {
        let now = self.now.load(Ordering::Relaxed);
        self.next_use(key as u32, now).map_or(i64::MIN, |next| -i64::from(next))
    }
}

/// See the module.
pub(super) struct Belady {
    future: Arc<Future>,
    forest: Forest,
    keys: Vec<u64>,
}

impl Belady {
    pub(super) fn new(future: Arc<Future>) -> Self {
        Self { future, forest: Forest::default(), keys: Vec::new() }
    }

    fn rank(&self, key: u64) -> Rank {
        Rank { priority: self.future.priority(key), ..Rank::default() }
    }
}

impl EvictionPolicy for Belady {
    fn insert(&mut self, key: u64, parent: Option<BlockId>, _touch: Touch) -> BlockId {
        let id = self.forest.insert(parent, self.rank(key));
        if self.keys.len() <= id as usize {
            self.keys.resize(id as usize + 1, 0);
        }
        self.keys[id as usize] = key;
        id
    }

    fn touch(&mut self, block: BlockId, _touch: Touch) {
        self.forest.set_rank(block, self.rank(self.keys[block as usize]));
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

    fn admits(&self, key: u64, victim: BlockId) -> bool {
        self.future.priority(key) > self.forest.rank(victim).priority
    }

    fn remove(&mut self, block: BlockId, _key: u64, _evicted: bool) {
        self.forest.remove(block);
    }

    fn len(&self) -> usize {
        self.forest.len()
    }

    fn state_bytes(&self) -> usize {
        self.forest.bytes() + self.keys.capacity() * size_of::<u64>()
    }
}
