//! What operators ask of the index: a listing, pins, and giving memory back.
//!
//! Listings and checks go through the nodes by number, a page at a time, so that each holds the
//! lock briefly; blocks that come or go meanwhile may be left out or seen twice.
//!
//! A pinned block stays in DRAM. A **soft** pin ends by itself and gives way when nothing else can
//! make room; a **hard** one ends by `unpin` only, and all of them together take at most a fixed
//! share of the arena.

use std::collections::HashMap;

use super::{Index, NONE, NodeId, Tick};
use crate::key::Key;

/// Of the arena: most that hard pins may take.
const HARD_SHARE: u64 = 4;
/// Most pins at once.
const PINS_MAX: usize = 1 << 16;

/// One block of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: Key,
    /// Bytes of its container in DRAM; 0 if it is not there.
    pub dram_bytes: u32,
    /// Bytes of its container on disk; 0 if it is not there.
    pub disk_bytes: u32,
    /// Leases on it.
    pub leases: u32,
    /// Microseconds since it was last used.
    pub idle_us: u64,
    /// Row of its tenant in the statistics.
    pub tenant: u32,
    /// Whether it is pinned.
    pub pinned: bool,
}

#[derive(Clone, Copy)]
struct Pin {
    /// When it ends; None for a hard one.
    until: Option<Tick>,
    bytes: u64,
}

/// Blocks that stay.
#[derive(Default)]
pub(super) struct Pins {
    pins: HashMap<NodeId, Pin>,
    hard_bytes: u64,
}

impl Pins {
    pub(super) fn holds(&self, node: NodeId) -> bool {
        !self.pins.is_empty() && self.pins.contains_key(&node)
    }

    pub(super) fn len(&self) -> usize {
        self.pins.len()
    }

    /// Hard-pinned bytes.
    pub(super) fn hard_bytes(&self) -> u64 {
        self.hard_bytes
    }

    pub(super) fn remove(&mut self, node: NodeId) {
        if self.pins.is_empty() {
            return;
        }
        if let Some(pin) = self.pins.remove(&node).filter(|pin| pin.until.is_none()) {
            self.hard_bytes -= pin.bytes;
        }
    }

    /// Nodes whose pin has ended, or, with `all_soft`, could end.
    fn ended(&self, now: Tick, all_soft: bool) -> Vec<NodeId> {
        let ended = |pin: &Pin| pin.until.is_some_and(|until| until <= now || all_soft);
        self.pins.iter().filter(|(_, pin)| ended(pin)).map(|(&node, _)| node).collect()
    }
}

impl Index {
    /// Blocks from node `from` on, `most` at most; where to go on.
    pub fn rows(&self, from: NodeId, most: usize, now: Tick) -> (Vec<Listed>, Option<NodeId>) {
        let mut rows = Vec::new();
        for node in from..self.nodes.len() as NodeId {
            if rows.len() == most {
                return (rows, Some(node));
            }
            let record = &self.nodes[node as usize];
            if record.body == NONE && record.disk == NONE {
                continue;
            }
            let body = self.body(node);
            let disk = self.log().filter(|_| record.disk != NONE);
            rows.push(Listed {
                key: record.key,
                dram_bytes: body.map_or(0, |body| self.alloc.owner(body).len),
                disk_bytes: disk.map_or(0, |log| log.place(record.disk).len),
                leases: body.map_or(0, |body| self.leases_on(body)),
                idle_us: now.saturating_sub(record.last_used()),
                tenant: record.tenant(),
                pinned: self.pins.holds(node),
            });
        }
        (rows, None)
    }

    /// Keep those of `keys` that are in DRAM there: until `until`, or until unpinned. How many are
    /// pinned now; fewer than asked for if they are absent or the pins are used up.
    pub fn pin(&mut self, keys: &[Key], until: Option<Tick>) -> usize {
        let quota = self.alloc.capacity() / HARD_SHARE;
        let mut pinned = 0;
        for key in keys {
            let Some(node) = self.find(key).filter(|&node| self.readable(node)) else { continue };
            let bytes = self.alloc.size(self.nodes[node as usize].body);
            self.pins.remove(node);
            let above = until.is_none() && self.pins.hard_bytes + bytes > quota;
            if above || self.pins.len() >= PINS_MAX {
                self.offer(node);
                continue;
            }
            self.pins.hard_bytes += if until.is_none() { bytes } else { 0 };
            self.pins.pins.insert(node, Pin { until, bytes });
            pinned += 1;
        }
        pinned
    }

    /// End the pins of `keys`; how many had one.
    pub fn unpin(&mut self, keys: &[Key]) -> usize {
        let nodes: Vec<_> = keys.iter().filter_map(|key| self.find(key)).collect();
        let held = nodes.into_iter().filter(|&node| self.pins.holds(node)).collect();
        self.end_pins(held)
    }

    /// Give back the memory of blocks that are on disk as well and that nobody uses; how many.
    pub fn cool(&mut self) -> usize {
        let mut cooled = 0;
        for node in 0..self.nodes.len() as NodeId {
            if self.on_disk(node) && self.is_idle(node) {
                self.detach(node);
                self.counters.evicted_to_disk += 1;
                cooled += 1;
            }
        }
        self.assert_accounted();
        cooled
    }

    /// End the pins whose time has come; with `all_soft` the other soft ones, too. Whether any did.
    pub(super) fn end_soft_pins(&mut self, now: Tick, all_soft: bool) -> bool {
        if self.pins.len() == 0 {
            return false;
        }
        let ended = self.pins.ended(now, all_soft);
        self.end_pins(ended) > 0
    }

    fn end_pins(&mut self, nodes: Vec<NodeId>) -> usize {
        for &node in &nodes {
            self.pins.remove(node);
            self.offer(node);
        }
        nodes.len()
    }
}
