//! Shared memory: the arena that holds blocks, and the ingest buffers that puts pass through.
//!
//! Owns memfds and mappings. The store creates both kinds, reserves their pages up front (a page
//! that cannot be had is an error here, never a SIGBUS later) and seals their size. The arena is
//! also sealed against new writable mappings, so only the store can write it; clients map it
//! read-only. An ingest buffer stays writable by its client at any time, therefore no reference is
//! ever formed to its memory: it is read once, through raw pointers.
//!
//! Huge pages are used where the kernel gives them (Linux 6.1 or newer), without asking for its
//! settings to be changed: blocks are then read without a page fault and with few TLB misses. Where it
//! does not, only time is lost.
//!
//! Mappings are excluded from forks and core dumps. Everything fails with `Error`, saying what to
//! change.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    ftruncate, memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::error::{Error, Result};
use crate::progress::{Phase, Progress};
use crate::written::Written;

const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
const ARENA_SEALS: SealFlags = SIZE_SEALS.union(SealFlags::FUTURE_WRITE);

/// Memory is reserved in steps of this, so that running out stops early.
const STEP: usize = 64 << 20;

/// Behind the bytes of an ingest buffer: a page for the count of those that are written.
pub(crate) const COUNT_PAGE: usize = 4096;

/// Bytes of a put that are copied between two updates of that count.
const PART: usize = 256 << 10;

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// A shared mapping, unmapped on drop.
struct Mapping {
    /// Where the reserved addresses begin: `len + HUGE` bytes of them.
    reserved: NonNull<u8>,
    /// A multiple of `HUGE`, as a huge page must lie alike in the file and in memory.
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory that lives until drop; who may read or write which bytes of it
// is decided by the index's leases and reservations, not by which thread holds the pointer.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods hand out raw pointers only.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize, access: ProtFlags) -> Result<Self> {
        let failed = |error| Error::io("map shared memory", error);
        let room = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: fresh addresses that the kernel picks overlap nothing of ours.
        let reserved = unsafe { mmap_anonymous(null_mut(), len + HUGE, ProtFlags::empty(), room) };
        let reserved = NonNull::new(reserved.map_err(failed)?.cast::<u8>());
        let reserved = reserved.ok_or_else(|| Error::unavailable("mapped at 0"))?;
        // SAFETY: less than `HUGE`, which was reserved beyond `len`.
        let start = unsafe { reserved.add(reserved.align_offset(HUGE)) };
        let this = Self { reserved, start, len };
        let place = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: replaces reserved addresses, which nobody uses yet.
        unsafe { mmap(start.as_ptr().cast(), len, access, place, fd, 0) }.map_err(failed)?;
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            this.advise(0, len, advice)?;
        }
        Ok(this)
    }

    fn advise(&self, offset: usize, len: usize, advice: Advice) -> Result<()> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: the range lies inside our own mapping, and none of the advices used here change
        // or discard its contents.
        unsafe { madvise(self.start.as_ptr().add(offset).cast(), len, advice) }
            .map_err(|error| Error::io("advise on shared memory", error))
    }

    /// Have pages of the file allocated, as huge ones if possible; `field` bounds its size.
    fn reserve(&self, fd: &OwnedFd, offset: usize, len: usize, field: &'static str) -> Result<()> {
        self.use_huge_pages(fd, offset, len / HUGE * HUGE);
        fallocate(fd, FallocateFlags::empty(), offset as u64, len as u64)
            .map_err(|error| out_of_memory(field, self.len, &error.to_string()))
    }

    /// Only saves time later, so failures are not errors.
    fn use_huge_pages(&self, fd: &OwnedFd, offset: usize, len: usize) {
        // A huge page is made around a page that is there: the fewer, the less is copied.
        let mut firsts = (offset..offset + len).step_by(HUGE);
        if firsts.all(|at| fallocate(fd, FallocateFlags::empty(), at as u64, 1).is_ok()) {
            // SAFETY: the range lies inside our own mapping; its contents stay what they are.
            unsafe { libc::madvise(self.at(offset as u64, len).cast(), len, libc::MADV_COLLAPSE) };
        }
    }

    /// # Panics
    /// If the range is outside the mapping.
    fn at(&self, offset: u64, len: usize) -> *mut u8 {
        let offset = usize::try_from(offset).expect("offsets fit the address space");
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "outside the mapping");
        // SAFETY: just checked to be inside the mapping.
        unsafe { self.start.as_ptr().add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever holds a pointer into it also holds `self`.
        // A failure would leave it mapped, which is safe.
        let _ = unsafe { munmap(self.reserved.as_ptr().cast(), self.len + HUGE) };
    }
}

