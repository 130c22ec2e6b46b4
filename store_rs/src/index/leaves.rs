//! The evictable leaves, the one with the smallest rank first.
//!
//! A heap entry keeps the rank at which it was pushed. What happens to a leaf meanwhile changes
//! nothing here: an entry that comes up with a rank that has grown goes back with it, and one whose
//! node may not go any more is forgotten until it is offered again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::NodeId;

/// Ranks are moved up by this, so that they sort as they are stored.
const BIAS: i64 = 1 << 47;
/// Entries of nodes offered a second time that may lie about.
const STRAYS_MAX: usize = 1 << 10;

/// See the module.
#[derive(Default)]
pub(super) struct Leaves {
    heap: BinaryHeap<Reverse<Queued>>,
    /// A bit a node: whether it has an entry that counts.
    queued: Vec<u64>,
    strays: usize,
}

/// 48 bits of rank and a node: 10 bytes, since there may be millions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C, packed(2))]
struct Queued {
    high: u32,
    low: u16,
    node: NodeId,
}

impl Queued {
    fn new(node: NodeId, rank: i64) -> Self {
        let rank = (rank + BIAS) as u64;
        Self { high: (rank >> 16) as u32, low: rank as u16, node }
    }

    fn rank(self) -> i64 {
        (u64::from(self.high) << 16 | u64::from(self.low)) as i64 - BIAS
    }
}

impl Leaves {
    /// Whether a node was offered and has not come up since.
    pub(super) fn has(&self, node: NodeId) -> bool {
        let word = self.queued.get(node as usize / 64).copied().unwrap_or(0);
        word >> (node % 64) & 1 == 1
    }

    /// `node` may be evicted from now on.
    pub(super) fn offer(&mut self, node: NodeId, rank: i64) {
        if !self.has(node) {
            self.set(node, true);
            self.heap.push(Reverse(Queued::new(node, rank)));
        }
    }

    /// The rank of a leaf has fallen.
    pub(super) fn hasten(&mut self, node: NodeId, rank: i64) {
        if self.has(node) {
            self.heap.push(Reverse(Queued::new(node, rank)));
            self.strays += 1;
        }
        if self.strays > STRAYS_MAX {
            self.sweep();
        }
    }

    /// The next to go. `rank` answers None for nodes that must stay for now.
    pub(super) fn pop(&mut self, rank: impl Fn(NodeId) -> Option<i64>) -> Option<NodeId> {
        while let Some(Reverse(entry)) = self.heap.pop() {
            let node = entry.node;
            if !self.has(node) {
                self.strays = self.strays.saturating_sub(1);
                continue;
            }
            match rank(node) {
                Some(now) if now > entry.rank() => {
                    self.heap.push(Reverse(Queued::new(node, now)));
                }
                Some(_) => {
                    self.set(node, false);
                    return Some(node);
                }
                None => self.set(node, false),
            }
        }
        None
    }

    /// Bytes of memory in use.
    pub(super) fn memory_bytes(&self) -> u64 {
        let heap = self.heap.len() * size_of::<Queued>();
        (heap + self.queued.len() * size_of::<u64>()) as u64
    }

    fn set(&mut self, node: NodeId, queued: bool) {
        let (word, bit) = (node as usize / 64, node % 64);
        if word >= self.queued.len() {
            self.queued.resize(word + 1, 0);
        }
        self.queued[word] = self.queued[word] & !(1 << bit) | u64::from(queued) << bit;
    }

    /// Keep the first entry of each node only.
    fn sweep(&mut self) {
        let mut kept = std::mem::take(&mut self.queued);
        let mut entries = std::mem::take(&mut self.heap).into_vec();
        entries.sort_unstable_by(|a, b| b.cmp(a));
        entries.retain(|Reverse(entry)| {
            let (word, bit) = (entry.node as usize / 64, entry.node % 64);
            let first = kept.get(word).is_some_and(|word| word >> bit & 1 == 1);
            if first {
                kept[word] &= !(1 << bit);
            }
            first
        });
        for Reverse(entry) in &entries {
            self.set(entry.node, true);
        }
        (self.heap, self.strays) = (entries.into(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_rank_comes_up_first_even_if_it_changed() {
        let mut ranks = [-10, 11, 12, 13];
        let mut leaves = Leaves::default();
        for node in 0..4 {
            leaves.offer(node, ranks[node as usize]);
        }
        ranks[0] = 20;
        assert_eq!(leaves.pop(|node| Some(ranks[node as usize])), Some(1));
        assert_eq!(leaves.pop(|node| (node != 2).then_some(ranks[node as usize])), Some(3));
        assert_eq!(leaves.pop(|node| Some(ranks[node as usize])), Some(0));
        assert_eq!(leaves.pop(|node| Some(ranks[node as usize])), None);
        leaves.offer(2, 30);
        assert_eq!(leaves.pop(|_| Some(30)), Some(2));
    }

    #[test]
    fn what_falls_comes_up_earlier_and_strays_are_swept() {
        let mut leaves = Leaves::default();
        for node in 0..100 {
            leaves.offer(node, i64::from(node));
        }
        leaves.hasten(99, -5);
        let rank = |node| Some(if node == 99 { -5 } else { i64::from(node) });
        assert_eq!(leaves.pop(rank), Some(99));
        for _ in 0..10 * STRAYS_MAX {
            leaves.hasten(50, -7);
        }
        assert!(leaves.heap.len() < 100 + 2 * STRAYS_MAX);
        let order: Vec<_> = std::iter::from_fn(|| leaves.pop(rank)).collect();
        assert_eq!(order.len(), 99, "each once");
    }
}
