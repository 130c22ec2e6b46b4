//! Demotions: decides when blocks go to disk, and commits what was written.
//!
//! One turn at a time: clear what was evicted, write what was read at least once, and, while memory
//! runs short and the rate allows, what is about to be evicted; `room` makes place for it. All of it
//! counts against the write rate. The index is locked to choose and to commit, never while bytes
//! move; what is being written is held in place like by a lease.
//!
//! Any failed write gives up the open segment (a disk that failed once is not asked again for the
//! same bytes) and switches the tier off until a probe succeeds. A turn never fails.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::buffer::Buffer;
use super::health::Health;
use super::io::Io;
use super::rate::Rate;
use super::recode::{Form, Recoder};
use super::stage::{STAGE_BYTES, Stage, offsets, record};
use super::{DiskOptions, recoder_bytes};
use crate::block;
use crate::index::{Demotion, Erased, Tick};
use crate::key::NO_KEY;
use crate::log::{EntryId, PAGE, Place};
use crate::server::{Options, Shared};

/// Most of the arena that is held for writing at once.
const HELD_SHARE: u64 = 16;
/// Between probes of a disk that failed, and between tries for more space: microseconds.
const PROBE_EVERY: Tick = 1_000_000;

pub(super) struct Writer {
    pub(super) shared: Arc<Shared>,
    pub(super) io: Arc<dyn Io>,
    pub(super) health: Arc<Health>,
    form: Arc<Form>,
    recoder: Recoder,
    pub(super) stage: Stage,
    pub(super) rate: Rate,
    max_segments: usize,
    next_probe: Tick,
    /// Written, but not committed to the index; their segments are pinned.
    pending: Vec<(Demotion, EntryId, u32)>,
}

/// What a turn did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// There may be more to do at once.
    Busy,
    /// Nothing to do for now.
    Idle,
}

impl Writer {
    pub(super) fn new(
        shared: Arc<Shared>,
        io: Arc<dyn Io>,
        health: Arc<Health>,
        form: Arc<Form>,
        options: &DiskOptions,
        max_segments: usize,
    ) -> Self {
        let largest = shared.index().ok().and_then(|index| Some(index.log()?.segment_bytes()));
        let rate = Rate::new(options.write_bytes_per_s, largest.unwrap_or(0));
        let Options { transcode_share, dram_bytes, .. } = shared.options;
        let recoder = Recoder::new(options.codec, transcode_share, recoder_bytes(dram_bytes));
        let (stage, pending) = (Stage::new(), Vec::new());
        let next_probe = 0;
        Self { shared, io, health, form, recoder, stage, rate, max_segments, next_probe, pending }
    }

    /// Time for the next turn.
    pub(super) fn now(&self) -> Tick {
        self.shared.now()
    }

    /// One turn at time `now`.
    pub(super) fn turn(&mut self, now: Tick) -> Turn {
        if self.health.is_off() {
            self.probe(now);
            return Turn::Idle;
        }
        self.retry_space(now);
        let before = self.stage.written;
        let outcome = self.clear_erased().and_then(|()| self.demote(now));
        self.count(before);
        match outcome {
            Ok(turn) => turn,
            Err(_) => {
                self.failed();
                Turn::Idle
            }
        }
    }

    /// Write all that is in DRAM only, as far as there is room; how many blocks went. The rate does
    /// not apply.
    pub(super) fn drain(&mut self) -> u64 {
        let (mut from, mut written) = (Some(0), 0);
        while let Some(at) = from.filter(|_| !self.health.is_off()) {
            let most = self.most_held();
            let Ok(mut index) = self.shared.index() else { break };
            let (chosen, next) = index.next_drained(at, most);
            drop(index);
            if chosen.is_empty() {
                break;
            }
            let before = self.stage.written;
            let outcome = self.write(&chosen, false);
            self.count(before);
            match outcome {
                Ok(went) => {
                    written += went;
                    from = next.filter(|_| went > 0);
                }
                Err(_) => {
                    self.failed();
                    break;
                }
            }
        }
        written
    }

