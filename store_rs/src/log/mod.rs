//! The log: where on disk each block is, what is appended next, and what makes room.
//!
//! A pure state machine over segments of one size. A segment holds containers from its first page
//! on, and a directory of records from its last page down, 32 to a page. It is free, open (one at a
//! time, appended to), or sealed. Records are immutable; a segment becomes free as a whole, and its
//! generation, which grows with every segment begun, tells its records from those before.
//!
//! Order of writes, which recovery relies on: the first directory page is cleared before a
//! segment's first byte is overwritten, and a record is written after its bytes. So a record that
//! can be read names bytes that were written whole.
//!
//! Invariants: `max_segments · segment_bytes` is never exceeded; a segment being read is never
//! begun anew; live bytes are the pages of the entries that name it. One segment stays in reserve,
//! so that room can always be made by moving what is worth keeping.

mod entry;
mod record;
#[cfg(test)]
mod tests;

pub use entry::EntryId;
use entry::{Entry, READ, id, parts};
pub use record::{Found, MAX_SEGMENT, PAGE, PER_PAGE, RECORD_BYTES, Record, pages, tenant_print};

const NONE: u32 = u32::MAX;
/// One segment has at most this share of all entries.
const SEGMENT_SHARE: usize = 4;

/// Where a block's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which segment.
    pub segment: u32,
    /// Its generation.
    pub generation: u64,
    /// First page within the segment.
    pub page: u32,
    /// Bytes of the container.
    pub len: u32,
    /// Their checksum.
    pub sum: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Open,
    Sealed,
}

#[derive(Clone)]
struct Segment {
    state: State,
    generation: u64,
    /// By slot; a dropped one keeps its slot until the segment goes.
    entries: Vec<Entry>,
    next_page: u32,
    live: u64,
    /// Bytes of entries that were read since they were written.
    wanted: u64,
    pins: u32,
}

/// See the module.
pub struct Log {
    segment_bytes: u64,
    segments: Vec<Segment>,
    max_segments: usize,
    max_entries: usize,
    live: usize,
    open: Option<u32>,
    generation: u64,
}

impl Log {
    /// An empty log of at most `max_segments`, none of which exists yet.
    ///
    /// # Panics
    /// If `segment_bytes` is not a multiple of a page or above [`MAX_SEGMENT`].
    pub fn new(max_segments: usize, segment_bytes: u64) -> Self {
        assert!(segment_bytes.is_multiple_of(PAGE as u64) && segment_bytes <= MAX_SEGMENT);
        let max_segments = max_segments.min(usize::from(u16::MAX));
        Self {
            segment_bytes,
            segments: Vec::new(),
            max_segments,
            max_entries: usize::MAX,
            live: 0,
            open: None,
            generation: 0,
        }
    }

