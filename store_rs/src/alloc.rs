//! Variable extents of the arena: a two-level segregated fit with immediate coalescing.
//!
//! Owns which bytes of the arena are free; never touches them. Chosen over size-class slabs because
//! encoded blocks have many sizes that drift with the codec and the text: slabs would strand memory
//! in classes that went out of use, whereas neighbouring free extents merge here at once. Sizes are
//! rounded up to 1/64 of their power of two (at most 1.6 % waste), so holes of one class are
//! interchangeable, and both `allocate` and `free` are O(1): two bitmap scans.
//!
//! Invariants: extents tile the arena without gap or overlap; no two neighbours are both free;
//! `free_bytes` is the sum of the free ones. `check` proves all of it in tests. Running out is
//! `None`; a double free is a bug and panics.

/// Offsets and sizes are multiples of this, so an extent fits two `u32` up to 1 TiB of arena.
pub const GRANULE: u64 = 256;

/// Largest arena one allocator can describe.
pub const MAX_CAPACITY: u64 = GRANULE * (u32::MAX as u64);

const STEPS: u32 = 64;
const STEP_BITS: u32 = STEPS.trailing_zeros();
const ROWS: usize = (u32::BITS - STEP_BITS + 1) as usize;
const NONE: u32 = u32::MAX;

/// Names an extent until it is freed; ids are reused.
pub type ExtentId = u32;

#[derive(Clone, Copy)]
struct Extent {
    start: u32,
    len: u32,
    before: u32,
    after: u32,
    prev_free: u32,
    next_free: u32,
}

const USED: u32 = u32::MAX - 1;

/// The allocator. All offsets and sizes at its face are bytes.
pub struct Allocator {
    extents: Vec<Extent>,
    spare: Vec<ExtentId>,
    heads: [[ExtentId; STEPS as usize]; ROWS],
    rows: u32,
    columns: [u64; ROWS],
    capacity: u64,
    free: u64,
}

impl Allocator {
    /// An allocator over `capacity` bytes, rounded down to the granule.
    ///
    /// # Panics
    /// If `capacity` is above [`MAX_CAPACITY`].
    pub fn new(capacity: u64) -> Self {
        assert!(capacity <= MAX_CAPACITY, "arena above 1 TiB");
        let granules = (capacity / GRANULE) as u32;
        let mut this = Self {
            extents: Vec::new(),
            spare: Vec::new(),
            heads: [[NONE; STEPS as usize]; ROWS],
            rows: 0,
            columns: [0; ROWS],
            capacity: u64::from(granules) * GRANULE,
            free: 0,
        };
        if granules > 0 {
            let id = this.new_extent(0, granules, NONE, NONE);
            this.insert_free(id);
        }
        this
    }

    /// Bytes managed.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes in free extents.
    pub fn free_bytes(&self) -> u64 {
        self.free
    }

    /// Bytes of the largest free extent; what is free beyond it lies in smaller pieces.
    pub fn largest_free(&self) -> u64 {
        let Some(row) = self.rows.checked_ilog2() else { return 0 };
        let column = self.columns[row as usize].ilog2();
        let mut next = self.heads[row as usize][column as usize];
        let mut largest = 0;
        while next != NONE {
            let extent = self.extents[next as usize];
            largest = largest.max(extent.len);
            next = extent.next_free;
        }
        u64::from(largest) * GRANULE
    }

    /// Bytes an extent for `bytes` occupies: what `allocate` would take. None above the capacity.
    pub fn rounded(&self, bytes: u64) -> Option<u64> {
        let granules = round_up(bytes)?;
        (u64::from(granules) * GRANULE <= self.capacity).then(|| u64::from(granules) * GRANULE)
    }

    /// Reserve an extent of at least `bytes`; None if no free extent is large enough.
    pub fn allocate(&mut self, bytes: u64) -> Option<ExtentId> {
        let want = round_up(bytes)?;
        let id = self.find(want)?;
        self.remove_free(id);
        if self.extents[id as usize].len > want {
            let rest = self.split(id, want);
            self.insert_free(rest);
        }
        Some(id)
    }