    fn count(&mut self, before: u64) {
        let bytes = self.stage.written - before;
        self.rate.spend(bytes);
        self.health.bytes_written.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
    }

    fn most_held(&self) -> u64 {
        let arena = self.shared.arena.size() / HELD_SHARE;
        arena.max(STAGE_BYTES as u64)
    }

    fn demote(&mut self, now: Tick) -> io::Result<Turn> {
        let most = self.rate.left(now).min(self.most_held());
        let plenty = self.rate.has_plenty(now);
        let chosen = {
            let Ok(mut index) = self.shared.index() else { return Ok(Turn::Idle) };
            let cold = plenty && index.is_pressed();
            index.next_demotions(most, cold)
        };
        if chosen.is_empty() {
            return Ok(Turn::Idle);
        }
        let went = self.write(&chosen, true)?;
        Ok(if went > 0 { Turn::Busy } else { Turn::Idle })
    }

    /// Write blocks and commit them; how many went. `make_room` may give up others for them.
    fn write(&mut self, chosen: &[Demotion], make_room: bool) -> io::Result<u64> {
        let mut went = 0;
        let mut outcome = Ok(());
        for demotion in chosen {
            let added = match outcome {
                Ok(()) => self.add(demotion, make_room),
                Err(_) => Ok(None),
            };
            match added {
                Ok(Some((entry, segment))) => {
                    self.with_log(|log| log.pin(segment));
                    self.pending.push((*demotion, entry, segment));
                    went += 1;
                }
                Ok(None) => self.commit(demotion, None),
                Err(error) => {
                    self.commit(demotion, None);
                    outcome = Err(error);
                }
            }
        }
        outcome = outcome.and_then(|()| self.stage.flush(&*self.io));
        self.measure();
        for (demotion, entry, segment) in std::mem::take(&mut self.pending) {
            // After an error nobody knows which of them were written whole.
            match &outcome {
                Ok(()) => self.commit(&demotion, Some(entry)),
                Err(_) => self.take_back(&demotion, entry),
            }
            self.with_log(|log| log.unpin(segment));
        }
        outcome.map(|()| went)
    }

    /// See at which rate the disk gives back what was just written, if that is asked for.
    fn measure(&mut self) {
        let (offset, len) = self.stage.last;
        if self.recoder.wants(len) {
            let mut buffer = Buffer::new(len);
            let begin = Instant::now();
            if self.io.read_at(offset, &mut buffer).is_ok() {
                self.recoder.decide(len, begin.elapsed(), &self.form);
            }
        }
    }

    /// Stage one block in the disk's form: its entry and segment; None if there is no room for it.
    fn add(&mut self, demotion: &Demotion, make_room: bool) -> io::Result<Option<(EntryId, u32)>> {
        let at = self.shared.arena.at(demotion.offset, demotion.len as usize);
        // SAFETY: the demotion holds the extent, so that nobody writes it until it is committed.
        let container = unsafe { std::slice::from_raw_parts(at, demotion.len as usize) };
        let mut recoder = std::mem::take(&mut self.recoder);
        let form = Arc::clone(&self.form);
        let added = self.add_as(demotion, recoder.form(container, &form), make_room);
        self.recoder = recoder;
        added
    }

    fn add_as(
        &mut self,
        demotion: &Demotion,
        container: &[u8],
        make_room: bool,
    ) -> io::Result<Option<(EntryId, u32)>> {
        let (len, sum) = (container.len() as u32, block::sum(container));
        if !self.shared.index().is_ok_and(|mut index| index.recharge(demotion, len)) {
            return Ok(None);
        }
        let Some((entry, place, slot)) = self.append(len, sum, make_room)? else {
            return Ok(None);
        };
        let (offset, page_offset) = self.offsets(&place, slot);
        let record = record(demotion.key, demotion.parent, demotion.tenant, &place, slot);
        let staged = self.stage.add(&*self.io, offset, container);
        match staged.and_then(|()| self.stage.add_record(&*self.io, page_offset, &record)) {
            Ok(()) => Ok(Some((entry, place.segment))),
            Err(error) => {
                self.drop_entry(entry);
                Err(error)
            }
        }
    }

