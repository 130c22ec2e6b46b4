//! Variable extents of the arena: a two-level segregated fit with immediate coalescing.
//!
//! Owns which bytes of the arena are free; never touches them. Chosen over size-class slabs because
//! encoded blocks have many sizes that drift with the codec and the text: slabs would strand memory
//! in classes that went out of use, whereas neighbouring free extents merge here at once. Sizes are
//! rounded up to 1/64 of their power of two (at most 1.6 % waste), so holes of one class are
//! interchangeable, and both `allocate` and `free` are O(1): two bitmap scans.
//!
//! An extent ends where the next one begins, and keeps what its owner knows of it where a free one
//! keeps its place in a list: with an owner's word of 12 bytes it takes 24.
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
enum State<T> {
    Free { prev: ExtentId, next: ExtentId },
    Used(T),
}

#[derive(Clone, Copy)]
struct Extent<T> {
    start: u32,
    before: ExtentId,
    after: ExtentId,
    state: State<T>,
}

/// The allocator. All offsets and sizes at its face are bytes; `T` is what the owner of an extent
/// knows of it.
pub struct Allocator<T> {
    extents: Vec<Extent<T>>,
    spare: Vec<ExtentId>,
    heads: [[ExtentId; STEPS as usize]; ROWS],
    rows: u32,
    columns: [u64; ROWS],
    granules: u32,
    free: u64,
    used: usize,
}

