//! Storing a block anew in another form, while it stays readable.
//!
//! A replacement pins the old extent as if it were leased and reserves a new one; the caller writes
//! the new form there without any lock. Finishing swaps the two in one step: who leased the old
//! bytes keeps them until the lease ends, who leases later gets the new ones. A block that was
//! evicted meanwhile stays evicted. Accounted at every moment: the old bytes are leased or resident,
//! the new ones reserved.

use super::stats::Category;
use super::usage::Stored;
use super::{Body, Index, NONE, Tick};
use crate::alloc::{ExtentId, GRANULE};

/// Bodies looked at under one hold of the lock.
const SCAN: usize = 4096;

/// A block that is being stored anew; end it with `finish_replace` or `abandon_replace`.
#[derive(Debug)]
#[must_use]
pub struct Replacement {
    old: ExtentId,
    new: ExtentId,
    /// Where the old container is.
    pub source: u64,
    /// Its bytes, which are also those reserved for the new one.
    pub len: u32,
    /// Where the new one goes.
    pub target: u64,
}

/// What `begin_replace` found.
#[derive(Debug)]
pub enum Candidate {
    /// Store this block anew.
    Found(Replacement),
    /// None among those looked at; there are more.
    Searching,
    /// None at all, or no room for one.
    Nothing,
}

impl Index {
    /// The next block stored under `codec` that nobody has used since `idle_since`, from the body
    /// `cursor` on, which it advances. A full store gives up other blocks for the room only if it has
    /// done so for puts: storing blocks anew then gains more than it costs.
    pub fn begin_replace(&mut self, codec: u8, idle_since: Tick, cursor: &mut usize) -> Candidate {
        if *cursor >= self.alloc.end() {
            *cursor = 0;
        }
        let end = self.alloc.end().min(*cursor + SCAN);
        let found = {
            let mut bodies = self.alloc.owners(*cursor..end);
            bodies.find(|&(at, body)| self.replaceable(at, body, codec, idle_since))
        };
        let found = found.map(|(at, body)| (at, body.len));
        *cursor = found.map_or(end, |(at, _)| at as usize + 1);
        let Some((old, len)) = found else {
            let all = end == self.alloc.end();
            return if all { Candidate::Nothing } else { Candidate::Searching };
        };
        self.hold(old);
        let body = Body { node: NONE, ..Body::default() };
        let new = match self.alloc.allocate(len.into(), GRANULE, body) {
            None if self.counters.evicted_for_room > 0 => {
                self.allocate(len.into(), GRANULE, body, idle_since)
            }
            fits => fits,
        };
        let Some(new) = new else {
            self.let_go(old, false);
            return Candidate::Nothing;
        };
        self.bytes[Category::Reserved] += self.alloc.size(new);
        self.assert_accounted();
        let (source, target) = (self.alloc.offset(old), self.alloc.offset(new));
        Candidate::Found(Replacement { old, new, source, len, target })
    }

    /// The new form is complete; true if the block is stored in it from now on.
    pub fn finish_replace(&mut self, replacement: Replacement, stored: Stored) -> bool {
        let Replacement { old, new, .. } = replacement;
        let Body { node, users, .. } = *self.alloc.owner(old);
        if node == NONE || self.alloc.rounded(stored.len.into()) >= Some(self.alloc.size(old)) {
            self.abandon_replace(replacement);
            return false;
        }
        self.settle(new, stored);
        self.count_user(new, users);
        self.tenants.resize(
            self.nodes[node as usize].tenant(),
            self.alloc.size(old),
            self.alloc.size(new),
        );
        self.nodes[node as usize].body = new;
        self.alloc.owner_mut(new).node = node;
        self.alloc.owner_mut(old).node = NONE;
        self.let_go(old, false);
        self.offer(node);
        self.counters.transcoded += 1;
        self.assert_accounted();
        true
    }

    /// Leave the block as it is, for good.
    pub fn abandon_replace(&mut self, replacement: Replacement) {
        let Replacement { old, new, .. } = replacement;
        self.alloc.owner_mut(old).keep_form = true;
        self.counters.transcode_kept += 1;
        self.release_body(new);
        self.let_go(old, false);
        self.assert_accounted();
    }

    /// The old form is damaged: the block is a miss from now on.
    pub fn drop_corrupt(&mut self, replacement: Replacement) {
        let node = self.alloc.owner(replacement.old).node;
        self.abandon_replace(replacement);
        if node != NONE {
            self.counters.corrupt_dropped += 1;
            self.forget(node);
        }
        self.assert_accounted();
    }

    fn replaceable(&self, at: ExtentId, body: &Body, codec: u8, idle_since: Tick) -> bool {
        body.node != NONE
            && body.len > 0
            && !body.keep_form
            && !self.is_held(at)
            && self.usages.kind(body.kind).codec == codec
            && self.nodes[body.node as usize].last_used() <= idle_since
            && self.nodes[body.node as usize].body == at
    }
}
