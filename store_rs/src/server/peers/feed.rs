//! The changes of this store's index, as followers take them: a snapshot first, then every change.
//!
//! One of them is the node's own cluster index, on a thread of its own; the others are peers.

use std::sync::MutexGuard;
use std::thread;
use std::time::Duration;

use super::{Peers, Shared, lock, monotonic_us};
use crate::cluster::OURS;
use crate::error::Result;
use crate::index::{Entry, Index};
use crate::wire::MAX_ITEMS;

/// How long a follower may not hear of an eviction; puts wake it.
const LAG: Duration = Duration::from_millis(50);
/// What follows a change within this goes with it.
const BATCHING: Duration = Duration::from_millis(2);

/// In place of a connection: the node's own cluster index.
pub(super) const OWN: u64 = 0;

/// Where a follower stands.
#[derive(Default)]
pub(super) struct Feed {
    next: u64,
    stage: Stage,
}

#[derive(Default, Clone, Copy, PartialEq)]
enum Stage {
    #[default]
    Start,
    Snapshot(usize),
    Changes,
}

/// What comes next; the entries are in the caller's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Batch {
    /// Forget everything; changes will start at this number.
    Restart(u64),
    /// Part of a snapshot.
    Held,
    /// Changes from this number on; none if nothing happened.
    Changes(u64),
}

impl Feed {
    /// The next batch, at most [`MAX_ITEMS`] entries, into `entries`.
    pub(super) fn take(&mut self, index: &Index, entries: &mut Vec<Entry>) -> Batch {
        entries.clear();
        match self.stage {
            Stage::Start => {
                (self.next, self.stage) = (index.next_change(), Stage::Snapshot(0));
                Batch::Restart(self.next)
            }
            Stage::Snapshot(start) => {
                let rest = index.entries(start, MAX_ITEMS, entries);
                self.stage = rest.map_or(Stage::Changes, Stage::Snapshot);
                Batch::Held
            }
            Stage::Changes => {
                let first = self.next;
                if !index.changes(first, MAX_ITEMS, entries) {
                    self.stage = Stage::Start;
                    return self.take(index, entries);
                }
                self.next += entries.len() as u64;
                Batch::Changes(first)
            }
        }
    }

    /// The number of the change that goes next.
    pub(super) fn position(&self) -> u64 {
        self.next
    }

    /// Whether there is more right now.
    fn is_behind(&self, index: &Index) -> bool {
        self.stage != Stage::Changes || self.next != index.next_change()
    }

    /// Wait, for `LAG` at most, until there is more to take.
    pub(super) fn wait<'a>(&self, shared: &'a Shared) -> Result<MutexGuard<'a, Index>> {
        let index = shared.index()?;
        if self.is_behind(&index) {
            return Ok(index);
        }
        let index = shared.wait_published_for(index, LAG)?;
        if self.stage != Stage::Changes || !self.is_behind(&index) {
            return Ok(index);
        }
        drop(index);
        thread::sleep(BATCHING);
        shared.index()
    }
}

/// Keep the node's own entries in the cluster index until the store stops.
pub(super) fn follow_own(peers: &Peers, shared: &Shared) {
    let mut feed = Feed::default();
    let mut entries = Vec::new();
    while !peers.is_stopping() {
        let Ok(index) = feed.wait(shared) else { return };
        let batch = feed.take(&index, &mut entries);
        drop(index);
        let mut cluster = peers.cluster();
        cluster.drop_silent(monotonic_us());
        if matches!(batch, Batch::Restart(_)) {
            cluster.clear(OURS);
        }
        // A table that cannot grow keeps what it has: the rest are misses.
        let _ = cluster.apply(OURS, &entries, shared.now() / 1_000_000);
        drop(cluster);
        lock(&peers.sent).insert(OWN, feed.position());
    }
}