    /// Mark the records of evicted blocks, so that a restart does not bring them back. Those that
    /// cannot be marked now are once the disk works again.
    fn clear_erased(&mut self) -> io::Result<()> {
        let erased = self.shared.index().map(|mut index| index.take_erased()).unwrap_or_default();
        for (at, one) in erased.iter().enumerate() {
            if let Err(error) = self.mark(*one) {
                if let Ok(mut index) = self.shared.index() {
                    index.put_back_erased(&erased[at..]);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn mark(&mut self, erased: Erased) -> io::Result<()> {
        let Erased { segment, generation, slot } = erased;
        let page = self.with_log(|log| {
            let offset = log.directory_offset(segment, slot.unwrap_or(0));
            log.is_current(segment, generation).then_some(offset)
        });
        let Some(Some(page_offset)) = page else { return Ok(()) };
        // Without its first page a directory is empty.
        let Some(slot) = slot else { return self.stage.clear(&*self.io, page_offset) };
        let place = Place { segment, generation, page: 0, len: 0, sum: 0 };
        let mark = record(NO_KEY, None, 0, &place, slot);
        self.stage.erase(&*self.io, page_offset, &mark)
    }

    /// The disk failed: nothing of the open segment is trusted to be written, and the tier is off.
    fn failed(&mut self) {
        self.stage.discard();
        self.health.write_failed();
        self.next_probe = self.shared.now() + PROBE_EVERY;
        let Ok(mut index) = self.shared.index() else { return };
        index.set_serving(false);
        if let Some(log) = index.log_mut() {
            log.seal();
        }
    }

    /// Write and read the page that is there for it; on success the tier serves again.
    fn probe(&mut self, now: Tick) {
        if now < self.next_probe {
            return;
        }
        self.next_probe = now + PROBE_EVERY;
        let mut page = Buffer::new(PAGE);
        page[..8].copy_from_slice(&now.to_le_bytes());
        let mut back = Buffer::new(PAGE);
        let outcome = self.io.write_at(0, &page).and_then(|()| self.io.read_at(0, &mut back));
        if outcome.is_ok() && *page == *back {
            self.health.switch_on();
            if let Ok(mut index) = self.shared.index() {
                index.set_serving(true);
            }
        }
    }

    /// Try again for space that the disk did not have.
    fn retry_space(&mut self, now: Tick) {
        if self.health.is_full() && now >= self.next_probe {
            self.next_probe = now + PROBE_EVERY;
            let max_segments = self.max_segments;
            self.health.set_full(false);
            self.with_log(|log| log.set_max_segments(max_segments));
        }
    }

    fn commit(&self, demotion: &Demotion, entry: Option<EntryId>) {
        if let Ok(mut index) = self.shared.index() {
            index.demoted(demotion, entry);
        }
        // Whoever waits for room may have it now.
        self.shared.notify_published();
    }

    fn take_back(&mut self, demotion: &Demotion, entry: EntryId) {
        self.drop_entry(entry);
        self.commit(demotion, None);
    }

    /// After a failed write: its record may be on disk all the same, so it is marked, too.
    pub(super) fn drop_entry(&mut self, entry: EntryId) {
        if let Ok(mut index) = self.shared.index() {
            index.erase_entry(entry);
        }
    }

    pub(super) fn offsets(&self, place: &Place, slot: u32) -> (u64, u64) {
        self.with_log(|log| offsets(log, place, slot)).unwrap_or((0, 0))
    }

    pub(super) fn with_log<T>(&self, run: impl FnOnce(&mut crate::log::Log) -> T) -> Option<T> {
        self.shared.index().ok()?.log_mut().map(run)
    }
}
