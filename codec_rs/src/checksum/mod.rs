//! A 64-bit checksum that costs nothing while copying.
//!
//! Eight 64-bit lanes take 64-byte stripes as XXH3's long-input loop does (multiply the halves of
//! `data ^ key`, add the neighbour's data), with a scramble after every 16 stripes. A short last
//! stripe is padded with zeros, and the length is mixed in at the end. It detects damage; it does not
//! resist an attacker, who is outside the trust of a store. All paths give the same bits.
//!
//! [`copy_checksum`] reads each source byte once: what it checksums is what it wrote, even when another
//! process changes the source meanwhile. `Sink` does the same for a block that is produced in pieces.

mod sink;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use sink::Sink;

use crate::isa::Isa;

const LANES: usize = 8;
const STRIPE: usize = 64;
/// Stripes between scrambles, and rows of the key schedule.
const ROWS: usize = 16;
/// Above this a copy bypasses the cache: the destination is not read before it is written.
const STREAM_MIN: usize = 32 << 10;

const PRIME32: u64 = 0x9E37_79B1;
const PRIME64: u64 = 0x9E37_79B1_85EB_CA87;

static KEYS: [[u64; LANES]; ROWS + 1] = key_schedule();

/// Splitmix64 (Steele et al., 2014), from a fixed seed.
const fn key_schedule() -> [[u64; LANES]; ROWS + 1] {
    let mut keys = [[0; LANES]; ROWS + 1];
    let mut state: u64 = 0x6D6F_6F6E_6361_6B65;
    let mut i = 0;
    while i < (ROWS + 1) * LANES {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        keys[i / LANES][i % LANES] = z ^ (z >> 31);
        i += 1;
    }
    keys
}

/// What a pass does with the bytes it checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Write {
    /// Nothing.
    No,
    /// Copy them.
    Cached,
    /// Copy them past the cache; the target is aligned to a stripe, and the caller fences.
    Streamed,
}

/// The checksum of `bytes`.
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut state = State::new(Isa::current());
    // SAFETY: the slice is readable for its length, and nothing is written.
    unsafe { state.absorb(bytes.as_ptr(), std::ptr::null_mut(), bytes.len(), Write::No) };
    state.finish()
}

/// Copy `len` bytes and return the checksum of what was copied.
///
/// # Safety
/// `source` must be readable and `target` writable for `len` bytes, without overlap. Another process
/// may change the source meanwhile.
pub unsafe fn copy_checksum(source: *const u8, target: *mut u8, len: usize) -> u64 {
    let mut state = State::new(Isa::current());
    let write = Write::to(target, len);
    // SAFETY: by the caller's promise.
    unsafe { state.absorb(source, target, len, write) };
    write.fence();
    state.finish()
}

/// [`copy_checksum`] into memory that is read again soon.
///
/// # Safety
/// As for `copy_checksum`.
pub(crate) unsafe fn copy_near(source: *const u8, target: *mut u8, len: usize) -> u64 {
    let mut state = State::new(Isa::current());
    // SAFETY: by the caller's promise.
    unsafe { state.absorb(source, target, len, Write::Cached) };
    state.finish()
}

impl Write {
    /// How to write a block of `len` bytes at `target`.
    fn to(target: *const u8, len: usize) -> Self {
        let aligned = (target as usize).is_multiple_of(STRIPE);
        if aligned && len >= STREAM_MIN { Self::Streamed } else { Self::Cached }
    }

