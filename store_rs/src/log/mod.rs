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

mod record;
#[cfg(test)]
mod tests;

pub use record::{Found, MAX_SEGMENT, PAGE, PER_PAGE, RECORD_BYTES, Record, pages, tenant_print};

/// Names an entry until it is dropped; ids are reused.
pub type EntryId = u32;

const NONE: u32 = u32::MAX;
/// Reads of one record that count; more say nothing new.
const MAX_READS: u32 = 15;

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

/// An entry: 20 bytes. `owner` is the index's node.
#[derive(Clone, Copy)]
struct Entry {
    owner: u32,
    segment: u16,
    page: u16,
    len: u32,
    sum: u32,
    slot: u16,
    reads: u16,
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
    /// Entries by slot; NONE where one was dropped.
    slots: Vec<EntryId>,
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
    entries: Vec<Entry>,
    spare: Vec<EntryId>,
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
            entries: Vec::new(),
            spare: Vec::new(),
            open: None,
            generation: 0,
        }
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
        self.entries.len() - self.spare.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory in use.
    pub fn memory_bytes(&self) -> u64 {
        let slots: usize = self.segments.iter().map(|segment| segment.slots.len()).sum();
        let words = slots + self.spare.len();
        (self.entries.len() * size_of::<Entry>()
            + words * size_of::<u32>()
            + self.segments.len() * size_of::<Segment>()) as u64
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
        let slot = segment.slots.len() as u32;
        let directory = (slot / PER_PAGE as u32) + 1;
        let whole = (self.segment_bytes / PAGE as u64) as u32;
        let fits =
            segment.next_page + pages(len) + directory <= whole && slot < u32::from(u16::MAX);
        let (page, generation) = (segment.next_page, segment.generation);
        fits.then_some((Place { segment: at, generation, page, len, sum: 0 }, slot))
    }

    /// Take what `next` proposed for a container with this checksum. Nobody owns it until `adopt`.
    pub fn append(&mut self, len: u32, sum: u32) -> Option<(EntryId, Place, u32)> {
        let (place, slot) = self.next(len)?;
        let place = Place { sum, ..place };
        let id = self.insert(&place, slot);
        let segment = &mut self.segments[place.segment as usize];
        segment.slots.push(id);
        segment.next_page += pages(len);
        Some((id, place, slot))
    }

    /// Name the owner of an entry.
    pub fn adopt(&mut self, id: EntryId, owner: u32) {
        self.entries[id as usize].owner = owner;
    }

    /// Drop one entry; its bytes are dead from now on. Returns its segment and slot.
    pub fn drop_entry(&mut self, id: EntryId) -> (u32, u32) {
        let entry = self.entries[id as usize];
        let segment = &mut self.segments[usize::from(entry.segment)];
        segment.slots[usize::from(entry.slot)] = NONE;
        let bytes = u64::from(pages(entry.len)) * PAGE as u64;
        segment.live -= bytes;
        segment.wanted -= if entry.reads > 0 { bytes } else { 0 };
        self.spare.push(id);
        (entry.segment.into(), entry.slot.into())
    }

    /// Where an entry's bytes are.
    pub fn place(&self, id: EntryId) -> Place {
        let entry = self.entries[id as usize];
        let generation = self.segments[usize::from(entry.segment)].generation;
        let (segment, page) = (entry.segment.into(), entry.page.into());
        Place { segment, generation, page, len: entry.len, sum: entry.sum }
    }

    /// The node an entry belongs to.
    pub fn owner(&self, id: EntryId) -> u32 {
        self.entries[id as usize].owner
    }

    /// The entry is about to be read: its segment stays as it is until `unpin`. Counts as a read.
    pub fn pin_for_read(&mut self, id: EntryId) -> Place {
        let bytes = u64::from(pages(self.entries[id as usize].len)) * PAGE as u64;
        let entry = &mut self.entries[id as usize];
        let segment = &mut self.segments[usize::from(entry.segment)];
        segment.wanted += if entry.reads == 0 { bytes } else { 0 };
        entry.reads = (entry.reads + 1).min(MAX_READS as u16);
        segment.pins += 1;
        self.place(id)
    }

    /// Keep a place as it is until `unpin`.
    pub fn pin(&mut self, place: &Place) {
        self.segments[place.segment as usize].pins += 1;
    }

    /// A read of this place has ended.
    pub fn unpin(&mut self, place: &Place) {
        self.segments[place.segment as usize].pins -= 1;
    }

    /// Offset in the file of a segment. The first page of the file is not part of the log.
    pub fn segment_offset(&self, segment: u32) -> u64 {
        PAGE as u64 + u64::from(segment) * self.segment_bytes
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
        let slots = self.segments[segment as usize].slots.iter().copied();
        let live = slots.filter(|&id| id != NONE);
        live.filter(|&id| (self.entries[id as usize].reads > 0) == wanted).collect()
    }

    /// A sealed segment that holds nothing any more is free.
    ///
    /// # Panics
    /// If it holds something.
    pub fn free(&mut self, at: u32) {
        let segment = &mut self.segments[at as usize];
        assert!(segment.state == State::Sealed && segment.live == 0, "segment {at} is in use");
        segment.state = State::Free;
        segment.slots = Vec::new();
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
        let in_order = record.slot as usize >= known.slots.len() && record.page >= known.next_page;
        if record.len == 0 || !in_order || end.checked_add(directory)? > whole {
            return None;
        }
        let id = self.insert(&place, record.slot);
        let segment = &mut self.segments[record.segment as usize];
        segment.slots.resize(record.slot as usize, NONE);
        segment.slots.push(id);
        segment.state = State::Sealed;
        segment.generation = record.generation;
        segment.next_page = end;
        self.generation = self.generation.max(record.generation);
        Some(id)
    }

    fn insert(&mut self, place: &Place, slot: u32) -> EntryId {
        let entry = Entry {
            owner: NONE,
            segment: place.segment as u16,
            page: place.page as u16,
            len: place.len,
            sum: place.sum,
            slot: slot as u16,
            reads: 0,
        };
        self.segments[place.segment as usize].live += u64::from(pages(place.len)) * PAGE as u64;
        if let Some(id) = self.spare.pop() {
            self.entries[id as usize] = entry;
            return id;
        }
        self.entries.push(entry);
        (self.entries.len() - 1) as EntryId
    }
}

impl Segment {
    fn free() -> Self {
        Self {
            state: State::Free,
            generation: 0,
            slots: Vec::new(),
            next_page: 0,
            live: 0,
            wanted: 0,
            pins: 0,
        }
    }
}
