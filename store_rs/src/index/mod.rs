//! The index: which blocks exist, where their bytes are, who reads them, and what to evict.
//!
//! Owns the key tree, the extents and every lease. It is a pure state machine: no fds, no clock, no
//! threads; time is an argument. Two kinds of records:
//!
//! - a **node** is a key in the tree. It has a body while the block's bytes are in DRAM, and an
//!   entry of the log while they are on disk; a node with neither stays only while it has children,
//!   so that a dropped parent, once put again, finds them.
//! - a **body** is an extent: *reserved* (a put is copying into it, invisible), then *resident*,
//!   *leased* while a session reads it, *quarantined* while its only readers are sessions that
//!   broke the protocol. A body whose node let go of it (evicted, corrupt) lives until its last
//!   lease ends.
//!
//! Invariants, asserted in production after every change: `free + reserved + resident + leased +
//! quarantined = capacity`; leased bytes are never reused; eviction takes leaves only, among the
//! nodes with bodies. A broken invariant panics: the store must not serve bytes it cannot account for.

mod below;
mod evict;
mod journal;
mod leases;
mod list;
mod node;
mod operate;
mod policy;
mod quota;
mod replace;
mod stats;
#[cfg(test)]
mod tests;
mod usage;

use std::collections::HashMap;

use hashbrown::HashTable;

use crate::alloc::{Allocator, ExtentId, GRANULE};
use crate::key::Key;
pub use below::{Demotion, Erased, Header, Promotion};
use journal::Journal;
pub use journal::{Entry, Tier};
use leases::Leases;
pub use leases::Token;
use node::Node;
pub use operate::Listed;
use operate::Pins;
pub use policy::{EvictionPolicy, Lru};
pub use replace::{Candidate, Replacement};
pub use stats::{Bytes, Counters, DiskUse, Snapshot, TenantUse};
use stats::{Category, Tenants};
pub use usage::{Kind, Stored, Usage};
use usage::{Usages, user_bit};

/// Microseconds since the store started.
pub type Tick = u64;
/// Names a node until it is removed; ids are reused.
pub type NodeId = u32;
/// Names a session; never reused.
pub type SessionId = u64;

const NONE: u32 = u32::MAX;
/// In place of the kind of a reserved body: evicted before it is complete.
const DOOMED: u16 = u16::MAX;

/// Limits that bound the index whatever clients do.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Nodes the index may hold; the oldest leaf goes when one more is needed.
    pub max_blocks: usize,
    /// Leases one session may hold at once.
    pub max_leases: usize,
    /// Bytes of DRAM one tenant may take; the unnamed tenant is not limited.
    pub tenant_bytes: u64,
    /// Bytes of disk one tenant may take.
    pub tenant_disk_bytes: u64,
}

#[derive(Clone, Copy, Default)]
struct Body {
    node: NodeId,
    len: u32,
    leases: u32,
    zombies: u32,
    /// Row of `Usages`.
    kind: u16,
    /// Processes that put or leased it, a bit each, and `KEEP_FORM`.
    users: u16,
}

/// A leased block: `len` bytes at `offset` of the arena, until `token` is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leased {
    /// Releases the lease, once.
    pub token: Token,
    /// Where in the arena.
    pub offset: u64,
    /// How many bytes.
    pub len: u32,
}

/// Why a put was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Larger than the arena.
    TooLarge,
    /// Everything that could make room is being read or written.
    Full,
    /// Its tenant has all it may have, and none of that can go.
    OverQuota,
    /// Its parent is not in the store, so no match could reach it.
    ParentAbsent,
}

/// What `reserve` found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reserve {
    /// The block is resident already.
    Present,
    /// Another put of the same key is copying right now.
    Pending,
    /// There is room once a block that is being written to disk is let go: try again soon.
    Busy,
    /// Write the block at `offset`, then `publish` or `abort` the extent.
    Granted(ExtentId, u64),
    /// Not stored.
    Refused(Refusal),
}

/// The state machine. One per store, behind the server's lock.
pub struct Index {
    alloc: Allocator,
    table: HashTable<NodeId>,
    nodes: Vec<Node>,
    spare: Vec<NodeId>,
    bodies: Vec<Body>,
    sessions: HashMap<SessionId, Leases>,
    next_session: SessionId,
    policy: Box<dyn EvictionPolicy>,
    limits: Limits,
    bytes: Bytes,
    counters: Counters,
    tenants: Tenants,
    usages: Usages,
    journal: Journal,
    below: Option<below::Below>,
    pins: Pins,
    hand: NodeId,
}

