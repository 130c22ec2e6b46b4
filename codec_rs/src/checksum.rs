//! A 64-bit checksum that costs nothing while copying.
//!
//! Eight 64-bit lanes take 64-byte stripes as XXH3's long-input loop does (multiply the halves of
//! `data ^ key`, add the neighbour's data), with a scramble after every 16 stripes. A short last
//! stripe is padded with zeros, and the length is mixed in at the end. It detects damage; it does not
//! resist an attacker, who is outside the trust of a store. All paths give the same bits.
//!
//! [`copy_checksum`] reads each source byte once: what it checksums is what it wrote, even when another
//! process changes the source meanwhile.

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

/// The checksum of `bytes`.
pub fn checksum(bytes: &[u8]) -> u64 {
    // SAFETY: the slice is readable for its length, and nothing is written.
    unsafe { run::<false>(bytes.as_ptr(), std::ptr::null_mut(), bytes.len()) }
}

/// Copy `len` bytes and return the checksum of what was copied.
///
/// # Safety
/// `source` must be readable and `target` writable for `len` bytes, without overlap. Another process
/// may change the source meanwhile.
pub unsafe fn copy_checksum(source: *const u8, target: *mut u8, len: usize) -> u64 {
    // SAFETY: by the caller's promise.
    unsafe { run::<true>(source, target, len) }
}

unsafe fn run<const COPY: bool>(source: *const u8, target: *mut u8, len: usize) -> u64 {
    let stripes = len / STRIPE;
    let mut lanes = KEYS[ROWS];
    #[cfg(target_arch = "x86_64")]
    let done = if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature is there; ranges by the caller's promise.
        unsafe { x86::stripes_avx512::<COPY>(&mut lanes, source, target, stripes) };
        true
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: as above.
        unsafe { x86::stripes_avx2::<COPY>(&mut lanes, source, target, stripes) };
        true
    } else {
        false
    };
    #[cfg(not(target_arch = "x86_64"))]
    let done = false;
    if !done {
        // SAFETY: ranges by the caller's promise.
        unsafe { stripes_scalar::<COPY>(&mut lanes, source, target, stripes) };
    }
    let tail = len % STRIPE;
    if tail > 0 {
        let mut last = [0u8; STRIPE];
        // SAFETY: the last `tail` bytes of both ranges.
        unsafe {
            let at = stripes * STRIPE;
            std::ptr::copy_nonoverlapping(source.add(at), last.as_mut_ptr(), tail);
            if COPY {
                std::ptr::copy_nonoverlapping(last.as_ptr(), target.add(at), tail);
            }
        }
        accumulate(&mut lanes, &last, stripes);
    }
    finish(&lanes, len)
}

fn accumulate(lanes: &mut [u64; LANES], stripe: &[u8; STRIPE], index: usize) {
    let key = &KEYS[index % ROWS];
    for lane in 0..LANES {
        let mut word = [0; 8];
        word.copy_from_slice(&stripe[lane * 8..lane * 8 + 8]);
        let data = u64::from_le_bytes(word);
        let mixed = data ^ key[lane];
        lanes[lane ^ 1] = lanes[lane ^ 1].wrapping_add(data);
        lanes[lane] = lanes[lane].wrapping_add((mixed & 0xFFFF_FFFF) * (mixed >> 32));
    }
    if index % ROWS == ROWS - 1 {
        for (lane, key) in lanes.iter_mut().zip(&KEYS[ROWS]) {
            *lane = (*lane ^ (*lane >> 47) ^ key).wrapping_mul(PRIME32);
        }
    }
}

fn finish(lanes: &[u64; LANES], len: usize) -> u64 {
    let mut hash = (len as u64).wrapping_mul(PRIME64);
    for pair in 0..LANES / 2 {
        let left = lanes[2 * pair] ^ KEYS[pair][0];
        let right = lanes[2 * pair + 1] ^ KEYS[pair][1];
        let product = u128::from(left) * u128::from(right);
        hash = hash.wrapping_add(product as u64 ^ (product >> 64) as u64);
    }
    hash ^= hash >> 37;
    hash = hash.wrapping_mul(0x1656_6791_9E37_79F9);
    hash ^ (hash >> 32)
}

