//! Moving up: blocks that are wanted and are on disk only.
//!
//! `promote` reserves an extent and keeps the segment from being overwritten, until `read_ended`.

use crate::alloc::ExtentId;
use crate::index::{Hint, Index, NONE, Tick};
use crate::key::Key;
use crate::log::{PAGE, Place, pages};

/// A block on its way from disk.
#[derive(Debug, Clone, Copy)]
pub struct Promotion {
    /// The extent reserved for it.
    pub extent: ExtentId,
    /// Where in the arena, aligned for direct I/O; whole pages.
    pub offset: u64,
    /// Where on disk.
    pub place: Place,
    /// The same as an offset in the file.
    pub file_offset: u64,
}

impl Index {
    /// Reserve room for a block that is on disk only. What was used since `now` makes no room for it.
    pub fn promote(&mut self, key: &Key, hint: Hint, now: Tick) -> Option<Promotion> {
        let node = self.find(key).filter(|&node| self.on_disk(node))?;
        if self.body(node).is_some() {
            return None;
        }
        let entry = self.nodes[node as usize].disk;
        let place = self.log_mut()?.pin_for_read(entry);
        let bytes = u64::from(pages(place.len)) * PAGE as u64;
        if !self.room_in_quota(node, bytes) {
            self.log_mut()?.unpin(place.segment);
            return None;
        }
        let Some(extent) = self.attach(node, bytes, PAGE as u64, now) else {
            self.log_mut()?.unpin(place.segment);
            return None;
        };
        self.comes(node, hint);
        let file_offset = self.log()?.offset(&place);
        Some(Promotion { extent, offset: self.alloc.offset(extent), place, file_offset })
    }

    /// Whether a block is on disk only.
    pub fn is_below(&self, key: &Key) -> bool {
        let node = self.find(key).filter(|&node| self.on_disk(node));
        node.is_some_and(|node| self.body(node).is_none())
    }

    /// A promotion's read has ended; if it failed, its entry goes.
    pub fn read_ended(&mut self, key: &Key, place: &Place, good: bool) {
        self.counters.promoted += u64::from(good);
        self.checked(key, place, good);
    }

    /// A block's place on disk, kept from being overwritten until `checked`, and its offset.
    pub fn pin_on_disk(&mut self, key: &Key) -> Option<(Place, u64)> {
        let node = self.find(key).filter(|&node| self.on_disk(node))?;
        let entry = self.nodes[node as usize].disk;
        let log = self.log_mut()?;
        let place = log.place(entry);
        log.pin(place.segment);
        Some((place, log.offset(&place)))
    }

    /// The bytes at a pinned place were read; if they were wrong, the entry goes.
    pub fn checked(&mut self, key: &Key, place: &Place, good: bool) {
        let Some(log) = self.log_mut() else { return };
        log.unpin(place.segment);
        if good {
            return;
        }
        self.counters.disk_misses += 1;
        let Some(node) = self.find(key) else { return };
        let entry = self.nodes[node as usize].disk;
        let same = entry != NONE && self.log().is_some_and(|log| log.place(entry) == *place);
        if same {
            self.erase(node);
            self.remove_if_empty(node);
        }
    }
}
