//! How a block comes: its extent is reserved, filled without the index, and then published.
//!
//! A reserved body is invisible. Its node and the parent of it count as used meanwhile, so that
//! making room for a block never takes the block before it.

use super::stats::Category;
use super::usage::Stored;
use super::{Body, Hint, Index, NONE, NodeId, Tick};
use crate::alloc::{ExtentId, GRANULE};
use crate::key::Key;

/// In place of the kind of a reserved body: evicted before it is complete.
pub(super) const DOOMED: u8 = u8::MAX;

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

/// A block that is to come.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    /// Its key.
    pub key: &'a Key,
    /// The key before it in its chain.
    pub parent: Option<&'a Key>,
    /// Bytes to reserve.
    pub bytes: u64,
    /// Whose it is.
    pub tenant: &'a str,
    /// What is known of its next use.
    pub hint: Hint,
}

impl Index {
    /// Make room for a block, evicting leaves as needed.
    pub fn reserve(&mut self, wish: &Wish<'_>, now: Tick) -> Reserve {
        let found = self.find(wish.key);
        if let Some(body) = found.and_then(|node| self.body(node)) {
            let Body { node, len, .. } = *self.alloc.owner(body);
            if len == 0 {
                return Reserve::Pending;
            }
            self.used(node, wish.hint, now);
            self.counters.puts_present += 1;
            return Reserve::Present;
        }
        let parent = match wish.parent.map(|key| self.find(key).filter(|&at| self.reachable(at))) {
            Some(None) => return self.refuse(Refusal::ParentAbsent),
            Some(Some(node)) => {
                self.nodes[node as usize].touch(now);
                node
            }
            None => NONE,
        };
        if u32::try_from(wish.bytes).is_err() || self.alloc.rounded(wish.bytes).is_none() {
            return self.refuse(Refusal::TooLarge);
        }
        let Some(node) = found.or_else(|| self.new_node(wish.key, parent)) else {
            return self.refuse(Refusal::Full);
        };
        self.link(node, parent);
        if self.nodes[node as usize].disk == NONE {
            let row = self.tenants.row(wish.tenant);
            self.nodes[node as usize].set_tenant(row);
        }
        if !self.room_in_quota(node, wish.bytes) {
            self.remove_if_empty(node);
            return self.refuse(Refusal::OverQuota);
        }
        let Some(extent) = self.attach(node, wish.bytes, GRANULE, now) else {
            let busy = self.is_demoting();
            return if busy { Reserve::Busy } else { self.refuse(Refusal::Full) };
        };
        self.comes(node, wish.hint);
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

    /// As `publish`, for a block that came from a tier below. It came because somebody wanted it, so
    /// the lease that follows is no further use of it.
    pub fn land(&mut self, extent: ExtentId, stored: Stored) {
        self.counters.blocks_landed += 1;
        let node = self.alloc.owner(extent).node;
        self.nodes[node as usize].set_counted(true);
        self.fill(extent, stored);
    }

    /// A put failed while copying: its bytes return, nothing was ever visible.
    pub fn abort(&mut self, extent: ExtentId) {
        self.detach(self.alloc.owner(extent).node);
        self.assert_accounted();
    }

    /// Reserve a body of `bytes` for a node that has none; None, and no node left behind, if nothing
    /// can make room.
    pub(super) fn attach(
        &mut self,
        node: NodeId,
        bytes: u64,
        align: u64,
        now: Tick,
    ) -> Option<ExtentId> {
        // While room is made, the node and its parent stay as if they had one child more.
        let parent = self.nodes[node as usize].parent;
        self.nodes[node as usize].children += 1;
        self.warm_up(parent);
        let body = Body { node, ..Body::default() };
        let extent = self.allocate(bytes, align, body, now);
        self.nodes[node as usize].children -= 1;
        let Some(extent) = extent else {
            self.cool_down(parent);
            self.remove_if_empty(node);
            self.assert_accounted();
            return None;
        };
        let size = self.alloc.size(extent);
        self.bytes[Category::Reserved] += size;
        let record = &mut self.nodes[node as usize];
        record.body = extent;
        record.touch(now);
        self.tenants.charge(record.tenant(), size);
        self.assert_accounted();
        Some(extent)
    }

    /// Cut a reserved extent to its container and count what it holds.
    pub(super) fn settle(&mut self, extent: ExtentId, stored: Stored) {
        let Stored { len, kind } = stored;
        assert!(self.alloc.owner(extent).len == 0, "extent {extent} published twice");
        assert!(len > 0 && u64::from(len) <= self.alloc.size(extent), "length outside its extent");
        self.bytes[Category::Reserved] -= self.alloc.size(extent);
        self.alloc.shrink(extent, len.into());
        self.bytes[Category::Resident] += self.alloc.size(extent);
        let kind = self.usages.row(kind);
        let body = self.alloc.owner_mut(extent);
        (body.len, body.kind) = (len, kind);
        let body = *body;
        self.usages.add(&body, self.alloc.size(extent));
    }

    fn fill(&mut self, extent: ExtentId, stored: Stored) {
        let before = self.alloc.size(extent);
        let doomed = self.alloc.owner(extent).kind == DOOMED;
        self.settle(extent, stored);
        let node = self.alloc.owner(extent).node;
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

    fn refuse(&mut self, why: Refusal) -> Reserve {
        match why {
            Refusal::TooLarge => self.counters.refused_too_large += 1,
            Refusal::Full => self.counters.refused_full += 1,
            Refusal::OverQuota => self.counters.refused_over_quota += 1,
            Refusal::ParentAbsent => self.counters.refused_parent_absent += 1,
        }
        Reserve::Refused(why)
    }
}
