//! Put: reserve under the lock, copy or encode without it, publish under it again.
//!
//! A client asks before it has written its put buffer, and counts what it has written: the store
//! follows it part by part, so that both copy at once. A client that stops half-way gets nothing
//! stored.
//!
//! A block is coded straight into its extent, whose size is a forecast: what the last block of that
//! shape took, and a little more. One that does not fit is put again with room for the worst case;
//! publishing gives back what was not needed.
//!
//! A reservation that is not published returns its bytes on drop, so nothing half-written is ever
//! visible. Two puts of one key make one copy: the second waits for the first and reports
//! "present", so when put returns, every key it calls stored or present can be read.

use std::time::{Duration, Instant};

use mooncake_codec::Encoder;

use super::Shared;
use super::session::Session;
use crate::alloc::ExtentId;
use crate::arena::Ingest;
use crate::block::Layout;
use crate::error::{Error, Result};
use crate::index::{Refusal, Reserve, SessionId, Wish};
use crate::wire::{BlockShape, Caller, PutItem, PutStatus};

/// How long a put waits for other puts of its keys, for reads of them from disk, and for room.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);

/// How long a client may take for the next part of what it puts.
const PART_PATIENCE: Duration = Duration::from_millis(500);
/// Looks at a part before the thread sleeps between them: a client that is copying is done soon.
const EAGER_LOOKS: u32 = 1000;
const NAP: Duration = Duration::from_micros(100);

/// What coded blocks of a shape are expected to take.
#[derive(Default)]
pub(super) struct Forecast(Option<(Layout, usize)>);

impl Forecast {
    /// Bytes to reserve for the next block; all it could need if nothing is known.
    fn bytes(&self, layout: &Layout) -> usize {
        let most = layout.container_bytes();
        match self.0 {
            Some((of, last)) if of == *layout => most.min(last + last / 50),
            _ => most,
        }
    }

    fn learn(&mut self, layout: &Layout, len: usize) {
        self.0 = layout.is_coded().then_some((*layout, len));
    }
}

/// An extent being written; given back on drop unless published.
struct Reservation<'a> {
    shared: &'a Shared,
    extent: ExtentId,
    offset: u64,
    len: usize,
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
        &mut self,
        caller: Caller<'_>,
        shape: BlockShape,
        items: &[[u8; 72]],
    ) -> Result<Vec<u8>> {
        let mut encoder = std::mem::take(&mut self.encoder);
        let mut forecast = std::mem::take(&mut self.forecast);
        let statuses = self.put_all(caller, shape, items, &mut encoder, &mut forecast);
        (self.encoder, self.forecast) = (encoder, forecast);
        statuses
    }

    fn put_all(
        &self,
        caller: Caller<'_>,
        shape: BlockShape,
        items: &[[u8; 72]],
        encoder: &mut Encoder,
        forecast: &mut Forecast,
    ) -> Result<Vec<u8>> {
        let layout = Layout::new(shape, self.shared.codec.on_put)?;
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
        let started = Instant::now();
        while !open.is_empty() {
            if started.elapsed() > PATIENCE {
                open.iter().for_each(|&at| statuses[at] = PutStatus::Full as u8);
                break;
            }
            let len = forecast.bytes(&layout);
            let steps = self.reserve(caller, len, &items, &open)?;
            let (mut waiting, mut again) = (Vec::new(), Vec::new());
            for (&at, step) in open.iter().zip(steps) {
                match step {
                    Step::Done(status) => statuses[at] = status as u8,
                    Step::Write(reservation) => {
                        let item = &items[at];
                        match reservation.fill(&layout, encoder, ingest, item, self.id)? {
                            Some(len) => forecast.learn(&layout, len),
                            None => {
                                forecast.learn(&layout, layout.container_bytes());
                                again.push(at);
                            }
                        }
                    }
                    Step::Wait => waiting.push(at),
                }
            }
            if let Some(&first) = waiting.first() {
                self.wait_for(&items[first])?;
            }
            again.extend(waiting);
            open = again;
        }
        Ok(statuses)
    }

    fn reserve<'a>(
        &'a self,
        caller: Caller<'_>,
        len: usize,
        items: &[PutItem],
        open: &[usize],
    ) -> Result<Vec<Step<'a>>> {
        let shared = &*self.shared;
        let (now, Caller { tenant, hint }) = (shared.now(), caller);
        let mut index = shared.index()?;
        let mut step = |at: &usize| {
            let PutItem { key, parent, .. } = &items[*at];
            let (parent, bytes) = (parent.as_ref(), len as u64);
            let wish = Wish { key, parent, bytes, tenant, hint };
            match index.reserve(&wish, now) {
                Reserve::Present => {
                    index.put_by(self.id, key);
                    Step::Done(PutStatus::Present)
                }
                Reserve::Pending | Reserve::Busy => Step::Wait,
                Reserve::Granted(extent, offset) => {
                    Step::Write(Reservation { shared, extent, offset, len, published: false })
                }
                Reserve::Refused(why) => Step::Done(match why {
                    Refusal::Full => PutStatus::Full,
                    Refusal::OverQuota => PutStatus::OverQuota,
                    Refusal::TooLarge => PutStatus::TooLarge,
                    Refusal::ParentAbsent => PutStatus::ParentAbsent,
                }),
            }
        };
        Ok(open.iter().map(&mut step).collect())
    }

    /// Wait for another session's put of the same key, or for room: a copy in memory or a write to
    /// disk, so it ends by itself, but perhaps not soon.
    fn wait_for(&self, item: &PutItem) -> Result<()> {
        let index = self.shared.index()?;
        if index.is_pending(&item.key) || index.is_demoting() {
            drop(self.shared.wait_published_for(index, PAUSE)?);
        }
        Ok(())
    }
}