    /// Order streamed stores before whatever publishes them.
    fn fence(self) {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Streamed {
            // SAFETY: every x86-64 has SSE.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    }
}

/// A checksum in progress.
#[derive(Debug, Clone)]
struct State {
    isa: Isa,
    lanes: [u64; LANES],
    stripes: usize,
    len: usize,
}

impl State {
    fn new(isa: Isa) -> Self {
        Self { isa, lanes: KEYS[ROWS], stripes: 0, len: 0 }
    }

    /// Take the next `len` bytes: whole stripes, unless they are the last.
    ///
    /// # Safety
    /// `source` is readable and, unless `write` is `No`, `target` writable for `len` bytes.
    unsafe fn absorb(&mut self, source: *const u8, target: *mut u8, len: usize, write: Write) {
        assert!(self.len == self.stripes * STRIPE, "a short stripe was not the last one");
        let count = len / STRIPE;
        // SAFETY: by the caller's promise; the features were checked by `Isa::current`.
        unsafe {
            match (self.isa, write) {
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, Write::No) => {
                    x86::avx512::<false, false>(self, source, target, count)
                }
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, Write::Cached) => {
                    x86::avx512::<true, false>(self, source, target, count);
                }
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, Write::Streamed) => {
                    x86::avx512::<true, true>(self, source, target, count);
                }
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, Write::No) => x86::avx2::<false, false>(self, source, target, count),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, Write::Cached) => x86::avx2::<true, false>(self, source, target, count),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, Write::Streamed) => {
                    x86::avx2::<true, true>(self, source, target, count)
                }
                _ => self.scalar(source, target, count, write),
            }
        }
        self.len += len;
        let (at, tail) = (count * STRIPE, len % STRIPE);
        if tail > 0 {
            // SAFETY: the last `tail` bytes of both ranges.
            unsafe { self.stripe(source.wrapping_add(at), target.wrapping_add(at), tail, write) };
        }
    }

    unsafe fn scalar(&mut self, source: *const u8, target: *mut u8, count: usize, write: Write) {
        for at in (0..count * STRIPE).step_by(STRIPE) {
            // SAFETY: each stripe lies inside the ranges the caller vouches for.
            unsafe {
                self.stripe(source.wrapping_add(at), target.wrapping_add(at), STRIPE, write);
            }
        }
    }

    /// One stripe through a local copy, so that it is read once.
    unsafe fn stripe(&mut self, source: *const u8, target: *mut u8, len: usize, write: Write) {
        let mut stripe = [0u8; STRIPE];
        // SAFETY: `len` is at most a stripe and lies inside the ranges the caller vouches for.
        unsafe {
            std::ptr::copy_nonoverlapping(source, stripe.as_mut_ptr(), len);
            if write != Write::No {
                std::ptr::copy_nonoverlapping(stripe.as_ptr(), target, len);
            }
        }
        self.mix(&stripe);
    }

    fn mix(&mut self, stripe: &[u8; STRIPE]) {
        let row = self.stripes % ROWS;
        for lane in 0..LANES {
            let mut word = [0; 8];
            word.copy_from_slice(&stripe[lane * 8..lane * 8 + 8]);
            let data = u64::from_le_bytes(word);
            let mixed = data ^ KEYS[row][lane];
            self.lanes[lane ^ 1] = self.lanes[lane ^ 1].wrapping_add(data);
            let product = (mixed & 0xFFFF_FFFF) * (mixed >> 32);
            self.lanes[lane] = self.lanes[lane].wrapping_add(product);
        }
        if row == ROWS - 1 {
            for (lane, key) in self.lanes.iter_mut().zip(&KEYS[ROWS]) {
                *lane = (*lane ^ (*lane >> 47) ^ key).wrapping_mul(PRIME32);
            }
        }
        self.stripes += 1;
    }

    fn finish(&self) -> u64 {
        let mut hash = (self.len as u64).wrapping_mul(PRIME64);
        for (pair, keys) in self.lanes.chunks_exact(2).zip(&KEYS) {
            let left = pair[0] ^ keys[0];
            let right = pair[1] ^ keys[1];
            let product = u128::from(left) * u128::from(right);
            hash = hash.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        hash ^= hash >> 37;
        hash = hash.wrapping_mul(0x1656_6791_9E37_79F9);
        hash ^ (hash >> 32)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ISAS: [Isa; 4] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512];

    fn scalar(bytes: &[u8]) -> u64 {
        let mut state = State::new(Isa::Scalar);
        // SAFETY: the slice is readable, and nothing is written.
        unsafe { state.absorb(bytes.as_ptr(), std::ptr::null_mut(), bytes.len(), Write::No) };
        state.finish()
    }

    proptest! {
        #[test]
        fn every_path_agrees(bytes in proptest::collection::vec(any::<u8>(), 0..5000),
                             skip in 0usize..64, cut in 0usize..80) {
            let bytes = &bytes[skip.min(bytes.len())..];
            let cut = (cut * STRIPE).min(bytes.len() / STRIPE * STRIPE);
            let want = scalar(bytes);
            prop_assert_eq!(checksum(bytes), want);
            for isa in ISAS.into_iter().filter(|isa| isa.available()) {
                let mut copied = vec![0u8; bytes.len()];
                let mut state = State::new(isa);
                // SAFETY: both vectors hold `bytes.len()` bytes.
                unsafe {
                    let (from, to) = (bytes.as_ptr(), copied.as_mut_ptr());
                    state.absorb(from, to, cut, Write::Cached);
                    state.absorb(from.add(cut), to.add(cut), bytes.len() - cut, Write::Cached);
                }
                prop_assert_eq!(state.finish(), want);
                prop_assert_eq!(&copied[..], bytes);
            }
        }

        #[test]
        fn one_changed_byte_changes_it(mut bytes in proptest::collection::vec(any::<u8>(), 1..3000),
                                       at in any::<prop::sample::Index>(), flip in 1u8..) {
            let before = checksum(&bytes);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert_ne!(checksum(&bytes), before);
        }
    }

    #[test]
    fn padding_is_not_content() {
        assert_ne!(checksum(&[1, 0]), checksum(&[1]));
        assert_ne!(checksum(&[]), checksum(&[0]));
    }

    #[test]
    fn large_copies_agree_with_scalar() {
        let bytes: Vec<u8> =
            (0..300_001u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for skip in [0, 1] {
            let bytes = &bytes[skip..];
            let mut copied = vec![0u8; bytes.len() + STRIPE];
            let aligned = copied.as_ptr().align_offset(STRIPE);
            let target = &mut copied[aligned..aligned + bytes.len()];
            // SAFETY: both slices hold `bytes.len()` bytes.
            let sum = unsafe { copy_checksum(bytes.as_ptr(), target.as_mut_ptr(), bytes.len()) };
            assert_eq!(sum, scalar(bytes));
            assert_eq!(target, bytes);
        }
    }
}
