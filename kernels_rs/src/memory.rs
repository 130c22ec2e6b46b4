//! Large memory: zeroed, aligned to 2 MiB, on huge pages where the system grants them.
//!
//! Owns: anonymous mappings. Handed out as raw addresses: kernel threads write disjoint parts of
//! one buffer, which no Rust reference could say.
//! Fails: with [`Error::Memory`] when the system refuses the address space or, in `populate`, the
//! pages.

use std::ptr::NonNull;

use crate::{Error, Result};

const HUGE_PAGE: usize = 2 << 20;

/// A zeroed buffer that does not move.
pub struct Buffer {
    base: NonNull<u8>,
    bytes: usize,
    mapping: *mut libc::c_void,
    mapped: usize,
}

// SAFETY: the mapping belongs to the buffer alone, and has no thread of its own.
unsafe impl Send for Buffer {}
// SAFETY: a shared buffer only gives its address; whoever writes through it orders the writes.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `bytes` zeroed bytes; the pages come at first touch.
    pub fn new(bytes: usize) -> Result<Self> {
        let refused = || Error::Memory(bytes, std::io::Error::last_os_error().to_string());
        let rounded = bytes.max(1).checked_next_multiple_of(HUGE_PAGE);
        let mapped = rounded.and_then(|r| r.checked_add(HUGE_PAGE)).ok_or_else(refused)?;
        // SAFETY: a new private anonymous mapping touches no memory that exists.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(refused());
        }
        let skip = mapping.cast::<u8>().align_offset(HUGE_PAGE);
        let base = mapping.cast::<u8>().wrapping_add(skip);
        // SAFETY: the range lies inside the mapping. A refusal costs speed, so it is not an error.
        unsafe { libc::madvise(base.cast(), mapped - HUGE_PAGE, libc::MADV_HUGEPAGE) };
        let base = NonNull::new(base).ok_or_else(refused)?;
        Ok(Self { base, bytes, mapping, mapped })
    }

    /// Makes every page present, so that shortage is an error here and not a signal later.
    pub fn populate(&self) -> Result<()> {
        let base = self.base.as_ptr();
        // SAFETY: the range lies inside the mapping.
        let answer = unsafe { libc::madvise(base.cast(), self.bytes, libc::MADV_POPULATE_WRITE) };
        if answer == 0 || self.bytes == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(Error::Memory(self.bytes, error.to_string()));
        }
        // Linux before 5.14 lacks the advice: touch a byte of each page.
        for offset in (0..self.bytes).step_by(4096) {
            // SAFETY: the byte lies inside the mapping, which nobody else uses yet.
            unsafe { base.add(offset).write_volatile(0) };
        }
        Ok(())
    }

    /// Its address as an array of `T`.
    pub fn address<T>(&self) -> *mut T {
        self.base.as_ptr().cast()
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping came from mmap with this size, and no address outlives the buffer.
        unsafe { libc::munmap(self.mapping, self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_aligned_and_bounded() {
        let buffer = Buffer::new(5 << 20).expect("memory");
        buffer.populate().expect("pages");
        assert_eq!(buffer.address::<u8>().align_offset(HUGE_PAGE), 0);
        // SAFETY: the whole buffer, which nothing else uses.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.address::<u8>(), buffer.bytes()) };
        assert!(bytes.iter().all(|b| *b == 0));
        assert!(matches!(Buffer::new(usize::MAX), Err(Error::Memory(..))));
    }
}