impl<T: Copy> Allocator<T> {
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
            granules,
            free: 0,
            used: 0,
        };
        if granules > 0 {
            let id = this.new_extent(0, NONE, NONE);
            this.insert_free(id);
        }
        this
    }

    /// Bytes managed.
    pub fn capacity(&self) -> u64 {
        u64::from(self.granules) * GRANULE
    }

    /// Bytes in free extents.
    pub fn free_bytes(&self) -> u64 {
        self.free
    }

    /// Extents in use.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Bytes of the largest free extent; what is free beyond it lies in smaller pieces.
    pub fn largest_free(&self) -> u64 {
        let Some(row) = self.rows.checked_ilog2() else { return 0 };
        let column = self.columns[row as usize].ilog2();
        let mut at = self.heads[row as usize][column as usize];
        let mut largest = 0;
        while let Some(State::Free { next, .. }) = self.extents.get(at as usize).map(|e| e.state) {
            largest = largest.max(self.len(at));
            at = next;
        }
        u64::from(largest) * GRANULE
    }

    /// Bytes an extent for `bytes` occupies: what `allocate` would take. None above the capacity.
    pub fn rounded(&self, bytes: u64) -> Option<u64> {
        let granules = round_up(bytes)?;
        (granules <= self.granules).then(|| u64::from(granules) * GRANULE)
    }

    /// Reserve an extent of at least `bytes` at a multiple of `align` bytes, itself a multiple of the
    /// granule; None if no free extent is large enough.
    pub fn allocate(&mut self, bytes: u64, align: u64, owner: T) -> Option<ExtentId> {
        let step = ((align / GRANULE) as u32).max(1);
        let want = round_up(bytes)?;
        // Wherever a free extent of this size starts, an aligned one fits inside.
        let found = self.find(round_up(u64::from(want + (step - 1)) * GRANULE)?)?;
        self.remove_free(found);
        let start = self.extents[found as usize].start;
        let id = match start.next_multiple_of(step) - start {
            0 => found,
            front => {
                let rest = self.split(found, front);
                self.insert_free(found);
                rest
            }
        };
        if self.len(id) > want {
            let rest = self.split(id, want);
            self.insert_free(rest);
        }
        self.extents[id as usize].state = State::Used(owner);
        self.used += 1;
        Some(id)
    }

    /// Return an extent; neighbours that are free merge with it.
    ///
    /// # Panics
    /// If the extent is not in use.
    pub fn free(&mut self, id: ExtentId) {
        let Extent { before, state, .. } = self.extents[id as usize];
        assert!(matches!(state, State::Used(_)), "extent {id} freed twice");
        self.used -= 1;
        let mut kept = id;
        if before != NONE && self.is_free(before) {
            kept = before;
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
        let owner = *self.owner(id);
        let len = self.len(id);
        let Some(keep) = round_up(bytes).filter(|&keep| keep < len) else { return 0 };
        let rest = self.split(id, keep);
        self.extents[rest as usize].state = State::Used(owner);
        self.used += 1;
        self.free(rest);
        u64::from(len - keep) * GRANULE
    }

    /// What the owner knows of an extent in use.
    ///
    /// # Panics
    /// If the extent is not in use.
    pub fn owner(&self, id: ExtentId) -> &T {
        match &self.extents[id as usize].state {
            State::Used(owner) => owner,
            State::Free { .. } => panic!("extent {id} is free"),
        }
    }

    /// The same, to be changed.
    ///
    /// # Panics
    /// If the extent is not in use.
    pub fn owner_mut(&mut self, id: ExtentId) -> &mut T {
        match &mut self.extents[id as usize].state {
            State::Used(owner) => owner,
            State::Free { .. } => panic!("extent {id} is free"),
        }
    }

    /// Extents in use with ids of `range`, in order.
    pub fn owners(&self, range: std::ops::Range<usize>) -> impl Iterator<Item = (ExtentId, &T)> {
        let extents = self.extents[range.clone()].iter();
        extents.zip(range).filter_map(|(extent, id)| match &extent.state {
            State::Used(owner) => Some((id as ExtentId, owner)),
            State::Free { .. } => None,
        })
    }

    /// Ids are below this.
    pub fn end(&self) -> usize {
        self.extents.len()
    }

    /// Offset of an extent in the arena.
    pub fn offset(&self, id: ExtentId) -> u64 {
        u64::from(self.extents[id as usize].start) * GRANULE
    }

    /// Bytes of an extent.
    pub fn size(&self, id: ExtentId) -> u64 {
        u64::from(self.len(id)) * GRANULE
    }

    /// Bytes of memory the allocator itself uses.
    pub fn memory_bytes(&self) -> u64 {
        let extents = self.extents.len() * size_of::<Extent<T>>();
        (size_of::<Self>() + extents + self.spare.len() * size_of::<ExtentId>()) as u64
    }

    /// Granules of an extent.
    fn len(&self, id: ExtentId) -> u32 {
        let Extent { start, after, .. } = self.extents[id as usize];
        let end = if after == NONE { self.granules } else { self.extents[after as usize].start };
        end - start
    }

    /// Cut an extent that is in no free list after `len` granules; the part behind, in no list either.
    fn split(&mut self, id: ExtentId, len: u32) -> ExtentId {
        let Extent { start, after, .. } = self.extents[id as usize];
        let rest = self.new_extent(start + len, id, after);
        if after != NONE {
            self.extents[after as usize].before = rest;
        }
        self.extents[id as usize].after = rest;
        rest
    }

    fn is_free(&self, id: ExtentId) -> bool {
        matches!(self.extents[id as usize].state, State::Free { .. })
    }

    fn new_extent(&mut self, start: u32, before: ExtentId, after: ExtentId) -> ExtentId {
        let state = State::Free { prev: NONE, next: NONE };
        let extent = Extent { start, before, after, state };
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
        let after = self.extents[gone as usize].after;
        self.extents[id as usize].after = after;
        if after != NONE {
            self.extents[after as usize].before = id;
        }
        self.extents[gone as usize].state = State::Free { prev: NONE, next: NONE };
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
        let len = self.len(id);
        let (row, column) = class_of(len);
        let head = self.heads[row][column];
        self.extents[id as usize].state = State::Free { prev: NONE, next: head };
        self.relink(head, |prev, _| *prev = id);
        self.heads[row][column] = id;
        self.columns[row] |= 1 << column;
        self.rows |= 1 << row;
        self.free += u64::from(len) * GRANULE;
    }

    fn remove_free(&mut self, id: ExtentId) {
        let State::Free { prev, next } = self.extents[id as usize].state else { return };
        let len = self.len(id);
        let (row, column) = class_of(len);
        if prev == NONE {
            self.heads[row][column] = next;
        }
        self.relink(prev, |_, link| *link = next);
        self.relink(next, |link, _| *link = prev);
        if self.heads[row][column] == NONE {
            self.columns[row] &= !(1 << column);
            if self.columns[row] == 0 {
                self.rows &= !(1 << row);
            }
        }
        self.free -= u64::from(len) * GRANULE;
    }

    /// Change the place of a free extent in its list, if there is one.
    fn relink(&mut self, id: ExtentId, edit: impl FnOnce(&mut ExtentId, &mut ExtentId)) {
        let extent = self.extents.get_mut(id as usize);
        if let Some(State::Free { prev, next }) = extent.map(|extent| &mut extent.state) {
            edit(prev, next);
        }
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
impl<T: Copy> Allocator<T> {
    /// Panics unless every invariant of the module holds.
    pub(crate) fn check(&self) {
        let live = self.extents.len() - self.spare.len();
        let first = (0..self.extents.len() as u32)
            .filter(|id| !self.spare.contains(id))
            .find(|&id| self.extents[id as usize].before == NONE);
        let (mut at, mut seen, mut free, mut next) = (0u32, 0, 0u64, first.unwrap_or(NONE));
        let (mut before, mut previous_free, mut used) = (NONE, false, 0);
        while next != NONE {
            let extent = self.extents[next as usize];
            assert_eq!((extent.start, extent.before), (at, before), "gap or overlap");
            let is_free = self.is_free(next);
            assert!(!(is_free && previous_free), "unmerged neighbours");
            if is_free {
                free += u64::from(self.len(next)) * GRANULE;
            }
            used += usize::from(!is_free);
            previous_free = is_free;
            at += self.len(next);
            seen += 1;
            before = next;
            next = extent.after;
        }
        assert_eq!(seen, live, "an extent is unreachable");
        assert_eq!((at, free, used), (self.granules, self.free, self.used));
    }
}

#[cfg(test)]
mod tests;
