//! Whole stripes with AVX-512 and AVX2.

use std::arch::x86_64::*;

use super::{KEYS, PRIME32, ROWS, STRIPE, State};
use crate::isa::AHEAD;

/// # Safety
/// As `State::absorb`, for `count` whole stripes; `STREAM` needs a target aligned to a stripe.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn avx512<const COPY: bool, const STREAM: bool>(
    state: &mut State,
    source: *const u8,
    target: *mut u8,
    count: usize,
) {
    // SAFETY: `lanes` and each key row hold 64 bytes; each stripe lies inside the caller's ranges,
    // and a prefetch never faults.
    unsafe {
        let mut acc = _mm512_loadu_si512(state.lanes.as_ptr().cast());
        let prime = _mm512_set1_epi64(PRIME32 as i64);
        let scramble = _mm512_loadu_si512(KEYS[ROWS].as_ptr().cast());
        for index in 0..count {
            let row = (state.stripes + index) % ROWS;
            let from = source.add(index * STRIPE);
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
            let data = _mm512_loadu_si512(from.cast());
            if STREAM {
                _mm512_stream_si512(target.add(index * STRIPE).cast(), data);
            } else if COPY {
                _mm512_storeu_si512(target.add(index * STRIPE).cast(), data);
            }
            let key = _mm512_loadu_si512(KEYS[row].as_ptr().cast());
            let mixed = _mm512_xor_si512(data, key);
            let product = _mm512_mul_epu32(mixed, _mm512_srli_epi64::<32>(mixed));
            let swapped = _mm512_shuffle_epi32::<0b01_00_11_10>(data);
            acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
            if row == ROWS - 1 {
                let folded = _mm512_xor_si512(acc, _mm512_srli_epi64::<47>(acc));
                let mixed = _mm512_xor_si512(folded, scramble);
                let low = _mm512_mul_epu32(mixed, prime);
                let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
                acc = _mm512_add_epi64(low, _mm512_slli_epi64::<32>(high));
            }
        }
        _mm512_storeu_si512(state.lanes.as_mut_ptr().cast(), acc);
    }
    state.stripes += count;
}

/// # Safety
/// As `avx512`.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn avx2<const COPY: bool, const STREAM: bool>(
    state: &mut State,
    source: *const u8,
    target: *mut u8,
    count: usize,
) {
    // SAFETY: as in `avx512`, in two halves of 32 bytes.
    unsafe {
        let base: *mut __m256i = state.lanes.as_mut_ptr().cast();
        let mut acc = [_mm256_loadu_si256(base), _mm256_loadu_si256(base.add(1))];
        let prime = _mm256_set1_epi64x(PRIME32 as i64);
        for index in 0..count {
            let row = (state.stripes + index) % ROWS;
            let from = source.add(index * STRIPE);
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
            let keys: *const __m256i = KEYS[row].as_ptr().cast();
            for (half, acc) in acc.iter_mut().enumerate() {
                let data = _mm256_loadu_si256(from.add(32 * half).cast());
                if STREAM {
                    _mm256_stream_si256(target.add(index * STRIPE + 32 * half).cast(), data);
                } else if COPY {
                    _mm256_storeu_si256(target.add(index * STRIPE + 32 * half).cast(), data);
                }
                let mixed = _mm256_xor_si256(data, _mm256_loadu_si256(keys.add(half)));
                let product = _mm256_mul_epu32(mixed, _mm256_srli_epi64::<32>(mixed));
                let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
                *acc = _mm256_add_epi64(*acc, _mm256_add_epi64(product, swapped));
            }
            if row == ROWS - 1 {
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
        _mm256_storeu_si256(base, acc[0]);
        _mm256_storeu_si256(base.add(1), acc[1]);
    }
    state.stripes += count;
}