fn hash(key: &Key) -> u64 {
    let mut head = [0; 8];
    head.copy_from_slice(&key[..8]);
    u64::from_le_bytes(head)
}

impl Index {
    /// An empty index over an arena of `capacity` bytes.
    pub fn new(capacity: u64, limits: Limits, policy: Box<dyn EvictionPolicy>) -> Self {
        Self {
            alloc: Allocator::new(capacity),
            table: HashTable::new(),
            nodes: Vec::new(),
            spare: Vec::new(),
            bodies: Vec::new(),
            sessions: HashMap::new(),
            next_session: 1,
            policy,
            limits,
            bytes: Bytes::default(),
            counters: Counters::default(),
            tenants: Tenants::default(),
            usages: Usages::default(),
            journal: Journal::default(),
            below: None,
            pins: Pins::default(),
            hand: 0,
        }
    }

    /// How many of `keys`, from the first, are here or on disk. Counts as a use of each.
    pub fn match_prefix(&mut self, keys: &[Key], now: Tick) -> usize {
        let mut matched = 0;
        for key in keys {
            let Some(node) = self.find(key).filter(|&node| self.present(node)) else { break };
            self.nodes[node as usize].touch(now);
            matched += 1;
        }
        self.counters.match_calls += 1;
        self.counters.matched_blocks += matched as u64;
        matched
    }

    /// Those of `keys` that are neither here nor being written.
    pub fn missing(&self, keys: &[Key]) -> Vec<Key> {
        let absent = |key: &&Key| self.find(key).and_then(|node| self.body(node)).is_none();
        keys.iter().filter(absent).copied().collect()
    }

    /// A new session, holding nothing.
    pub fn open_session(&mut self) -> SessionId {
        let id = self.next_session;
        self.next_session += 1;
        self.counters.sessions_opened += 1;
        self.sessions.insert(id, Leases::default());
        id
    }

    /// Tell which process `session` belongs to, to count who shares blocks.
    pub fn identify(&mut self, session: SessionId, process: u32) {
        if let Some(held) = self.sessions.get_mut(&session) {
            held.user = user_bit(process);
        }
    }

    /// `session` put a block that is here, or had just been put.
    pub fn put_by(&mut self, session: SessionId, key: &Key) {
        let user = self.sessions.get(&session).map_or(0, |held| held.user);
        let node = self.find(key).filter(|&node| self.readable(node));
        if let Some(node) = node {
            self.count_user(self.nodes[node as usize].body, user);
        }
    }

    /// Leases `session` may still take.
    pub fn lease_room(&self, session: SessionId) -> usize {
        self.sessions.get(&session).map_or(0, |held| self.limits.max_leases - held.len())
    }

    /// Lease one block for `session`; None if it is absent or the session is at its limit.
    pub fn lease(&mut self, session: SessionId, key: &Key, now: Tick) -> Option<Leased> {
        let node = self.find(key).filter(|&node| self.readable(node));
        let Some(node) = node else {
            self.counters.lease_misses += 1;
            return None;
        };
        let held = self.sessions.get_mut(&session)?;
        if held.quarantined || held.len() >= self.limits.max_leases {
            return None;
        }
        let extent = self.nodes[node as usize].body;
        let (token, user) = (held.add(extent, now), held.user);
        self.used(node, now);
        self.count_user(extent, user);
        self.change(extent, |body| body.leases += 1);
        self.counters.lease_hits += 1;
        self.assert_accounted();
        let len = self.bodies[extent as usize].len;
        Some(Leased { token, offset: self.alloc.offset(extent), len })
    }

    /// End one lease. False if `session` holds no such lease; then nothing changes.
    pub fn release(&mut self, session: SessionId, token: Token) -> bool {
        let extent = self.sessions.get_mut(&session).and_then(|held| held.remove(token));
        let Some(extent) = extent else {
            self.counters.invalid_releases += 1;
            return false;
        };
        self.drop_lease(extent, false);
        self.assert_accounted();
        true
    }

