//! Bytes under masks: the operations vector instruction sets differ in.
//!
//! `merge` interleaves two streams by a bit per byte, `split` is its inverse; `expand_onto` puts the
//! next bytes of a stream where bits are set, `compress` is its inverse; `fill` replaces marked bytes
//! by the next ones of a list, `spill` collects them. One implementation per instruction set; the
//! defaults here are the scalar oracle. Working memory is padded by [`SLACK`], so that a vector may
//! read and write past the end of a stream.

#[cfg(target_arch = "aarch64")]
mod neon;
mod table;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// Bytes that must be readable (and, for outputs, writable) after the last one of a stream.
pub(crate) const SLACK: usize = 128;

/// The byte that marks an escape; no byte given to `fill` or `spill` exceeds it.
pub(crate) const ESCAPE: u8 = 7;

/// Where one side of a merge comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Side<'a> {
    /// The same byte for ever.
    Same(u8),
    /// The next byte of a stream padded by `SLACK`.
    Stream(&'a [u8]),
}

/// The operations, `#[inline(always)]` into a function that has the instruction set's features.
///
/// # Safety
/// Every method: the features are there, and pointers are valid for the 64 bytes (8 for `*8`) at
/// them.
pub(crate) trait Masked {
    /// Byte `i` is the next one of `ones` where bit `i` is set, else the next one of `zeros`.
    #[inline(always)]
    unsafe fn merge64(mask: u64, mut zeros: *const u8, mut ones: *const u8, out: *mut u8) {
        for bit in 0..64 {
            let set = mask >> bit & 1;
            // SAFETY: at most 64 bytes of each stream, by the trait's contract.
            unsafe {
                *out.add(bit) = if set == 1 { *ones } else { *zeros };
                ones = ones.add(set as usize);
                zeros = zeros.add(1 - set as usize);
            }
        }
    }

    /// Byte `i` becomes the next one of `stream` where bit `i` is set, and stays what it is elsewhere.
    #[inline(always)]
    unsafe fn expand_onto64(mut mask: u64, mut stream: *const u8, out: *mut u8) {
        while mask != 0 {
            // SAFETY: at most 64 bytes of each, by the trait's contract.
            unsafe {
                *out.add(mask.trailing_zeros() as usize) = *stream;
                stream = stream.add(1);
            }
            mask &= mask - 1;
        }
    }

    /// Bytes whose bit is set go to `ones`, in order; it may be overwritten up to 64 bytes.
    #[inline(always)]
    unsafe fn compress64(mut mask: u64, values: *const u8, mut ones: *mut u8) {
        while mask != 0 {
            // SAFETY: as above.
            unsafe {
                *ones = *values.add(mask.trailing_zeros() as usize);
                ones = ones.add(1);
            }
            mask &= mask - 1;
        }
    }

    /// Byte `i` is `one` where bit `i` is set, else `zero`.
    #[inline(always)]
    unsafe fn choose64(mask: u64, zero: u8, one: u8, out: *mut u8) {
        for bit in 0..64 {
            // SAFETY: by the trait's contract.
            unsafe { *out.add(bit) = if mask >> bit & 1 == 1 { one } else { zero } };
        }
    }

    /// Bytes whose bit is set go to `ones`, the others to `zeros`, in order; both may be overwritten
    /// up to 64 bytes.
    #[inline(always)]
    unsafe fn split64(mask: u64, values: *const u8, mut zeros: *mut u8, mut ones: *mut u8) {
        for bit in 0..64 {
            let set = mask >> bit & 1;
            // SAFETY: at most 64 bytes of each stream, by the trait's contract.
            unsafe {
                let value = *values.add(bit);
                *zeros = value;
                *ones = value;
                ones = ones.add(set as usize);
                zeros = zeros.add(1 - set as usize);
            }
        }
    }

    /// Bit `i` is set where byte `i` is at least `pivot`.
    #[inline(always)]
    unsafe fn at_least64(values: *const u8, pivot: u8) -> u64 {
        // SAFETY: by the trait's contract.
        (0..64).fold(0, |mask, i| mask | u64::from(unsafe { *values.add(i) } >= pivot) << i)
    }

    /// Replace each `ESCAPE` in `bytes` (whole groups of eight) by the next one of `list` from `at` on, which it advances;
    /// a list that ends early gives unspecified bytes.
    #[inline(always)]
    unsafe fn fill(bytes: &mut [u8], list: &[u8], at: &mut usize) {
        for bytes in bytes.as_chunks_mut::<8>().0 {
            let mut marks = marks(bytes);
            while marks != 0 {
                bytes[marks.trailing_zeros() as usize / 8] = list.get(*at).copied().unwrap_or(0);
                *at += 1;
                marks &= marks - 1;
            }
        }
    }