/// Until the client has written its put buffer up to `end`.
fn wait_written(ingest: &Ingest, end: u64) -> Result<()> {
    let (mut seen, mut looks, mut since) = (ingest.written(), 0, None);
    while seen < end {
        if looks < EAGER_LOOKS {
            std::thread::yield_now()
        } else {
            std::thread::sleep(NAP)
        }
        looks += 1;
        let now = ingest.written();
        if now != seen {
            (seen, looks, since) = (now, 0, None);
        } else if since.get_or_insert_with(Instant::now).elapsed() > PART_PATIENCE {
            return Err(Error::refused(format!(
                "a block was given up: its client wrote nothing of it for {PART_PATIENCE:?}"
            )));
        }
    }
    Ok(())
}

impl Reservation<'_> {
    /// Write and publish a block; the bytes its container takes, or None if it does not fit.
    fn fill(
        mut self,
        layout: &Layout,
        encoder: &mut Encoder,
        ingest: &Ingest,
        item: &PutItem,
        session: SessionId,
    ) -> Result<Option<usize>> {
        let source = ingest
            .at(item.offset, layout.raw_bytes())
            .ok_or_else(|| Error::refused("a block lies outside the put buffer"))?;
        let target = self.shared.arena.at(self.offset, self.len);
        // SAFETY: an extent reserved for us alone, at least `len` bytes, and `at` checked that it is
        // inside the arena, which is mapped and touched.
        let target = unsafe { std::slice::from_raw_parts_mut(target, self.len) };
        let arrived = |bytes: usize| wait_written(ingest, item.offset + bytes as u64);
        // SAFETY: the source range was checked.
        let Some(stored) = unsafe { layout.write(encoder, source, arrived, target) }? else {
            let whole = self.len >= layout.container_bytes();
            let failed = || Error::refused("a block cannot be coded");
            return if whole { Err(failed()) } else { Ok(None) };
        };
        let mut index = self.shared.index()?;
        index.publish(self.extent, stored);
        index.put_by(session, &item.key);
        drop(index);
        self.published = true;
        self.shared.notify_published();
        Ok(Some(stored.len as usize))
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
