//! The tree's shape and the way out of it: adding nodes, evicting leaves, letting bodies go.

use super::put::DOOMED;
use super::stats::Category;
use super::{Body, Index, NONE, Node, NodeId, Tick, hash};
use crate::alloc::ExtentId;
use crate::key::Key;

/// Nodes looked at for one victim within a chain.
const HAND_STEPS: usize = 4096;

impl Index {
    /// Drop the blocks of `keys`; leased ones vanish from the index now and free their bytes later.
    pub fn evict(&mut self, keys: &[Key]) -> usize {
        let mut evicted = 0;
        for key in keys {
            if let Some(node) = self.find(key).filter(|&node| self.evictable_on_request(node)) {
                self.forget(node);
                evicted += 1;
            }
        }
        self.counters.evicted_on_request += evicted as u64;
        self.assert_accounted();
        evicted
    }

    /// An extent of `bytes`, evicting the policy's choice until one fits.
    pub(super) fn allocate(
        &mut self,
        bytes: u64,
        align: u64,
        body: Body,
        now: Tick,
    ) -> Option<ExtentId> {
        let reachable = self.alloc.free_bytes() + self.bytes[Category::Resident];
        if self.alloc.rounded(bytes)? > reachable {
            return None;
        }
        loop {
            if let Some(extent) = self.alloc.allocate(bytes, align, body) {
                return Some(extent);
            }
            if !self.evict_one(now) && !self.end_soft_pins(now, true) {
                return None;
            }
        }
    }