    /// As `allocate`, at a multiple of `align` bytes, itself a multiple of the granule.
    pub fn allocate_aligned(&mut self, bytes: u64, align: u64) -> Option<ExtentId> {
        let step = (align / GRANULE) as u32;
        if step <= 1 {
            return self.allocate(bytes);
        }
        let want = round_up(bytes)?;
        // Wherever a free extent of this size starts, an aligned one fits inside.
        let id = self.find(round_up(u64::from(want + step - 1) * GRANULE)?)?;
        self.remove_free(id);
        let start = self.extents[id as usize].start;
        let aligned = match start.next_multiple_of(step) - start {
            0 => id,
            front => {
                let rest = self.split(id, front);
                self.insert_free(id);
                rest
            }
        };
        if self.extents[aligned as usize].len > want {
            let rest = self.split(aligned, want);
            self.insert_free(rest);
        }
        Some(aligned)
    }

    /// Cut an extent that is in no free list after `len` granules; the part behind.
    fn split(&mut self, id: ExtentId, len: u32) -> ExtentId {
        let extent = self.extents[id as usize];
        let rest = self.new_extent(extent.start + len, extent.len - len, id, extent.after);
        if extent.after != NONE {
            self.extents[extent.after as usize].before = rest;
        }
        self.extents[id as usize].after = rest;
        self.extents[id as usize].len = len;
        rest
    }

    /// Return an extent; neighbours that are free merge with it.
    ///
    /// # Panics
    /// If the extent is not in use.
    pub fn free(&mut self, id: ExtentId) {
        let extent = self.extents[id as usize];
        assert!(extent.prev_free == USED, "extent {id} freed twice");
        let mut kept = id;
        if extent.before != NONE && self.is_free(extent.before) {
            kept = extent.before;
            self.remove_free(kept);
            self.absorb_next(kept);
        }
        let after = self.extents[kept as usize].after;
        if after != NONE && self.is_free(after) {
            self.remove_free(after);
            self.absorb_next(kept);
        }
        self.insert_free(kept);
    }

    /// Give back what an extent has beyond `bytes`; returns how much. Nothing if it is less than an
    /// extent can be.
    ///
    /// # Panics
    /// If the extent is not in use.
    pub fn shrink(&mut self, id: ExtentId, bytes: u64) -> u64 {
        let Extent { start, len, after, prev_free, .. } = self.extents[id as usize];
        assert!(prev_free == USED, "extent {id} is free");
        let Some(keep) = round_up(bytes).filter(|&keep| keep < len) else { return 0 };
        let rest = self.new_extent(start + keep, len - keep, id, after);
        if after != NONE {
            self.extents[after as usize].before = rest;
        }
        self.extents[id as usize].after = rest;
        self.extents[id as usize].len = keep;
        self.free(rest);
        u64::from(len - keep) * GRANULE
    }

    /// Offset of an extent in the arena.
    pub fn offset(&self, id: ExtentId) -> u64 {
        u64::from(self.extents[id as usize].start) * GRANULE
    }

    /// Bytes of an extent.
    pub fn size(&self, id: ExtentId) -> u64 {
        u64::from(self.extents[id as usize].len) * GRANULE
    }

    /// Bytes of memory the allocator itself uses.
    pub fn memory_bytes(&self) -> u64 {
        let extents = self.extents.len() * size_of::<Extent>();
        (size_of::<Self>() + extents + self.spare.len() * size_of::<ExtentId>()) as u64
    }

    fn is_free(&self, id: ExtentId) -> bool {
        self.extents[id as usize].prev_free != USED
    }

    fn new_extent(&mut self, start: u32, len: u32, before: u32, after: u32) -> ExtentId {
        let extent = Extent { start, len, before, after, prev_free: USED, next_free: NONE };
        if let Some(id) = self.spare.pop() {
            self.extents[id as usize] = extent;
            return id;
        }
        self.extents.push(extent);
        (self.extents.len() - 1) as ExtentId
    }

