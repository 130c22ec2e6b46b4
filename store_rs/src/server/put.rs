//! Put: reserve under the lock, copy without it, publish under it again.
//!
//! A reservation that is not published returns its bytes on drop, so nothing half-written is ever
//! visible. Two puts of one key make one copy: the second waits for the first and reports
//! "present", so when put returns, every key it calls stored or present can be read.

use super::Shared;
use super::session::Session;
use crate::alloc::ExtentId;
use crate::arena::Ingest;
use crate::block::Layout;
use crate::error::{Error, Result};
use crate::index::{Refusal, Reserve};
use crate::wire::{BlockShape, PutItem, PutStatus};

/// An extent being written; given back on drop unless published.
struct Reservation<'a> {
    shared: &'a Shared,
    extent: ExtentId,
    offset: u64,
    published: bool,
}

enum Step<'a> {
    Done(PutStatus),
    Write(Reservation<'a>),
    Wait,
}

impl Session {
    /// One status byte per item.
    pub(super) fn put(
        &self,
        tenant: &str,
        shape: BlockShape,
        items: &[[u8; 72]],
    ) -> Result<Vec<u8>> {
        let layout = Layout::new(shape)?;
        let ingest = self.ingest.as_ref().ok_or_else(|| {
            Error::refused("this session has no put buffer; all of them are taken")
        })?;
        let items: Vec<PutItem> = items.iter().map(PutItem::decode).collect();
        for item in &items {
            if ingest.at(item.offset, layout.raw_bytes()).is_none() {
                return Err(Error::refused("a block lies outside the put buffer"));
            }
        }
        let mut statuses = vec![PutStatus::Stored as u8; items.len()];
        let mut open: Vec<usize> = (0..items.len()).collect();
        while !open.is_empty() {
            let steps = self.reserve(tenant, &layout, &items, &open)?;
            let mut waiting = Vec::new();
            for (&at, step) in open.iter().zip(steps) {
                match step {
                    Step::Done(status) => statuses[at] = status as u8,
                    Step::Write(reservation) => reservation.fill(&layout, ingest, &items[at])?,
                    Step::Wait => waiting.push(at),
                }
            }
            if let Some(&first) = waiting.first() {
                self.wait_for(&items[first])?;
            }
            open = waiting;
        }
        Ok(statuses)
    }

    fn reserve<'a>(
        &'a self,
        tenant: &str,
        layout: &Layout,
        items: &[PutItem],
        open: &[usize],
    ) -> Result<Vec<Step<'a>>> {
        let shared = &*self.shared;
        let now = shared.now();
        let bytes = layout.container_bytes() as u64;
        let mut index = shared.index()?;
        let mut step = |at: &usize| {
            let PutItem { key, parent, .. } = &items[*at];
            match index.reserve(key, parent.as_ref(), bytes, tenant, now) {
                Reserve::Present => Step::Done(PutStatus::Present),
                Reserve::Pending => Step::Wait,
                Reserve::Granted(extent, offset) => {
                    Step::Write(Reservation { shared, extent, offset, published: false })
                }
                Reserve::Refused(why) => Step::Done(match why {
                    Refusal::Full => PutStatus::Full,
                    Refusal::TooLarge => PutStatus::TooLarge,
                    Refusal::ParentAbsent => PutStatus::ParentAbsent,
                }),
            }
        };
        Ok(open.iter().map(&mut step).collect())
    }

    /// Wait for another session's put of the same key: a copy in memory, so it ends by itself.
    fn wait_for(&self, item: &PutItem) -> Result<()> {
        let mut index = self.shared.index()?;
        while index.is_pending(&item.key) {
            index = self.shared.wait_published(index)?;
        }
        Ok(())
    }
}

impl Reservation<'_> {
    fn fill(mut self, layout: &Layout, ingest: &Ingest, item: &PutItem) -> Result<()> {
        let source = ingest
            .at(item.offset, layout.raw_bytes())
            .ok_or_else(|| Error::refused("a block lies outside the put buffer"))?;
        let target = self.shared.arena.at(self.offset, layout.container_bytes());
        // SAFETY: the source range was checked; the target is an extent reserved for us alone, at
        // least as large as the container, and `at` checked that it is inside the arena.
        unsafe { layout.write(source, target) };
        let (len, raw) = (layout.container_bytes() as u32, layout.raw_bytes() as u32);
        self.shared.index()?.publish(self.extent, len, raw);
        self.published = true;
        self.shared.notify_published();
        Ok(())
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        if let Ok(mut index) = self.shared.index() {
            index.abort(self.extent);
        }
        self.shared.notify_published();
    }
}