    /// A new node under `parent`, or None when the index is at its limit and nothing can go.
    pub(super) fn new_node(&mut self, key: &Key, parent: NodeId) -> Option<NodeId> {
        if parent != NONE {
            self.nodes[parent as usize].children += 1;
        }
        if !self.room_for_a_node() {
            self.forget_child(parent);
            return None;
        }
        let node = Node::new(*key, parent);
        let id = match self.spare.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as NodeId
            }
        };
        let nodes = &self.nodes;
        self.table.insert_unique(hash(key), id, |&other| hash(&nodes[other as usize].key));
        Some(id)
    }

    /// Make the index smaller by a node if it is at its limit.
    fn room_for_a_node(&mut self) -> bool {
        while self.table.len() >= self.limits.max_blocks {
            let on_disk = self.log().map_or(0, |log| log.len());
            let disk_first = on_disk * 2 > self.table.len();
            if !(disk_first && self.forget_coldest_segment()
                || self.evict_one(Tick::MAX)
                || self.forget_coldest_segment())
            {
                return false;
            }
        }
        true
    }

    /// Name the parent of a node that was known only as one.
    pub(super) fn link(&mut self, node: NodeId, parent: NodeId) {
        let record = &mut self.nodes[node as usize];
        if parent == NONE || record.parent != NONE {
            return;
        }
        record.parent = parent;
        let warm = u32::from(record.body != NONE);
        self.nodes[parent as usize].children += 1;
        self.nodes[parent as usize].warm += warm;
    }

    /// One more node below `parent` has a body, or is about to.
    pub(super) fn warm_up(&mut self, parent: NodeId) {
        if parent != NONE {
            self.nodes[parent as usize].warm += 1;
        }
    }

    /// One less; then the parent may be a leaf.
    pub(super) fn cool_down(&mut self, parent: NodeId) {
        if parent != NONE {
            self.nodes[parent as usize].warm -= 1;
            self.offer(parent);
        }
    }

    /// Remember `node` as one that may go, if it is evictable.
    pub(super) fn offer(&mut self, node: NodeId) {
        if !self.leaves.has(node) && self.is_evictable(node) {
            let rank = self.policy.rank(self.nodes[node as usize].trace());
            self.leaves.offer(node, rank);
        }
    }

    /// Take the body from a node: freed now if nobody reads it, else at its last release.
    pub(super) fn detach(&mut self, node: NodeId) {
        let was_readable = self.readable(node);
        let extent = std::mem::replace(&mut self.nodes[node as usize].body, NONE);
        let Node { parent, .. } = self.nodes[node as usize];
        self.pins.remove(node);
        self.tenants.refund(self.nodes[node as usize].tenant(), self.alloc.size(extent));
        self.alloc.owner_mut(extent).node = NONE;
        if was_readable {
            self.tell(node);
        }
        if !self.is_held(extent) {
            self.release_body(extent);
        }
        self.cool_down(parent);
        self.remove_if_empty(node);
    }

    /// Drop a block wherever it is.
    pub(super) fn forget(&mut self, node: NodeId) {
        self.nodes[node as usize].children += 1;
        match self.body(node) {
            Some(body) if self.alloc.owner(body).len == 0 => {
                // Bytes are on their way into it.
                self.alloc.owner_mut(body).kind = DOOMED;
            }
            Some(_) => self.detach(node),
            None => {}
        }
        self.erase(node);
        self.nodes[node as usize].children -= 1;
        self.remove_if_empty(node);
    }

    fn evictable_on_request(&self, node: NodeId) -> bool {
        self.readable(node) || self.nodes[node as usize].disk != NONE
    }

    /// Remove `node`, and then its ancestors, as long as they have neither bytes nor children.
    pub(super) fn remove_if_empty(&mut self, mut node: NodeId) {
        while node != NONE {
            let record = self.nodes[node as usize];
            if !record.is_empty() {
                return self.offer(node);
            }
            let Node { key, parent, .. } = record;
            if let Ok(entry) = self.table.find_entry(hash(&key), |&other| other == node) {
                entry.remove();
            }
            self.pins.remove(node);
            self.spare.push(node);
            if parent != NONE {
                self.nodes[parent as usize].children -= 1;
            }
            node = parent;
        }
    }

    fn forget_child(&mut self, parent: NodeId) {
        if parent != NONE {
            self.nodes[parent as usize].children -= 1;
            self.remove_if_empty(parent);
        }
    }

    fn evict_one(&mut self, now: Tick) -> bool {
        self.end_soft_pins(now, false);
        let Some(node) = self.next_victim().or_else(|| self.next_on_disk(now)) else {
            return false;
        };
        if now != Tick::MAX {
            let age = now.saturating_sub(self.nodes[node as usize].last_used());
            self.stays = Some(self.stays.map_or(age, |stays| stays - stays / 8 + age / 8));
        }
        self.evict_node(node);
        true
    }

    /// Take a node's body to make room.
    pub(super) fn evict_node(&mut self, node: NodeId) {
        let kept = self.on_disk(node);
        self.counters.evicted_to_disk += u64::from(kept);
        self.counters.evicted_for_room += u64::from(!kept);
        if !kept {
            self.leaves_for_good(node);
        }
        self.detach(node);
    }

    /// The policy remembers a block that goes for want of room.
    pub(super) fn leaves_for_good(&mut self, node: NodeId) {
        let record = &self.nodes[node as usize];
        self.policy.left(&record.key, record.trace());
    }

    pub(super) fn next_victim(&mut self) -> Option<NodeId> {
        let mut leaves = std::mem::take(&mut self.leaves);
        self.policy.filled(self.alloc.used());
        let rank = |node| {
            let evictable = self.is_evictable(node);
            evictable.then(|| self.policy.rank(self.nodes[node as usize].trace()))
        };
        let victim = leaves.pop(rank);
        self.leaves = leaves;
        victim
    }

    /// With no leaf to evict, a block within a chain may go if it is on disk: a match still gets
    /// past it. Found by a hand that goes round, a bounded way at a time. What was used at `now` or
    /// later stays: it may be a part of what room is made for.
    fn next_on_disk(&mut self, now: Tick) -> Option<NodeId> {
        for _ in 0..self.nodes.len().min(HAND_STEPS) {
            self.hand = (self.hand + 1) % self.nodes.len() as NodeId;
            let record = &self.nodes[self.hand as usize];
            let free = self.on_disk(self.hand) && !record.used_since(now);
            if free && self.is_idle(self.hand) {
                return Some(self.hand);
            }
        }
        None
    }

    /// Whether `node` is a resident leaf that nobody reads or writes.
    fn is_evictable(&self, node: NodeId) -> bool {
        self.nodes.get(node as usize).is_some_and(|node| node.warm == 0) && self.is_idle(node)
    }

    /// Whether a node has a body that nobody reads, writes, or wants to stay.
    pub(super) fn is_idle(&self, node: NodeId) -> bool {
        let body = self.body(node).filter(|&body| self.alloc.owner(body).len > 0);
        body.is_some_and(|body| !self.is_held(body)) && !self.pins.holds(node)
    }

    /// Free an extent that no node and no lease has.
    pub(super) fn release_body(&mut self, extent: ExtentId) {
        let size = self.alloc.size(extent);
        let body = *self.alloc.owner(extent);
        if body.len > 0 {
            self.bytes[Category::Resident] -= size;
            self.usages.remove(&body, size);
            self.usages.forget_unused(body.kind);
        } else {
            self.bytes[Category::Reserved] -= size;
        }
        self.alloc.free(extent);
    }
}