    /// Merge the neighbour after `id` (not in any free list) into it.
    fn absorb_next(&mut self, id: ExtentId) {
        let gone = self.extents[id as usize].after;
        let Extent { len, after, .. } = self.extents[gone as usize];
        self.extents[id as usize].len += len;
        self.extents[id as usize].after = after;
        if after != NONE {
            self.extents[after as usize].before = id;
        }
        self.spare.push(gone);
    }

    fn find(&self, want: u32) -> Option<ExtentId> {
        let (row, column) = class_of(want);
        let in_row = self.columns[row] & (u64::MAX << column);
        if in_row != 0 {
            return Some(self.heads[row][in_row.trailing_zeros() as usize]);
        }
        let above = u64::from(self.rows) & (u64::MAX << (row + 1));
        if above == 0 {
            return None;
        }
        let row = above.trailing_zeros() as usize;
        Some(self.heads[row][self.columns[row].trailing_zeros() as usize])
    }

    fn insert_free(&mut self, id: ExtentId) {
        let len = self.extents[id as usize].len;
        let (row, column) = class_of(len);
        let head = self.heads[row][column];
        self.extents[id as usize].prev_free = NONE;
        self.extents[id as usize].next_free = head;
        if head != NONE {
            self.extents[head as usize].prev_free = id;
        }
        self.heads[row][column] = id;
        self.columns[row] |= 1 << column;
        self.rows |= 1 << row;
        self.free += u64::from(len) * GRANULE;
    }

    fn remove_free(&mut self, id: ExtentId) {
        let Extent { len, prev_free, next_free, .. } = self.extents[id as usize];
        let (row, column) = class_of(len);
        if prev_free == NONE {
            self.heads[row][column] = next_free;
        } else {
            self.extents[prev_free as usize].next_free = next_free;
        }
        if next_free != NONE {
            self.extents[next_free as usize].prev_free = prev_free;
        }
        if self.heads[row][column] == NONE {
            self.columns[row] &= !(1 << column);
            if self.columns[row] == 0 {
                self.rows &= !(1 << row);
            }
        }
        self.extents[id as usize].prev_free = USED;
        self.free -= u64::from(len) * GRANULE;
    }
}

/// The class that holds free extents of `granules`: every extent in it is at least its lower bound.
///
/// Row 0 holds lengths below 64, one class each; row r holds [64·2^(r-1), 64·2^r) in 64 steps.
fn class_of(granules: u32) -> (usize, usize) {
    if granules < STEPS {
        return (0, granules as usize);
    }
    let top = granules.ilog2();
    let column = (granules >> (top - STEP_BITS)) - STEPS;
    ((top - STEP_BITS + 1) as usize, column as usize)
}

/// Granules for `bytes`, rounded up to the lower bound of a class.
fn round_up(bytes: u64) -> Option<u32> {
    let granules = u32::try_from(bytes.div_ceil(GRANULE)).ok()?.max(1);
    if granules < STEPS {
        return Some(granules);
    }
    let step = 1u32 << (granules.ilog2() - STEP_BITS);
    granules.checked_next_multiple_of(step)
}

#[cfg(test)]
impl Allocator {
    /// Panics unless every invariant of the module holds.
    pub(crate) fn check(&self) {
        let live = self.extents.len() - self.spare.len();
        let first = (0..self.extents.len() as u32)
            .filter(|id| !self.spare.contains(id))
            .find(|&id| self.extents[id as usize].before == NONE);
        let (mut at, mut seen, mut free, mut next) = (0u32, 0, 0u64, first.unwrap_or(NONE));
        let mut previous_free = false;
        while next != NONE {
            let extent = self.extents[next as usize];
            assert_eq!(extent.start, at, "gap or overlap");
            let is_free = self.is_free(next);
            assert!(!(is_free && previous_free), "unmerged neighbours");
            if is_free {
                free += u64::from(extent.len) * GRANULE;
            }
            previous_free = is_free;
            at += extent.len;
            seen += 1;
            next = extent.after;
        }
        assert_eq!(seen, live, "an extent is unreachable");
        assert_eq!(u64::from(at) * GRANULE, self.capacity);
        assert_eq!(free, self.free);
    }
}

#[cfg(test)]
mod tests;
