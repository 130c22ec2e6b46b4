//! A binary min-heap of tree nodes whose places are known, so that any of them can leave early.
//!
//! Owns: the order of the evictable leaves of one queue. Invariant: `places[id]` is the index of
//! `id` in `ids`, or [`ABSENT`]. The priorities live with the nodes; whoever changes one takes the
//! node out first.

/// The place of a node that is in no heap.
pub(super) const ABSENT: u32 = u32::MAX;

/// What the heap needs to know about its members; implemented by the owner of the nodes.
pub(super) trait Places {
    fn priority(&self, id: u32) -> i64;
    fn place(&self, id: u32) -> u32;
    fn set_place(&mut self, id: u32, place: u32);
}

/// Members ordered by `(priority, id)`, smallest first.
#[derive(Debug, Default)]
pub(super) struct LeafHeap {
    ids: Vec<u32>,
}

impl LeafHeap {
    pub(super) fn first(&self) -> Option<u32> {
        self.ids.first().copied()
    }

    pub(super) fn bytes(&self) -> usize {
        self.ids.capacity() * size_of::<u32>()
    }

    pub(super) fn push(&mut self, nodes: &mut impl Places, id: u32) {
        debug_assert_eq!(nodes.place(id), ABSENT);
        self.ids.push(id);
        self.sift_up(nodes, self.ids.len() - 1);
    }

    pub(super) fn take(&mut self, nodes: &mut impl Places, id: u32) {
        let hole = nodes.place(id) as usize;
        assert_eq!(self.ids.get(hole), Some(&id), "node {id} is not in this heap");
        nodes.set_place(id, ABSENT);
        let last = self.ids.pop().unwrap_or(id);
        if last != id {
            self.ids[hole] = last;
            self.sift_down(nodes, hole);
            self.sift_up(nodes, nodes.place(last) as usize);
        }
    }

    fn before(nodes: &impl Places, a: u32, b: u32) -> bool {
        (nodes.priority(a), a) < (nodes.priority(b), b)
    }

    fn sift_up(&mut self, nodes: &mut impl Places, mut at: usize) {
        let id = self.ids[at];
        while at > 0 {
            let above = (at - 1) / 2;
            if !Self::before(nodes, id, self.ids[above]) {
                break;
            }
            self.ids[at] = self.ids[above];
            nodes.set_place(self.ids[at], at as u32);
            at = above;
        }
        self.ids[at] = id;
        nodes.set_place(id, at as u32);
    }

    fn sift_down(&mut self, nodes: &mut impl Places, mut at: usize) {
        let id = self.ids[at];
        loop {
            let mut below = 2 * at + 1;
            if below >= self.ids.len() {
                break;
            }
            if below + 1 < self.ids.len()
                && Self::before(nodes, self.ids[below + 1], self.ids[below])
            {
                below += 1;
            }
            if !Self::before(nodes, self.ids[below], id) {
                break;
            }
            self.ids[at] = self.ids[below];
            nodes.set_place(self.ids[at], at as u32);
            at = below;
        }
        self.ids[at] = id;
        nodes.set_place(id, at as u32);
    }
}
