//! Which block to evict next: the seam, and LRU as the control.
//!
//! The index offers a node whenever it becomes evictable (a resident leaf without leases) and asks
//! for a victim when it needs room. A policy never decides *whether* a block may go: the callback
//! says so at that moment, and a policy must skip nodes for which it answers None. Time is passed
//! in, so a policy is a pure state machine.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{NodeId, Tick};

/// Chooses victims. Implementations hold at most one entry per node.
pub trait EvictionPolicy: Send {
    /// `node` may be evicted from now on; it was last used at `last_used`.
    fn offer(&mut self, node: NodeId, last_used: Tick);

    /// The next victim. `last_used` answers None for nodes that must stay for now; these are
    /// forgotten until offered again.
    fn victim(&mut self, last_used: &dyn Fn(NodeId) -> Option<Tick>) -> Option<NodeId>;

    /// Bytes of memory in use.
    fn memory_bytes(&self) -> u64;
}

/// Least recently used first, exactly, with O(1) touches.
///
/// A heap entry keeps the time at which it was pushed. A touch changes nothing here; a popped entry
/// that turns out to have been used since goes back with its new time.
#[derive(Default)]
pub struct Lru {
    heap: BinaryHeap<Reverse<Queued>>,
    queued: Vec<u64>,
}

/// 12 bytes: a million of them are in the heap.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C, packed(4))]
struct Queued {
    at: Tick,
    node: NodeId,
}

impl Lru {
    fn set_queued(&mut self, node: NodeId, queued: bool) -> bool {
        let (word, bit) = (node as usize / 64, node % 64);
        if word >= self.queued.len() {
            self.queued.resize(word + 1, 0);
        }
        let before = self.queued[word] >> bit & 1 == 1;
        self.queued[word] = self.queued[word] & !(1 << bit) | u64::from(queued) << bit;
        before
    }
}

impl EvictionPolicy for Lru {
    fn offer(&mut self, node: NodeId, last_used: Tick) {
        if !self.set_queued(node, true) {
            self.heap.push(Reverse(Queued { at: last_used, node }));
        }
    }

    fn victim(&mut self, last_used: &dyn Fn(NodeId) -> Option<Tick>) -> Option<NodeId> {
        while let Some(Reverse(Queued { at: queued_at, node })) = self.heap.pop() {
            match last_used(node) {
                Some(used) if used > queued_at => {
                    self.heap.push(Reverse(Queued { at: used, node }))
                }
                Some(_) => {
                    self.set_queued(node, false);
                    return Some(node);
                }
                None => {
                    self.set_queued(node, false);
                }
            }
        }
        None
    }

    fn memory_bytes(&self) -> u64 {
        let heap = self.heap.len() * size_of::<Queued>();
        (heap + self.queued.len() * size_of::<u64>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_goes_first_even_after_touches() {
        let mut used = [10, 11, 12, 13];
        let mut lru = Lru::default();
        for node in 0..4 {
            lru.offer(node, used[node as usize]);
        }
        used[0] = 20;
        assert_eq!(lru.victim(&|node| Some(used[node as usize])), Some(1));
        assert_eq!(lru.victim(&|node| (node != 2).then_some(used[node as usize])), Some(3));
        assert_eq!(lru.victim(&|node| Some(used[node as usize])), Some(0));
        assert_eq!(lru.victim(&|node| Some(used[node as usize])), None);
        lru.offer(2, 30);
        assert_eq!(lru.victim(&|_| Some(30)), Some(2));
    }
}