    /// The holder of `token` read wrong bytes: drop the block, so that it is a miss from now on.
    pub fn report_corrupt(&mut self, session: SessionId, token: Token) -> bool {
        let extent = self.sessions.get(&session).and_then(|held| held.get(token));
        let Some(extent) = extent else { return false };
        let node = self.bodies[extent as usize].node;
        if node != NONE {
            self.counters.corrupt_dropped += 1;
            self.forget(node);
        }
        self.assert_accounted();
        true
    }

    /// The session broke the protocol but its process lives: keep what it reads out of use.
    pub fn quarantine_session(&mut self, session: SessionId) -> usize {
        let Some(held) = self.sessions.get_mut(&session) else { return 0 };
        held.quarantined = true;
        self.counters.sessions_violated += 1;
        let extents: Vec<_> = held.extents().collect();
        for &extent in &extents {
            self.change(extent, |body| body.zombies += 1);
        }
        self.assert_accounted();
        extents.len()
    }

    /// The session hung up, or its process is dead: all its leases end.
    pub fn end_session(&mut self, session: SessionId) {
        let Some(held) = self.sessions.remove(&session) else { return };
        for extent in held.extents() {
            self.drop_lease(extent, held.quarantined);
        }
        self.assert_accounted();
    }

    /// Make room for a block of `bytes` under `key`, evicting leaves as needed.
    pub fn reserve(
        &mut self,
        key: &Key,
        parent: Option<&Key>,
        bytes: u64,
        tenant: &str,
        now: Tick,
    ) -> Reserve {
        let found = self.find(key);
        if let Some(body) = found.and_then(|node| self.body(node)) {
            self.used(self.bodies[body as usize].node, now);
            if self.bodies[body as usize].len == 0 {
                return Reserve::Pending;
            }
            self.counters.puts_present += 1;
            return Reserve::Present;
        }
        let parent = match parent.map(|key| self.find(key).filter(|&node| self.reachable(node))) {
            Some(None) => return self.refuse(Refusal::ParentAbsent),
            Some(Some(node)) => {
                self.nodes[node as usize].touch(now);
                node
            }
            None => NONE,
        };
        if u32::try_from(bytes).is_err() || self.alloc.rounded(bytes).is_none() {
            return self.refuse(Refusal::TooLarge);
        }
        let Some(node) = found.or_else(|| self.new_node(key, parent)) else {
            return self.refuse(Refusal::Full);
        };
        self.link(node, parent);
        if self.nodes[node as usize].disk == NONE {
            let row = self.tenants.row(tenant);
            self.nodes[node as usize].set_tenant(row);
        }
        if !self.room_in_quota(node, bytes) {
            self.remove_if_empty(node);
            return self.refuse(Refusal::OverQuota);
        }
        let Some(extent) = self.attach(node, bytes, GRANULE, now) else {
            let busy = self.is_demoting();
            return if busy { Reserve::Busy } else { self.refuse(Refusal::Full) };
        };
        Reserve::Granted(extent, self.alloc.offset(extent))
    }

    /// The container in a reserved extent is complete and visible from now on. What it does not need
    /// of the extent is free again.
    ///
    /// # Panics
    /// If the extent is not reserved, or shorter than the container.
    pub fn publish(&mut self, extent: ExtentId, stored: Stored) {
        self.counters.puts_stored += 1;
        self.fill(extent, stored);
    }

    /// As `publish`, for a block that came from a tier below.
    pub fn land(&mut self, extent: ExtentId, stored: Stored) {
        self.counters.blocks_landed += 1;
        self.fill(extent, stored);
    }

    fn fill(&mut self, extent: ExtentId, stored: Stored) {
        let before = self.alloc.size(extent);
        let doomed = self.bodies[extent as usize].kind == DOOMED;
        self.settle(extent, stored);
        let node = self.bodies[extent as usize].node;
        let tenant = self.nodes[node as usize].tenant();
        self.tenants.resize(tenant, before, self.alloc.size(extent));
        if doomed {
            self.forget(node);
        } else {
            self.tell(node);
            self.offer(node);
        }
        self.assert_accounted();
    }

    /// A put failed while copying: its bytes return, nothing was ever visible.
    pub fn abort(&mut self, extent: ExtentId) {
        self.detach(self.bodies[extent as usize].node);
        self.assert_accounted();
    }

    /// Whether `key` is being put right now.
    pub fn is_pending(&self, key: &Key) -> bool {
        let body = self.find(key).and_then(|node| self.body(node));
        body.is_some_and(|body| self.bodies[body as usize].len == 0)
    }

