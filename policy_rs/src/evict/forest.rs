//! The tree of resident blocks, and the heaps of those that may leave.
//!
//! Owns: parent links, child counts, pins, and one heap of evictable leaves per queue.
//! Invariants: a node is in the heap of its queue exactly when it is resident, has no child and no
//! pin. A block removed under living children leaves a hollow node that only keeps its handle from
//! being reused; it goes with its last child.
//! Fails: panics on a handle that is not resident, a bug of the caller.
//!
//! Every operation is O(log n) in the number of leaves. A node takes 32 bytes, a leaf 4 more.

use super::heap::{ABSENT, LeafHeap, Places};

/// Handle of a resident block within one policy.
pub type BlockId = u32;

const NO_PARENT: u32 = u32::MAX;

/// Where a block stands. Only `priority` and `queue` mean something here; the rest is the policy's
/// own memory of the block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rank {
    /// Smaller leaves first. Compared within one queue only.
    pub priority: i64,
    /// When the block was last used.
    pub stamp: u32,
    /// How many new blocks before it came with the same request.
    pub run: u16,
    /// A counter or a class.
    pub count: u8,
    /// 0 or 1.
    pub queue: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Resident,
    Hollow,
}

#[derive(Debug)]
struct Node {
    rank: Rank,
    parent: u32,
    children: u32,
    place: u32,
    pins: u16,
    state: State,
}

impl Places for Vec<Node> {
    fn priority(&self, id: u32) -> i64 {
        self[id as usize].rank.priority
    }

    fn place(&self, id: u32) -> u32 {
        self[id as usize].place
    }

    fn set_place(&mut self, id: u32, place: u32) {
        self[id as usize].place = place;
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Forest {
    nodes: Vec<Node>,
    free: Vec<u32>,
    leaves: [LeafHeap; 2],
    resident: [usize; 2],
}

impl Forest {
    /// An empty forest with room for `capacity` blocks, so that growing never stalls a request.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self { nodes: Vec::with_capacity(capacity), ..Self::default() }
    }

    /// Resident blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.resident[0] + self.resident[1]
    }

    /// No block is resident.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Resident blocks of one queue, leaves or not.
    #[must_use]
    pub fn queue_len(&self, queue: u8) -> usize {
        self.resident[queue as usize]
    }

    /// Bytes of bookkeeping.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let heaps: usize = self.leaves.iter().map(LeafHeap::bytes).sum();
        self.nodes.capacity() * size_of::<Node>() + self.free.capacity() * 4 + heaps
    }

    /// Add a block under `parent`.
    pub fn insert(&mut self, parent: Option<BlockId>, rank: Rank) -> BlockId {
        if let Some(parent) = parent {
            self.expect_resident(parent);
            self.update(parent, |node| node.children += 1);
        }
        let node = Node {
            rank,
            parent: parent.unwrap_or(NO_PARENT),
            children: 0,
            place: ABSENT,
            pins: 0,
            state: State::Free,
        };
        let id = if let Some(id) = self.free.pop() {
            self.nodes[id as usize] = node;
            id
        } else {
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        };
        self.resident[rank.queue as usize] += 1;
        self.update(id, |node| node.state = State::Resident);
        id
    }

    /// The block's rank.
    #[must_use]
    pub fn rank(&self, id: BlockId) -> Rank {
        self.expect_resident(id);
        self.nodes[id as usize].rank
    }

    /// The block's resident parent.
    #[must_use]
    pub fn parent(&self, id: BlockId) -> Option<BlockId> {
        let parent = self.nodes[id as usize].parent;
        (parent != NO_PARENT && self.nodes[parent as usize].state == State::Resident)
            .then_some(parent)
    }

    /// Move the block to another rank.
    pub fn set_rank(&mut self, id: BlockId, rank: Rank) {
        self.expect_resident(id);
        self.resident[self.nodes[id as usize].rank.queue as usize] -= 1;
        self.resident[rank.queue as usize] += 1;
        self.update(id, |node| node.rank = rank);
    }

    /// Protect the block until the matching `unpin`.
    pub fn pin(&mut self, id: BlockId) {
        self.expect_resident(id);
        self.update(id, |node| {
            node.pins = node.pins.checked_add(1).expect("a block has at most 65,535 pins");
        });
    }

    /// Undo one `pin`.
    pub fn unpin(&mut self, id: BlockId) {
        self.expect_resident(id);
        self.update(id, |node| {
            node.pins = node.pins.checked_sub(1).expect("unpin without pin");
        });
    }

    /// The evictable leaf of `queue` with the smallest priority.
    #[must_use]
    pub fn first_leaf(&self, queue: u8) -> Option<BlockId> {
        self.leaves[queue as usize].first()
    }

    /// Remove a block that nobody has pinned.
    pub fn remove(&mut self, id: BlockId) {
        self.expect_resident(id);
        assert_eq!(self.nodes[id as usize].pins, 0, "block {id} is pinned");
        self.resident[self.nodes[id as usize].rank.queue as usize] -= 1;
        self.update(id, |node| node.state = State::Hollow);
        self.sweep(id);
    }

    /// Free `id` and its ancestors as far as they are hollow and childless.
    fn sweep(&mut self, mut id: u32) {
        while self.nodes[id as usize].state == State::Hollow
            && self.nodes[id as usize].children == 0
        {
            let parent = self.nodes[id as usize].parent;
            self.nodes[id as usize].state = State::Free;
            self.free.push(id);
            if parent == NO_PARENT {
                return;
            }
            self.update(parent, |node| node.children -= 1);
            id = parent;
        }
    }

    /// Change a node and keep its membership in the heaps true.
    fn update(&mut self, id: u32, change: impl FnOnce(&mut Node)) {
        let node = &self.nodes[id as usize];
        if node.place != ABSENT {
            self.leaves[node.rank.queue as usize].take(&mut self.nodes, id);
        }
        change(&mut self.nodes[id as usize]);
        let node = &self.nodes[id as usize];
        if node.state == State::Resident && node.children == 0 && node.pins == 0 {
            self.leaves[node.rank.queue as usize].push(&mut self.nodes, id);
        }
    }

    fn expect_resident(&self, id: u32) {
        let state = self.nodes.get(id as usize).map(|node| node.state);
        assert_eq!(state, Some(State::Resident), "block {id} is not resident");
    }
}