    /// Bound what is remembered: beyond so many entries, dropped ones included, no segment is begun
    /// before another was given up.
    pub fn set_max_entries(&mut self, max_entries: usize) {
        self.max_entries = max_entries;
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Segments that have space on disk.
    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Bytes on disk: what the file may take.
    pub fn allocated_bytes(&self) -> u64 {
        self.segments.len() as u64 * self.segment_bytes
    }

    /// Bytes of the blocks it holds, in whole pages.
    pub fn live_bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.live).sum()
    }

    /// Blocks it holds.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory in use.
    pub fn memory_bytes(&self) -> u64 {
        (self.entries() * size_of::<Entry>() + self.segments.len() * size_of::<Segment>()) as u64
    }

    /// Entries, dropped ones included.
    fn entries(&self) -> usize {
        self.segments.iter().map(|segment| segment.entries.len()).sum()
    }

    /// Whether a container of `len` bytes fits into a segment at all.
    pub fn takes(&self, len: u32) -> bool {
        u64::from(pages(len) + 1) * PAGE as u64 <= self.segment_bytes
    }

    /// Where the next container of `len` bytes goes, and the slot of its record. None if no segment
    /// is open or the open one has no room.
    pub fn next(&self, len: u32) -> Option<(Place, u32)> {
        let at = self.open?;
        let segment = &self.segments[at as usize];
        let slot = segment.entries.len() as u32;
        let directory = (slot / PER_PAGE as u32) + 1;
        let whole = (self.segment_bytes / PAGE as u64) as u32;
        let most = (self.max_entries / SEGMENT_SHARE).clamp(PER_PAGE, u16::MAX.into()) as u32;
        let fits = segment.next_page + pages(len) + directory <= whole && slot < most;
        let (page, generation) = (segment.next_page, segment.generation);
        fits.then_some((Place { segment: at, generation, page, len, sum: 0 }, slot))
    }

    /// Take what `next` proposed for a container with this checksum. Nobody owns it until `adopt`.
    pub fn append(&mut self, len: u32, sum: u32) -> Option<(EntryId, Place, u32)> {
        let (place, slot) = self.next(len)?;
        let place = Place { sum, ..place };
        Some((self.push(&place), place, slot))
    }

    /// Name the owner of an entry.
    pub fn adopt(&mut self, id: EntryId, owner: u32) {
        self.entry_mut(id).owner = owner;
    }

    /// Drop one entry; its bytes are dead from now on. Returns its segment and slot.
    pub fn drop_entry(&mut self, id: EntryId) -> (u32, u32) {
        let entry = std::mem::replace(self.entry_mut(id), Entry::DEAD);
        let (at, slot) = parts(id);
        let segment = &mut self.segments[at as usize];
        segment.live -= entry.bytes();
        segment.wanted -= if entry.is_read() { entry.bytes() } else { 0 };
        self.live -= 1;
        (at, slot)
    }

    /// Where an entry's bytes are.
    pub fn place(&self, id: EntryId) -> Place {
        let (segment, slot) = parts(id);
        let Segment { generation, entries, .. } = &self.segments[segment as usize];
        let entry = entries[slot as usize];
        let (page, len, sum) = (entry.page.into(), entry.len(), entry.sum);
        Place { segment, generation: *generation, page, len, sum }
    }

    /// The node an entry belongs to; none that exists if it was dropped.
    pub fn owner(&self, id: EntryId) -> u32 {
        let (segment, slot) = parts(id);
        self.segments[segment as usize].entries.get(slot as usize).map_or(NONE, |entry| entry.owner)
    }

    /// The entry is about to be read: its segment stays as it is until `unpin`. Counts as a read.
    pub fn pin_for_read(&mut self, id: EntryId) -> Place {
        let entry = self.entry_mut(id);
        let first = if entry.is_read() { 0 } else { entry.bytes() };
        entry.len_read |= READ;
        let place = self.place(id);
        self.segments[place.segment as usize].wanted += first;
        self.pin(place.segment);
        place
    }

    /// Keep a segment as it is until `unpin`: it is being read, or written and not adopted yet.
    pub fn pin(&mut self, segment: u32) {
        self.segments[segment as usize].pins += 1;
    }

    /// That has ended.
    pub fn unpin(&mut self, segment: u32) {
        self.segments[segment as usize].pins -= 1;
    }

    /// Offset in the file of a segment. The first page of the file is not part of the log.
    pub fn segment_offset(&self, segment: u32) -> u64 {
        PAGE as u64 + u64::from(segment) * self.segment_bytes
    }

    /// The generation of a segment: that of its records on disk, also while it is free.
    pub fn generation_of(&self, segment: u32) -> u64 {
        self.segments[segment as usize].generation
    }

    /// Whether a segment still has this generation's records on disk, perhaps though it is free.
    pub fn is_current(&self, segment: u32, generation: u64) -> bool {
        self.segments.get(segment as usize).is_some_and(|s| s.generation == generation)
    }

    /// The open segment.
    pub fn open_segment(&self) -> Option<u32> {
        self.open
    }

    /// Offset in the file of a place's bytes.
    pub fn offset(&self, place: &Place) -> u64 {
        self.segment_offset(place.segment) + u64::from(place.page) * PAGE as u64
    }

    /// Offset in the file of the directory page with this slot.
    pub fn directory_offset(&self, segment: u32, slot: u32) -> u64 {
        let end = self.segment_offset(segment + 1);
        end - (u64::from(slot) / PER_PAGE as u64 + 1) * PAGE as u64
    }

    /// No more goes into the open segment.
    pub fn seal(&mut self) {
        if let Some(open) = self.open.take() {
            self.segments[open as usize].state = State::Sealed;
        }
    }

    /// A segment to begin, none being open: a free one, or one that has no space on disk yet (then
    /// true). `reserve` may take the last, which is kept for moving what is worth keeping.
    pub fn candidate(&self, reserve: bool) -> Option<(u32, bool)> {
        let free = |segment: &Segment| segment.state == State::Free && segment.pins == 0;
        if !reserve && self.entries() >= self.max_entries {
            return None;
        }
        let unborn = self.max_segments - self.segments.len();
        let available = unborn + self.segments.iter().filter(|segment| free(segment)).count();
        if available < if reserve { 1 } else { 2 } {
            return None;
        }
        match self.segments.iter().position(free) {
            Some(at) => Some((at as u32, false)),
            None => Some((self.segments.len() as u32, true)),
        }
    }

    /// The segment that `candidate` named is cleared on disk: append to it from now on.
    ///
    /// # Panics
    /// If a segment is open, or this one is not free.
    pub fn begin(&mut self, at: u32) {
        assert!(self.open.is_none(), "a segment is open");
        if at as usize == self.segments.len() {
            self.segments.push(Segment::free());
        }
        self.generation += 1;
        let segment = &mut self.segments[at as usize];
        assert!(segment.state == State::Free && segment.pins == 0 && segment.live == 0);
        *segment = Segment { state: State::Open, generation: self.generation, ..Segment::free() };
        self.open = Some(at);
    }

    /// The segment to give up next: the one that loses least, the oldest of those that lose as
    /// little. Never the open one, nor one being read.
    pub fn victim(&self) -> Option<u32> {
        let sealed = self.segments.iter().enumerate();
        let sealed = sealed.filter(|(_, s)| s.state == State::Sealed && s.pins == 0);
        sealed.min_by_key(|(_, s)| (s.wanted, s.generation)).map(|(at, _)| at as u32)
    }

    /// Entries of a segment: with `wanted` those that were read since they were written and so are
    /// worth moving, else the others.
    pub fn entries_of(&self, segment: u32, wanted: bool) -> Vec<EntryId> {
        let entries = self.segments[segment as usize].entries.iter().enumerate();
        let live = entries.filter(|(_, entry)| entry.len() > 0 && entry.is_read() == wanted);
        live.map(|(slot, _)| id(segment, slot as u32)).collect()
    }

    /// A sealed segment that holds nothing any more is free.
    ///
    /// # Panics
    /// If it holds something.
    pub fn free(&mut self, at: u32) {
        let segment = &mut self.segments[at as usize];
        assert!(segment.state == State::Sealed && segment.live == 0, "segment {at} is in use");
        segment.state = State::Free;
        segment.entries = Vec::new();
    }

    /// The disk gave no space for another segment: do with those there are.
    pub fn limit_to_allocated(&mut self) {
        self.max_segments = self.segments.len();
    }

    /// The disk may have space again.
    pub fn set_max_segments(&mut self, max_segments: usize) {
        self.max_segments = max_segments.max(self.segments.len()).min(usize::from(u16::MAX));
    }

    /// Segments it may have.
    pub fn max_segments(&self) -> usize {
        self.max_segments
    }

    /// Take back what a restart found: `segments` of them exist on disk, all free so far.
    pub fn restore_segments(&mut self, segments: usize) {
        let segments = segments.min(self.max_segments);
        self.segments.resize_with(segments, Segment::free);
    }

    /// Take back one record of a restart. The records of a segment come in the order of their
    /// slots, all of one generation. None if it does not fit where it says it is.
    pub fn restore(&mut self, record: &Record) -> Option<EntryId> {
        let whole = (self.segment_bytes / PAGE as u64) as u32;
        let end = record.page.checked_add(pages(record.len))?;
        let directory = record.slot / PER_PAGE as u32 + 1;
        let known = self.segments.get(record.segment as usize)?;
        let place = Place {
            segment: record.segment,
            generation: record.generation,
            page: record.page,
            len: record.len,
            sum: record.sum,
        };
        let in_order =
            record.slot as usize >= known.entries.len() && record.page >= known.next_page;
        let nameable = record.slot < u32::from(u16::MAX);
        if record.len == 0 || !in_order || !nameable || end.checked_add(directory)? > whole {
            return None;
        }
        let segment = &mut self.segments[record.segment as usize];
        segment.entries.resize(record.slot as usize, Entry::DEAD);
        (segment.state, segment.generation) = (State::Sealed, record.generation);
        self.generation = self.generation.max(record.generation);
        Some(self.push(&place))
    }

    /// Add an entry in the next slot of its segment.
    fn push(&mut self, place: &Place) -> EntryId {
        let Place { segment: at, page, len, sum, .. } = *place;
        let entry = Entry { owner: NONE, len_read: len, sum, page: page as u16 };
        let segment = &mut self.segments[at as usize];
        segment.live += entry.bytes();
        segment.next_page = page + pages(len);
        segment.entries.push(entry);
        self.live += 1;
        id(at, segment.entries.len() as u32 - 1)
    }

    fn entry_mut(&mut self, id: EntryId) -> &mut Entry {
        let (segment, slot) = parts(id);
        &mut self.segments[segment as usize].entries[slot as usize]
    }
}

impl Segment {
    fn free() -> Self {
        Self {
            state: State::Free,
            generation: 0,
            entries: Vec::new(),
            next_page: 0,
            live: 0,
            wanted: 0,
            pins: 0,
        }
    }
}