/// The store's side of the arena.
pub struct Arena {
    fd: OwnedFd,
    map: Mapping,
}

impl Arena {
    /// Reserve, touch and seal `len` bytes for blocks.
    pub fn create(len: usize) -> Result<Self> {
        Self::create_telling(len, &Progress::default())
    }

    /// The same, telling how much is touched.
    pub(crate) fn create_telling(len: usize, progress: &Progress) -> Result<Self> {
        Self::make("mooncake-arena", "dram_bytes", len, progress)
    }

    /// The same under another name, for what the setting `field` bounds.
    pub(crate) fn create_as(name: &str, field: &'static str, len: usize) -> Result<Self> {
        Self::make(name, field, len, &Progress::default())
    }

    fn make(name: &str, field: &'static str, len: usize, progress: &Progress) -> Result<Self> {
        progress.begin(Phase::Reserving, len as u64);
        let fd = create_memfd(name, len)?;
        let map = Mapping::new(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        for offset in (0..len).step_by(STEP) {
            let step = STEP.min(len - offset);
            map.reserve(&fd, offset, step, field)?;
            map.advise(offset, step, Advice::LinuxPopulateWrite)
                .map_err(|error| out_of_memory(field, len, error.message()))?;
            progress.advance(step as u64);
        }
        seal(&fd, ARENA_SEALS)?;
        Ok(Self { fd, map })
    }

    /// The fd to pass to clients.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Size.
    pub fn size(&self) -> u64 {
        self.map.len as u64
    }

    /// Bytes the kernel has allocated for it.
    pub fn resident_bytes(&self) -> Result<u64> {
        let stat = fstat(&self.fd).map_err(|error| Error::io("stat the arena", error))?;
        Ok(stat.st_blocks as u64 * 512)
    }

    /// Where a reserved extent's bytes go. Only the holder of its reservation may write there.
    ///
    /// # Panics
    /// If the range is outside the arena.
    pub fn at(&self, offset: u64, len: usize) -> *mut u8 {
        self.map.at(offset, len)
    }
}

/// A client's read-only view of the arena.
pub struct ArenaView {
    map: Mapping,
}

impl ArenaView {
    /// Map the arena a store passed, after checking that it is `len` bytes and sealed.
    pub fn open(fd: OwnedFd, len: u64) -> Result<Self> {
        let len = check_sealed(&fd, len, ARENA_SEALS)?;
        Ok(Self { map: Mapping::new(fd.as_fd(), len, ProtFlags::READ)? })
    }

    /// Start of the mapping, for words that are read as atomics.
    pub(crate) fn base(&self) -> *const u8 {
        self.map.at(0, self.map.len).cast_const()
    }

    /// A leased block's bytes.
    ///
    /// # Safety
    /// The range must be leased for as long as the slice lives: then the store writes none of it.
    ///
    /// # Panics
    /// If the range is outside the arena.
    pub unsafe fn slice(&self, offset: u64, len: usize) -> &[u8] {
        // SAFETY: inside the mapping (checked by `at`), and not written while leased.
        unsafe { std::slice::from_raw_parts(self.map.at(offset, len), len) }
    }

    /// Map the pages from `offset` on into this process, `step` bytes of them at most; where to go
    /// on, or None at the end. Only saves later page faults, so a failure ends it early.
    pub fn prefault(&self, offset: usize, step: usize) -> Option<usize> {
        let len = step.min(self.map.len.checked_sub(offset)?);
        let mapped = len > 0 && self.map.advise(offset, len, Advice::LinuxPopulateRead).is_ok();
        mapped.then_some(offset + len)
    }

    /// Whether the range is inside the arena.
    pub fn contains(&self, offset: u64, len: u32) -> bool {
        offset.checked_add(u64::from(len)).is_some_and(|end| end <= self.map.len as u64)
    }
}

/// The store's side of an ingest buffer.
pub struct Ingest {
    fd: OwnedFd,
    map: Mapping,
}

impl Ingest {
    /// Reserve a buffer whose size nobody can change.
    pub fn create(len: usize) -> Result<Self> {
        let len = len + COUNT_PAGE;
        let fd = create_memfd("mooncake-ingest", len)?;
        seal(&fd, SIZE_SEALS)?;
        let map = Mapping::new(fd.as_fd(), len, ProtFlags::READ)?;
        map.reserve(&fd, 0, len, "ingest_bytes_max")?;
        Ok(Self { fd, map })
    }

    /// The fd to pass to the client.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Size.
    pub fn size(&self) -> u64 {
        (self.map.len - COUNT_PAGE) as u64
    }