unsafe fn stripes_scalar<const COPY: bool>(
    lanes: &mut [u64; LANES],
    source: *const u8,
    target: *mut u8,
    stripes: usize,
) {
    for index in 0..stripes {
        let mut stripe = [0u8; STRIPE];
        // SAFETY: stripe `index` lies inside both ranges.
        unsafe {
            let at = index * STRIPE;
            std::ptr::copy_nonoverlapping(source.add(at), stripe.as_mut_ptr(), STRIPE);
            if COPY {
                std::ptr::copy_nonoverlapping(stripe.as_ptr(), target.add(at), STRIPE);
            }
        }
        accumulate(lanes, &stripe, index);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{KEYS, LANES, PRIME32, ROWS, STREAM_MIN, STRIPE};

    /// Bytes to prefetch ahead of the read.
    const AHEAD: usize = 1024;

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn stripes_avx512<const COPY: bool>(
        lanes: &mut [u64; LANES],
        source: *const u8,
        target: *mut u8,
        stripes: usize,
    ) {
        let stream =
            COPY && (target as usize).is_multiple_of(STRIPE) && stripes * STRIPE >= STREAM_MIN;
        // SAFETY: `lanes` and each key row hold 64 bytes; stripe `index` lies inside both ranges, and
        // a prefetch never faults.
        unsafe {
            let mut acc = _mm512_loadu_si512(lanes.as_ptr().cast());
            let prime = _mm512_set1_epi64(PRIME32 as i64);
            let scramble = _mm512_loadu_si512(KEYS[ROWS].as_ptr().cast());
            for index in 0..stripes {
                let from = source.add(index * STRIPE);
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                let data = _mm512_loadu_si512(from.cast());
                if COPY {
                    let to = target.add(index * STRIPE);
                    if stream {
                        _mm512_stream_si512(to.cast(), data);
                    } else {
                        _mm512_storeu_si512(to.cast(), data);
                    }
                }
                let key = _mm512_loadu_si512(KEYS[index % ROWS].as_ptr().cast());
                let mixed = _mm512_xor_si512(data, key);
                let product = _mm512_mul_epu32(mixed, _mm512_srli_epi64::<32>(mixed));
                let swapped = _mm512_shuffle_epi32::<0b01_00_11_10>(data);
                acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
                if index % ROWS == ROWS - 1 {
                    let folded = _mm512_xor_si512(acc, _mm512_srli_epi64::<47>(acc));
                    let mixed = _mm512_xor_si512(folded, scramble);
                    let low = _mm512_mul_epu32(mixed, prime);
                    let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
                    acc = _mm512_add_epi64(low, _mm512_slli_epi64::<32>(high));
                }
            }
            if stream {
                _mm_sfence();
            }
            _mm512_storeu_si512(lanes.as_mut_ptr().cast(), acc);
        }
    }

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stripes_avx2<const COPY: bool>(
        lanes: &mut [u64; LANES],
        source: *const u8,
        target: *mut u8,
        stripes: usize,
    ) {
        let stream =
            COPY && (target as usize).is_multiple_of(STRIPE) && stripes * STRIPE >= STREAM_MIN;
        // SAFETY: as in `stripes_avx512`, in two halves of 32 bytes.
        unsafe {
            let base: *mut __m256i = lanes.as_mut_ptr().cast();
            let mut acc = [_mm256_loadu_si256(base), _mm256_loadu_si256(base.add(1))];
            let prime = _mm256_set1_epi64x(PRIME32 as i64);
            for index in 0..stripes {
                let from = source.add(index * STRIPE);
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                let keys: *const __m256i = KEYS[index % ROWS].as_ptr().cast();
                for (half, acc) in acc.iter_mut().enumerate() {
                    let data = _mm256_loadu_si256(from.add(32 * half).cast());
                    if COPY {
                        let to = target.add(index * STRIPE + 32 * half);
                        if stream {
                            _mm256_stream_si256(to.cast(), data);
                        } else {
                            _mm256_storeu_si256(to.cast(), data);
                        }
                    }
                    let mixed = _mm256_xor_si256(data, _mm256_loadu_si256(keys.add(half)));
                    let product = _mm256_mul_epu32(mixed, _mm256_srli_epi64::<32>(mixed));
                    let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
                    *acc = _mm256_add_epi64(*acc, _mm256_add_epi64(product, swapped));
                }
                if index % ROWS == ROWS - 1 {
                    let keys: *const __m256i = KEYS[ROWS].as_ptr().cast();
                    for (half, acc) in acc.iter_mut().enumerate() {
                        let folded = _mm256_xor_si256(*acc, _mm256_srli_epi64::<47>(*acc));
                        let mixed = _mm256_xor_si256(folded, _mm256_loadu_si256(keys.add(half)));
                        let low = _mm256_mul_epu32(mixed, prime);
                        let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
                        *acc = _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high));
                    }
                }
            }
            if stream {
                _mm_sfence();
            }
            _mm256_storeu_si256(base, acc[0]);
            _mm256_storeu_si256(base.add(1), acc[1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scalar(bytes: &[u8]) -> u64 {
        let mut lanes = KEYS[ROWS];
        let whole = bytes.len() / STRIPE;
        for (index, stripe) in bytes.chunks(STRIPE).enumerate() {
            let mut padded = [0; STRIPE];
            padded[..stripe.len()].copy_from_slice(stripe);
            accumulate(&mut lanes, &padded, index);
        }
        assert!(whole <= bytes.len());
        finish(&lanes, bytes.len())
    }

    proptest! {
        #[test]
        fn every_path_agrees(bytes in proptest::collection::vec(any::<u8>(), 0..5000), skip in 0usize..64) {
            let bytes = &bytes[skip.min(bytes.len())..];
            let want = scalar(bytes);
            prop_assert_eq!(checksum(bytes), want);
            let mut copied = vec![0u8; bytes.len()];
            // SAFETY: both vectors hold `bytes.len()` bytes.
            let sum = unsafe { copy_checksum(bytes.as_ptr(), copied.as_mut_ptr(), bytes.len()) };
            prop_assert_eq!(sum, want);
            prop_assert_eq!(&copied[..], bytes);
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                let mut lanes = KEYS[ROWS];
                let whole = bytes.len() / STRIPE * STRIPE;
                // SAFETY: AVX2 is there, and only `bytes` is read.
                unsafe {
                    x86::stripes_avx2::<false>(
                        &mut lanes, bytes.as_ptr(), std::ptr::null_mut(), whole / STRIPE,
                    );
                }
                prop_assert_eq!(finish(&lanes, whole), scalar(&bytes[..whole]));
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
        let mut copied = vec![0u8; bytes.len()];
        // SAFETY: both vectors hold `bytes.len()` bytes.
        let sum = unsafe { copy_checksum(bytes.as_ptr(), copied.as_mut_ptr(), bytes.len()) };
        assert_eq!(sum, scalar(&bytes));
        assert_eq!(copied, bytes);
    }
}
