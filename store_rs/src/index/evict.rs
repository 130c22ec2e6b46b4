//! The tree's shape and the way out of it: adding nodes, evicting leaves, letting bodies go.

use super::operate::Pins;
use super::stats::Category;
use super::{Index, NONE, Node, NodeId, Tick, hash};
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
    pub(super) fn allocate(&mut self, bytes: u64, align: u64, now: Tick) -> Option<ExtentId> {
        let reachable = self.alloc.free_bytes() + self.bytes[Category::Resident];
        if self.alloc.rounded(bytes)? > reachable {
            return None;
        }
        loop {
            if let Some(extent) = self.alloc.allocate_aligned(bytes, align) {
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

    /// Tell the policy about `node` if it is evictable.
    pub(super) fn offer(&mut self, node: NodeId) {
        if let Some(last_used) = self.evictable(node) {
            self.policy.offer(node, last_used);
        }
    }

    /// Take the body from a node: freed now if nobody reads it, else at its last release.
    pub(super) fn detach(&mut self, node: NodeId) {
        let was_readable = self.readable(node);
        let extent = std::mem::replace(&mut self.nodes[node as usize].body, NONE);
        let Node { parent, .. } = self.nodes[node as usize];
        self.pins.remove(node);
        self.tenants.refund(self.nodes[node as usize].tenant(), self.alloc.size(extent));
        self.bodies[extent as usize].node = NONE;
        if was_readable {
            self.tell(node);
        }
        if self.bodies[extent as usize].leases == 0 {
            self.release_body(extent);
        }
        self.cool_down(parent);
        self.remove_if_empty(node);
    }

    /// Drop a block wherever it is.
    pub(super) fn forget(&mut self, node: NodeId) {
        self.nodes[node as usize].children += 1;
        match self.body(node) {
            Some(body) if self.bodies[body as usize].len == 0 => {
                // Bytes are on their way into it.
                self.bodies[body as usize].kind = super::DOOMED;
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

    /// One lease of `extent` ends; `zombie` if its session was quarantined.
    pub(super) fn drop_lease(&mut self, extent: ExtentId, zombie: bool) {
        self.change(extent, |body| {
            body.leases -= 1;
            body.zombies -= u32::from(zombie);
        });
        let body = self.bodies[extent as usize];
        match body.node {
            NONE if body.leases == 0 => self.release_body(extent),
            NONE => {}
            node => self.offer(node),
        }
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
        self.evict_node(node);
        true
    }

    /// Take a node's body to make room.
    pub(super) fn evict_node(&mut self, node: NodeId) {
        let kept = self.on_disk(node);
        self.counters.evicted_to_disk += u64::from(kept);
        self.counters.evicted_for_room += u64::from(!kept);
        self.detach(node);
    }

    pub(super) fn next_victim(&mut self) -> Option<NodeId> {
        let (nodes, bodies, pins) = (&self.nodes, &self.bodies, &self.pins);
        self.policy.victim(&|node| evictable(nodes, bodies, pins, node))
    }

    /// With no leaf to evict, a block within a chain may go if it is on disk: a match still gets
    /// past it. Found by a hand that goes round, a bounded way at a time. What was used at `now` or
    /// later stays: it may be a part of what room is made for.
    fn next_on_disk(&mut self, now: Tick) -> Option<NodeId> {
        for _ in 0..self.nodes.len().min(HAND_STEPS) {
            self.hand = (self.hand + 1) % self.nodes.len() as NodeId;
            let record = self.nodes[self.hand as usize];
            let Node { body, .. } = record;
            if body == NONE || !self.on_disk(self.hand) || record.last_used() >= now {
                continue;
            }
            let body = self.bodies[body as usize];
            if body.len > 0 && body.leases == 0 && !self.pins.holds(self.hand) {
                return Some(self.hand);
            }
        }
        None
    }

    fn evictable(&self, node: NodeId) -> Option<Tick> {
        evictable(&self.nodes, &self.bodies, &self.pins, node)
    }

    /// Free an extent that no node and no lease has.
    pub(super) fn release_body(&mut self, extent: ExtentId) {
        let size = self.alloc.size(extent);
        let body = self.bodies[extent as usize];
        self.bytes[body.category()] -= size;
        if body.len > 0 {
            self.usages.remove(&body, size);
            self.usages.forget_unused(body.kind);
        }
        self.bodies[extent as usize].node = NONE;
        self.alloc.free(extent);
    }
}

/// When `node` was last used, if it is a resident leaf that nobody reads or writes.
fn evictable(nodes: &[Node], bodies: &[super::Body], pins: &Pins, id: NodeId) -> Option<Tick> {
    let node = nodes.get(id as usize)?;
    if node.body == NONE || node.warm > 0 || pins.holds(id) {
        return None;
    }
    let body = bodies[node.body as usize];
    (body.len > 0 && body.leases == 0).then(|| node.last_used())
}