    /// Append to `list` those of `bytes` whose twin in `codes` is `ESCAPE`.
    #[inline(always)]
    unsafe fn spill(bytes: &[u8], codes: &[u8], list: &mut Vec<u8>) {
        for (bytes, codes) in bytes.as_chunks::<8>().0.iter().zip(codes.as_chunks().0) {
            let mut marks = marks(codes);
            while marks != 0 {
                list.push(bytes[marks.trailing_zeros() as usize / 8]);
                marks &= marks - 1;
            }
        }
    }
}

/// The oracle.
pub(crate) struct Scalar;

impl Masked for Scalar {}

/// One bit per escape, at eight times its position.
#[inline(always)]
fn marks(codes: &[u8; 8]) -> u64 {
    (u64::from_le_bytes(*codes) + 0x0101_0101_0101_0101) >> 3 & 0x0101_0101_0101_0101
}

/// Interleave `left` (clear bits) and `right` (set bits) into the first `len` bytes of `out`, by words
/// of 64 bits, `rights` of the first `len` being set. All buffers are padded by `SLACK`.
///
/// # Safety
/// The features of `K` are there, and no more bits are set, nor clear, than `rights` and `len` say.
///
/// # Panics
/// When a stream is too short.
#[inline(always)]
pub(crate) unsafe fn merge<K: Masked>(
    masks: impl Iterator<Item = u64>,
    (len, rights): (usize, usize),
    left: Side<'_>,
    right: Side<'_>,
    out: &mut [u8],
) {
    let start = |side, len| match side {
        Side::Same(_) => std::ptr::null(),
        Side::Stream(stream) => stream[..len + SLACK].as_ptr(),
    };
    let (mut zeros, mut ones) = (start(left, len - rights), start(right, rights));
    let words = masks.zip(&mut out.as_chunks_mut::<64>().0[..len.div_ceil(64)]);
    // SAFETY: the bits before a word take no more from a stream than all do, and 64 bytes behind those
    // are in the stream; the caller vouches for the features.
    unsafe {
        match (left, right) {
            (Side::Same(zero), Side::Same(one)) => {
                words.for_each(|(mask, out)| K::choose64(mask, zero, one, out.as_mut_ptr()));
            }
            (Side::Same(rest), Side::Stream(_)) => words.for_each(|(mask, out)| {
                *out = [rest; 64];
                K::expand_onto64(mask, ones, out.as_mut_ptr());
                ones = ones.add(mask.count_ones() as usize);
            }),
            (Side::Stream(_), Side::Same(rest)) => words.for_each(|(mask, out)| {
                *out = [rest; 64];
                K::expand_onto64(!mask, zeros, out.as_mut_ptr());
                zeros = zeros.add(mask.count_zeros() as usize);
            }),
            (Side::Stream(_), Side::Stream(_)) => words.for_each(|(mask, out)| {
                K::merge64(mask, zeros, ones, out.as_mut_ptr());
                ones = ones.add(mask.count_ones() as usize);
                zeros = zeros.add(mask.count_zeros() as usize);
            }),
        }
    }
}

/// Part the first `len` bytes of `values` into `left` (clear bits) and `right` (set bits), by the
/// masks `mask` gives for 64 of them, which are cut at `len`. All buffers are padded by `SLACK`.
/// Returns the length of the right side.
///
/// # Safety
/// The features of `K` are there.
#[inline(always)]
pub(crate) unsafe fn split<K: Masked>(
    values: &[u8],
    len: usize,
    mut mask: impl FnMut(&[u8]) -> u64,
    left: &mut [u8],
    right: &mut [u8],
) -> usize {
    let (mut zeros, mut ones) = (0, 0);
    let words = values[..len.next_multiple_of(64)].chunks_exact(64);
    for (values, at) in words.zip((0..len).step_by(64)) {
        let valid = if len - at < 64 { (1 << (len - at)) - 1 } else { u64::MAX };
        let mask = mask(values) & valid;
        let (low, high) = (&mut left[zeros..zeros + 64], &mut right[ones..ones + 64]);
        // SAFETY: every pointer is to 64 bytes of a slice; the caller vouches for the features.
        unsafe { K::split64(mask, values.as_ptr(), low.as_mut_ptr(), high.as_mut_ptr()) };
        ones += mask.count_ones() as usize;
        zeros += mask.count_zeros() as usize;
    }
    ones
}
