//! The tree's shape and the way out of it: adding nodes, evicting leaves, letting bodies go.

use super::stats::Category;
use super::{Index, NONE, Node, NodeId, Tick, Tier, hash};
use crate::alloc::ExtentId;
use crate::key::Key;

impl Index {
    /// Drop the blocks of `keys`; leased ones vanish from the index now and free their bytes later.
    pub fn evict(&mut self, keys: &[Key]) -> usize {
        let mut evicted = 0;
        for key in keys {
            if let Some(node) = self.find(key).filter(|&node| self.readable(node)) {
                self.detach(node);
                evicted += 1;
            }
        }
        self.counters.evicted_on_request += evicted as u64;
        self.assert_accounted();
        evicted
    }

    /// An extent of `bytes`, evicting the policy's choice until one fits.
    pub(super) fn allocate(&mut self, bytes: u64) -> Option<ExtentId> {
        let reachable = self.alloc.free_bytes() + self.bytes[Category::Resident];
        if self.alloc.rounded(bytes)? > reachable {
            return None;
        }
        loop {
            if let Some(extent) = self.alloc.allocate(bytes) {
                return Some(extent);
            }
            if !self.evict_one() {
                return None;
            }
        }
    }

    /// A new node under `parent`, or None when the index is at its limit and nothing can go.
    pub(super) fn new_node(&mut self, key: &Key, parent: NodeId) -> Option<NodeId> {
        if parent != NONE {
            self.nodes[parent as usize].children += 1;
        }
        if self.table.len() >= self.limits.max_blocks && !self.evict_one() {
            self.forget_child(parent);
            return None;
        }
        let node = Node { key: *key, last_used: 0, parent, children: 0, body: NONE, tenant: 0 };
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

    /// Tell the policy about `node` if it is evictable.
    pub(super) fn offer(&mut self, node: NodeId) {
        if let Some(last_used) = self.evictable(node) {
            self.policy.offer(node, last_used);
        }
    }

    /// Take the body from a node: freed now if nobody reads it, else at its last release.
    pub(super) fn detach(&mut self, node: NodeId) {
        if self.readable(node) {
            self.journal.record(&self.nodes[node as usize].key, Tier::Gone);
        }
        let extent = std::mem::replace(&mut self.nodes[node as usize].body, NONE);
        self.tenants.refund(self.nodes[node as usize].tenant, self.alloc.size(extent));
        self.bodies[extent as usize].node = NONE;
        if self.bodies[extent as usize].leases == 0 {
            self.release_body(extent);
        }
        self.remove_if_empty(node);
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
            let Node { key, parent, children, body, .. } = self.nodes[node as usize];
            if body != NONE || children > 0 {
                return self.offer(node);
            }
            if let Ok(entry) = self.table.find_entry(hash(&key), |&other| other == node) {
                entry.remove();
            }
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

    fn evict_one(&mut self) -> bool {
        let Some(node) = self.next_victim() else { return false };
        self.counters.evicted_for_room += 1;
        self.detach(node);
        true
    }

    fn next_victim(&mut self) -> Option<NodeId> {
        let (nodes, bodies) = (&self.nodes, &self.bodies);
        self.policy.victim(&|node| evictable(nodes, bodies, node))
    }

    fn evictable(&self, node: NodeId) -> Option<Tick> {
        evictable(&self.nodes, &self.bodies, node)
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
fn evictable(nodes: &[Node], bodies: &[super::Body], node: NodeId) -> Option<Tick> {
    let Node { body, children, last_used, .. } = *nodes.get(node as usize)?;
    if body == NONE || children > 0 {
        return None;
    }
    let body = bodies[body as usize];
    (body.len > 0 && body.leases == 0).then_some(last_used)
}
