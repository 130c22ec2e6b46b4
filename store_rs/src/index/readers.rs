//! Who reads what: sessions, their leases, and how they end.
//!
//! A body is leased while any session reads it. A session that broke the protocol while its process
//! lives is quarantined: what it reads stays out of use until the kernel says that it is dead.

use super::leases::{Leases, Token};
use super::stats::Category;
use super::usage::user_bit;
use super::{Hint, Index, NONE, NodeId, SessionId, Tick};
use crate::alloc::ExtentId;
use crate::key::Key;

/// Leases on one body; kept only while there are any.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Readers {
    leases: u32,
    /// Of these, leases of quarantined sessions.
    zombies: u32,
}

impl Readers {
    fn category(self) -> Category {
        match self {
            Self { leases: 0, .. } => Category::Resident,
            Self { leases, zombies } if leases > zombies => Category::Leased,
            _ => Category::Quarantined,
        }
    }
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

impl Index {
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
    pub fn lease(
        &mut self,
        session: SessionId,
        key: &Key,
        hint: Hint,
        now: Tick,
    ) -> Option<Leased> {
        let Some(node) = self.find(key).filter(|&node| self.readable(node)) else {
            self.counters.lease_misses += 1;
            return None;
        };
        let leased = self.grant(session, node, now)?;
        let user = self.sessions.get(&session).map_or(0, |held| held.user);
        self.count_user(self.nodes[node as usize].body, user);
        self.used(node, hint, now);
        self.counters.lease_hits += 1;
        Some(leased)
    }

    /// As `lease`, for a check or for a peer: nobody here wanted the block.
    pub fn lend(&mut self, session: SessionId, key: &Key, now: Tick) -> Option<Leased> {
        let node = self.find(key).filter(|&node| self.readable(node))?;
        self.grant(session, node, now)
    }

    fn grant(&mut self, session: SessionId, node: NodeId, now: Tick) -> Option<Leased> {
        let held = self.sessions.get_mut(&session)?;
        if held.quarantined || held.len() >= self.limits.max_leases {
            return None;
        }
        let extent = self.nodes[node as usize].body;
        let token = held.add(extent, now);
        self.hold(extent);
        self.assert_accounted();
        let len = self.alloc.owner(extent).len;
        Some(Leased { token, offset: self.alloc.offset(extent), len })
    }

    /// End one lease. False if `session` holds no such lease; then nothing changes.
    pub fn release(&mut self, session: SessionId, token: Token) -> bool {
        let extent = self.sessions.get_mut(&session).and_then(|held| held.remove(token));
        let Some(extent) = extent else {
            self.counters.invalid_releases += 1;
            return false;
        };
        self.let_go(extent, false);
        self.assert_accounted();
        true
    }

    /// The holder of `token` read wrong bytes: drop the block, so that it is a miss from now on.
    pub fn report_corrupt(&mut self, session: SessionId, token: Token) -> bool {
        let extent = self.sessions.get(&session).and_then(|held| held.get(token));
        let Some(extent) = extent else { return false };
        let node = self.alloc.owner(extent).node;
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
            self.change_readers(extent, |readers| readers.zombies += 1);
        }
        self.assert_accounted();
        extents.len()
    }

    /// The session hung up, or its process is dead: all its leases end.
    pub fn end_session(&mut self, session: SessionId) {
        let Some(held) = self.sessions.remove(&session) else { return };
        for extent in held.extents() {
            self.let_go(extent, held.quarantined);
        }
        self.assert_accounted();
    }

    /// Leases on a body.
    pub(super) fn leases_on(&self, extent: ExtentId) -> u32 {
        self.readers.get(&extent).map_or(0, |readers| readers.leases)
    }

    /// Whether anything holds a body in place.
    pub(super) fn is_held(&self, extent: ExtentId) -> bool {
        self.readers.contains_key(&extent)
    }

    /// Keep a published body in place until `let_go`.
    pub(super) fn hold(&mut self, extent: ExtentId) {
        self.change_readers(extent, |readers| readers.leases += 1);
    }

    /// One lease of `extent` ends; `zombie` if its session was quarantined.
    pub(super) fn let_go(&mut self, extent: ExtentId, zombie: bool) {
        let left = self.change_readers(extent, |readers| {
            readers.leases -= 1;
            readers.zombies -= u32::from(zombie);
        });
        match self.alloc.owner(extent).node {
            NONE if left == 0 => self.release_body(extent),
            NONE => {}
            node => self.offer(node),
        }
    }

    /// Change who reads a body, and move its bytes between the categories accordingly; how many
    /// leases there are now.
    fn change_readers(&mut self, extent: ExtentId, edit: impl FnOnce(&mut Readers)) -> u32 {
        let readers = self.readers.entry(extent).or_default();
        let before = readers.category();
        edit(readers);
        let after = *readers;
        if after.leases == 0 {
            self.readers.remove(&extent);
        }
        let size = self.alloc.size(extent);
        self.bytes[before] -= size;
        self.bytes[after.category()] += size;
        after.leases
    }
}