    fn refuse(&mut self, why: Refusal) -> Reserve {
        match why {
            Refusal::TooLarge => self.counters.refused_too_large += 1,
            Refusal::Full => self.counters.refused_full += 1,
            Refusal::OverQuota => self.counters.refused_over_quota += 1,
            Refusal::ParentAbsent => self.counters.refused_parent_absent += 1,
        }
        Reserve::Refused(why)
    }

    fn find(&self, key: &Key) -> Option<NodeId> {
        self.table.find(hash(key), |&node| self.nodes[node as usize].key == *key).copied()
    }

    fn body(&self, node: NodeId) -> Option<ExtentId> {
        let body = self.nodes[node as usize].body;
        (body != NONE).then_some(body)
    }

    fn readable(&self, node: NodeId) -> bool {
        self.body(node).is_some_and(|body| self.bodies[body as usize].len > 0)
    }

    /// Whether its bytes are in DRAM or on a disk that serves.
    fn present(&self, node: NodeId) -> bool {
        self.readable(node) || self.on_disk(node)
    }

    /// Whether a match can get past `node`, now or once a put has ended.
    fn reachable(&self, node: NodeId) -> bool {
        self.body(node).is_some() || self.on_disk(node)
    }

    /// Somebody wanted this block again.
    fn used(&mut self, node: NodeId, now: Tick) {
        self.nodes[node as usize].touch(now);
        self.nodes[node as usize].count_read();
        self.worth_keeping(node);
    }

    /// Reserve a body of `bytes` for a node that has none; None, and no node left behind, if nothing
    /// can make room.
    fn attach(&mut self, node: NodeId, bytes: u64, align: u64, now: Tick) -> Option<ExtentId> {
        // While room is made, the node and its parent stay as if they had one child more.
        let parent = self.nodes[node as usize].parent;
        self.nodes[node as usize].children += 1;
        self.warm_up(parent);
        let extent = self.allocate(bytes, align, now);
        self.nodes[node as usize].children -= 1;
        let Some(extent) = extent else {
            self.cool_down(parent);
            self.remove_if_empty(node);
            self.assert_accounted();
            return None;
        };
        self.set_body(extent, Body { node, ..Body::default() });
        let size = self.alloc.size(extent);
        self.bytes[Category::Reserved] += size;
        let record = &mut self.nodes[node as usize];
        record.body = extent;
        record.touch(now);
        self.tenants.charge(record.tenant(), size);
        self.assert_accounted();
        Some(extent)
    }

    fn set_body(&mut self, extent: ExtentId, body: Body) {
        if self.bodies.len() <= extent as usize {
            self.bodies.resize(extent as usize + 1, Body { node: NONE, ..Body::default() });
        }
        self.bodies[extent as usize] = body;
    }

    /// Cut a reserved extent to its container and count what it holds.
    fn settle(&mut self, extent: ExtentId, stored: Stored) {
        let Stored { len, kind } = stored;
        assert!(self.bodies[extent as usize].len == 0, "extent {extent} published twice");
        assert!(len > 0 && u64::from(len) <= self.alloc.size(extent), "length outside its extent");
        self.bytes[Category::Reserved] -= self.alloc.shrink(extent, len.into());
        let kind = self.usages.row(kind);
        self.change(extent, |body| (body.len, body.kind) = (len, kind));
        self.usages.add(&self.bodies[extent as usize], self.alloc.size(extent));
    }

    /// Change a body and move its bytes between the categories accordingly.
    fn change(&mut self, extent: ExtentId, edit: impl FnOnce(&mut Body)) {
        let size = self.alloc.size(extent);
        let body = &mut self.bodies[extent as usize];
        self.bytes[body.category()] -= size;
        edit(body);
        self.bytes[body.category()] += size;
    }

    fn assert_accounted(&self) {
        let used = self.bytes.total();
        let (free, capacity) = (self.alloc.free_bytes(), self.alloc.capacity());
        assert!(free + used == capacity, "{free} free + {:?} != {capacity}", self.bytes);
    }
}

impl Body {
    fn category(&self) -> Category {
        match self {
            Self { len: 0, .. } => Category::Reserved,
            Self { leases: 0, .. } => Category::Resident,
            Self { leases, zombies, .. } if leases > zombies => Category::Leased,
            _ => Category::Quarantined,
        }
    }
}
