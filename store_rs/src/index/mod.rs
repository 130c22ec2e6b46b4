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
mod hint;
mod journal;
mod leases;
mod leaves;
mod list;
mod node;
mod operate;
mod policy;
mod put;
mod quota;
mod readers;
mod replace;
mod stats;
#[cfg(test)]
mod tests;
mod usage;

use std::collections::HashMap;

use hashbrown::HashTable;

use crate::alloc::{Allocator, ExtentId};
use crate::key::Key;
pub use below::{Demotion, Erased, Header, Promotion};
pub use hint::Hint;
use journal::Journal;
pub use journal::{Entry, JOURNAL_BYTES, Tier};
use leases::Leases;
pub use leases::Token;
use leaves::Leaves;
use node::Node;
pub use operate::Listed;
use operate::Pins;
pub use policy::{Eviction, EvictionPolicy};
pub use put::{Refusal, Reserve, Wish};
pub use readers::Leased;
use readers::Readers;
pub use replace::{Candidate, Replacement};
use stats::Tenants;
pub use stats::{Bytes, Counters, DiskUse, Snapshot, TenantUse};
use usage::Usages;
pub use usage::{Kind, Stored, Usage};

/// Microseconds since the store started.
pub type Tick = u64;
/// Names a node until it is removed; ids are reused.
pub type NodeId = u32;
/// Names a session; never reused.
pub type SessionId = u64;

const NONE: u32 = u32::MAX;

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

/// What the index knows of an extent in use.
#[derive(Clone, Copy, Default)]
struct Body {
    /// Whose bytes they are; NONE once the node let go of them.
    node: NodeId,
    /// Bytes of the container; 0 while it is reserved.
    len: u32,
    /// Row of `Usages`.
    kind: u8,
    /// Not worth storing in another form.
    keep_form: bool,
    /// Processes that put or leased it, a bit each.
    users: u16,
}

/// The state machine. One per store, behind the server's lock.
pub struct Index {
    alloc: Allocator<Body>,
    readers: HashMap<ExtentId, Readers>,
    table: HashTable<NodeId>,
    nodes: Vec<Node>,
    spare: Vec<NodeId>,
    sessions: HashMap<SessionId, Leases>,
    next_session: SessionId,
    policy: Box<dyn EvictionPolicy>,
    leaves: Leaves,
    /// How long blocks stay that nobody uses, once room has run out.
    stays: Option<Tick>,
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
            readers: HashMap::new(),
            table: HashTable::new(),
            nodes: Vec::new(),
            spare: Vec::new(),
            sessions: HashMap::new(),
            next_session: 1,
            policy,
            leaves: Leaves::default(),
            stays: None,
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

    /// How many of `keys`, from the first, are here or on disk.
    pub fn match_prefix(&mut self, keys: &[Key], hint: Hint, now: Tick) -> usize {
        let mut matched = 0;
        for key in keys {
            let Some(node) = self.find(key).filter(|&node| self.present(node)) else { break };
            self.seen(node, hint, now);
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

    /// Whether `key` is being put right now.
    pub fn is_pending(&self, key: &Key) -> bool {
        let body = self.find(key).and_then(|node| self.body(node));
        body.is_some_and(|body| self.alloc.owner(body).len == 0)
    }

    fn find(&self, key: &Key) -> Option<NodeId> {
        self.table.find(hash(key), |&node| self.nodes[node as usize].key == *key).copied()
    }

    fn body(&self, node: NodeId) -> Option<ExtentId> {
        let body = self.nodes[node as usize].body;
        (body != NONE).then_some(body)
    }

    fn readable(&self, node: NodeId) -> bool {
        self.body(node).is_some_and(|body| self.alloc.owner(body).len > 0)
    }

    /// Whether its bytes are in DRAM or on a disk that serves.
    fn present(&self, node: NodeId) -> bool {
        self.readable(node) || self.on_disk(node)
    }

    /// Whether a match can get past `node`, now or once a put has ended.
    fn reachable(&self, node: NodeId) -> bool {
        self.body(node).is_some() || self.on_disk(node)
    }

    /// A match got to this block.
    fn seen(&mut self, node: NodeId, hint: Hint, now: Tick) {
        let record = &mut self.nodes[node as usize];
        record.touch(now);
        let mut trace = self.policy.seen(record.trace());
        if hint != Hint::NONE {
            trace = self.policy.hinted(trace, hint.strength(self.stays));
            self.leaves.hasten(node, self.policy.rank(trace));
        }
        record.set_trace(trace);
    }

    /// Somebody wanted this block again.
    fn used(&mut self, node: NodeId, hint: Hint, now: Tick) {
        let strength = hint.strength(self.stays);
        let record = &mut self.nodes[node as usize];
        record.touch(now);
        let trace = match record.is_counted() {
            true if hint == Hint::NONE => record.trace(),
            true => self.policy.hinted(record.trace(), strength),
            false => self.policy.used(record.trace(), strength),
        };
        record.set_trace(trace);
        record.set_counted(false);
        if record.is_first_read() {
            self.worth_keeping(node);
        }
    }

    /// The bytes of this block are about to come. On disk, it was here before.
    fn comes(&mut self, node: NodeId, hint: Hint) {
        let Node { key, parent, disk, .. } = self.nodes[node as usize];
        let strength = hint.strength(self.stays);
        let trace = if disk == NONE {
            let parent = (parent != NONE).then(|| self.nodes[parent as usize].trace());
            self.policy.came(&key, parent, strength)
        } else {
            self.policy.used(self.nodes[node as usize].trace(), strength)
        };
        self.nodes[node as usize].set_trace(trace);
    }

    fn assert_accounted(&self) {
        let used = self.bytes.total();
        let (free, capacity) = (self.alloc.free_bytes(), self.alloc.capacity());
        assert!(free + used == capacity, "{free} free + {:?} != {capacity}", self.bytes);
    }
}