    /// How many bytes, from the buffer's start, the client says it has written of its put.
    pub fn written(&self) -> u64 {
        count(&self.map).bytes()
    }

    /// The bytes of a put, if they lie inside. The client may change them at any time: read once.
    pub fn at(&self, offset: u64, len: usize) -> Option<*const u8> {
        let end = offset.checked_add(len as u64)?;
        (end <= self.size()).then(|| self.map.at(offset, len).cast_const())
    }
}

/// The client's side of its ingest buffer.
pub struct IngestView {
    map: Mapping,
}

impl IngestView {
    /// Map the buffer a store passed.
    pub fn open(fd: OwnedFd, len: u64) -> Result<Self> {
        let len = check_sealed(&fd, len + COUNT_PAGE as u64, SIZE_SEALS)?;
        let map = Mapping::new(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        map.advise(0, len, Advice::LinuxPopulateWrite)?;
        Ok(Self { map })
    }

    /// Size.
    pub fn size(&self) -> usize {
        self.map.len - COUNT_PAGE
    }

    /// Begin a put: nothing of it is written.
    pub fn begin(&self) {
        count(&self.map).begin();
    }

    /// Copy a block in, all before `offset` being written; the store may follow part by part.
    ///
    /// # Panics
    /// If it does not fit at `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= self.size() as u64, "outside the buffer");
        let mut end = offset;
        for part in bytes.chunks(PART) {
            let target = self.map.at(end, part.len());
            // SAFETY: `at` checked the range; the store only reads it, and tolerates torn bytes.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), target, part.len()) };
            end += part.len() as u64;
            count(&self.map).reached(end);
        }
    }
}

/// The count behind an ingest buffer: only its client writes it.
fn count(map: &Mapping) -> &Written {
    let at = map.at((map.len - COUNT_PAGE) as u64, size_of::<Written>());
    // SAFETY: inside a mapping that the reference does not outlive, aligned, and an atomic word to
    // both processes.
    unsafe { &*at.cast::<Written>() }
}

fn create_memfd(name: &str, len: usize) -> Result<OwnedFd> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|error| Error::io("create a memfd", error))?;
    ftruncate(&fd, len as u64).map_err(|error| Error::io("size a memfd", error))?;
    Ok(fd)
}

fn seal(fd: &OwnedFd, seals: SealFlags) -> Result<()> {
    fcntl_add_seals(fd, seals).map_err(|error| {
        Error::unavailable(format!("seal shared memory: {error}; Linux 5.1 or newer is needed"))
    })
}

fn out_of_memory(field: &'static str, len: usize, why: &str) -> Error {
    Error::config(field, format!("cannot reserve {} MiB ({why}); lower it", len >> 20))
}

fn check_sealed(fd: &OwnedFd, len: u64, seals: SealFlags) -> Result<usize> {
    let have = fcntl_get_seals(fd).map_err(|error| Error::io("read seals", error))?;
    let size = fstat(fd).map_err(|error| Error::io("stat shared memory", error))?.st_size;
    if !have.contains(seals) || size as u64 != len || len == 0 {
        return Err(Error::protocol(format!(
            "the store passed {size} bytes sealed {have:?}; expected {len} sealed {seals:?}"
        )));
    }
    usize::try_from(len).map_err(|_| Error::protocol("shared memory above the address space"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_read_what_the_store_writes_and_cannot_write() {
        let arena = Arena::create(1 << 20).expect("memory");
        let view =
            ArenaView::open(arena.fd().try_clone_to_owned().expect("fd"), 1 << 20).expect("maps");
        // SAFETY: inside the arena, and this test is its only writer.
        unsafe { arena.at(4096, 1).write(7) };
        // SAFETY: nothing writes the range while the slice lives.
        assert_eq!(unsafe { view.slice(4096, 1) }, [7]);
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        assert!(Mapping::new(arena.fd(), 1 << 20, writable).is_err());
        assert!(ftruncate(arena.fd(), 0).is_err());
        assert!(
            fallocate(arena.fd(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096)
                .is_err()
        );
    }

    #[test]
    fn a_client_refuses_memory_that_could_shrink() {
        let fd = create_memfd("test", 1 << 16).expect("memory");
        assert!(ArenaView::open(fd, 1 << 16).is_err());
        let ingest = Ingest::create(1 << 16).expect("memory");
        let fd = ingest.fd().try_clone_to_owned().expect("fd");
        assert!(IngestView::open(fd, 1 << 17).is_err());
        assert!(ingest.at(u64::MAX, 2).is_none());
        assert!(ingest.at((1 << 16) - 1, 2).is_none());
    }
}
