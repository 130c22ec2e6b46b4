//! AVX-512 expands and compresses bytes by itself; AVX2 shuffles eight at a time by table.

use std::arch::x86_64::*;

use super::table::{MERGE, ONES, ONTO, ZEROS};
use super::{ESCAPE, Masked};

/// AVX-512 with BW, VL and VBMI2.
pub(crate) struct Avx512;

// SAFETY of every method: by the trait's contract.
impl Masked for Avx512 {
    #[inline(always)]
    unsafe fn merge64(mask: u64, zeros: *const u8, ones: *const u8, out: *mut u8) {
        // SAFETY: 64 bytes at each pointer.
        unsafe {
            let low = _mm512_maskz_expand_epi8(!mask, _mm512_loadu_si512(zeros.cast()));
            let both = _mm512_mask_expand_epi8(low, mask, _mm512_loadu_si512(ones.cast()));
            _mm512_storeu_si512(out.cast(), both);
        }
    }

    #[inline(always)]
    unsafe fn expand_onto64(mask: u64, stream: *const u8, out: *mut u8) {
        // SAFETY: as above.
        unsafe {
            let (before, next) =
                (_mm512_loadu_si512(out.cast()), _mm512_loadu_si512(stream.cast()));
            _mm512_storeu_si512(out.cast(), _mm512_mask_expand_epi8(before, mask, next));
        }
    }

    #[inline(always)]
    unsafe fn compress64(mask: u64, values: *const u8, ones: *mut u8) {
        // SAFETY: as above.
        unsafe {
            let values = _mm512_loadu_si512(values.cast());
            _mm512_storeu_si512(ones.cast(), _mm512_maskz_compress_epi8(mask, values));
        }
    }

    #[inline(always)]
    unsafe fn choose64(mask: u64, zero: u8, one: u8, out: *mut u8) {
        // SAFETY: as above.
        unsafe {
            let zero = _mm512_set1_epi8(zero as i8);
            let both = _mm512_mask_mov_epi8(zero, mask, _mm512_set1_epi8(one as i8));
            _mm512_storeu_si512(out.cast(), both);
        }
    }

    #[inline(always)]
    unsafe fn split64(mask: u64, values: *const u8, zeros: *mut u8, ones: *mut u8) {
        // SAFETY: as above.
        unsafe {
            let values = _mm512_loadu_si512(values.cast());
            _mm512_storeu_si512(zeros.cast(), _mm512_maskz_compress_epi8(!mask, values));
            _mm512_storeu_si512(ones.cast(), _mm512_maskz_compress_epi8(mask, values));
        }
    }

    #[inline(always)]
    unsafe fn at_least64(values: *const u8, pivot: u8) -> u64 {
        // SAFETY: as above.
        unsafe {
            let values = _mm512_loadu_si512(values.cast());
            _mm512_cmpge_epu8_mask(values, _mm512_set1_epi8(pivot as i8))
        }
    }

    #[inline(always)]
    unsafe fn fill(bytes: &mut [u8], list: &[u8], at: &mut usize) {
        let (chunks, rest) = bytes.as_chunks_mut::<64>();
        for chunk in chunks {
            // SAFETY: by the caller's promise. What a whole store wrote can be loaded again at once.
            unsafe {
                let codes = _mm512_loadu_si512(chunk.as_ptr().cast());
                _mm512_storeu_si512(chunk.as_mut_ptr().cast(), filled64(codes, list, at));
            }
        }
        // SAFETY: as above; masked loads and stores touch only bytes inside the rest.
        unsafe {
            let inside = _bzhi_u64(u64::MAX, rest.len() as u32);
            let codes = _mm512_maskz_loadu_epi8(inside, rest.as_ptr().cast());
            _mm512_mask_storeu_epi8(rest.as_mut_ptr().cast(), inside, filled64(codes, list, at));
        }
    }

    #[inline(always)]
    unsafe fn spill(bytes: &[u8], codes: &[u8], list: &mut Vec<u8>) {
        for (bytes, codes) in bytes.chunks(64).zip(codes.chunks(64)) {
            list.reserve(64);
            // SAFETY: masked loads stay inside the chunks; 64 bytes are reserved behind the list, of
            // which as many as there are marks become part of it.
            unsafe {
                let inside = _bzhi_u64(u64::MAX, codes.len().min(bytes.len()) as u32);
                let codes = _mm512_maskz_loadu_epi8(inside, codes.as_ptr().cast());
                let marks = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(ESCAPE as i8));
                let values = _mm512_maskz_loadu_epi8(inside, bytes.as_ptr().cast());
                let packed = _mm512_maskz_compress_epi8(marks, values);
                _mm512_storeu_si512(list.as_mut_ptr().add(list.len()).cast(), packed);
                list.set_len(list.len() + marks.count_ones() as usize);
            }
        }
    }
}

/// `codes` with the next bytes of the list in place of escapes.
#[inline(always)]
unsafe fn filled64(codes: __m512i, list: &[u8], at: &mut usize) -> __m512i {
    let list = list.get(*at..).unwrap_or(&[]);
    // SAFETY: the caller vouches for the features, and a masked load touches only bytes of the list.
    unsafe {
        let marks = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(ESCAPE as i8));
        let next = if list.len() >= 64 {
            _mm512_loadu_si512(list.as_ptr().cast())
        } else {
            _mm512_maskz_loadu_epi8(_bzhi_u64(u64::MAX, list.len() as u32), list.as_ptr().cast())
        };
        *at += marks.count_ones() as usize;
        _mm512_mask_expand_epi8(codes, marks, next)
    }
}

/// AVX2 with BMI2.
pub(crate) struct Avx2;

// SAFETY of every method: by the trait's contract.
impl Masked for Avx2 {
    #[inline(always)]
    unsafe fn merge64(mask: u64, mut zeros: *const u8, mut ones: *const u8, out: *mut u8) {
        for group in 0..8 {
            let bits = mask >> (8 * group) & 0xFF;
            // SAFETY: before group 7 at most 56 bytes of a stream were used, so 8 more are readable.
            unsafe {
                let both = _mm_unpacklo_epi64(load8(zeros), load8(ones));
                let order = load8(MERGE[bits as usize].as_ptr());
                store8(out.add(8 * group), _mm_shuffle_epi8(both, order));
                ones = ones.add(bits.count_ones() as usize);
                zeros = zeros.add(8 - bits.count_ones() as usize);
            }
        }
    }

    #[inline(always)]
    unsafe fn expand_onto64(mask: u64, mut stream: *const u8, out: *mut u8) {
        for group in 0..8 {
            let bits = mask >> (8 * group) & 0xFF;
            // SAFETY: as above.
            unsafe {
                let out = out.add(8 * group);
                let both = _mm_unpacklo_epi64(load8(out), load8(stream));
                let order = load8(ONTO[bits as usize].as_ptr());
                store8(out, _mm_shuffle_epi8(both, order));
                stream = stream.add(bits.count_ones() as usize);
            }
        }
    }

    #[inline(always)]
    unsafe fn compress64(mask: u64, values: *const u8, mut ones: *mut u8) {
        for group in 0..8 {
            let bits = mask >> (8 * group) & 0xFF;
            // SAFETY: before group 7 at most 56 bytes were written, so 8 more fit.
            unsafe {
                let values = load8(values.add(8 * group));
                store8(ones, _mm_shuffle_epi8(values, load8(ONES[bits as usize].as_ptr())));
                ones = ones.add(bits.count_ones() as usize);
            }
        }
    }

    #[inline(always)]
    unsafe fn choose64(mask: u64, zero: u8, one: u8, out: *mut u8) {
        // SAFETY: 64 bytes at `out`; the rest are registers.
        unsafe {
            let spread = _mm256_setr_epi64x(
                0,
                0x0101_0101_0101_0101,
                0x0202_0202_0202_0202,
                0x0303_0303_0303_0303,
            );
            let select = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let (zero, one) = (_mm256_set1_epi8(zero as i8), _mm256_set1_epi8(one as i8));
            for half in 0..2 {
                let bits = _mm256_set1_epi32((mask >> (32 * half)) as i32);
                let bits = _mm256_and_si256(_mm256_shuffle_epi8(bits, spread), select);
                let chosen = _mm256_blendv_epi8(zero, one, _mm256_cmpeq_epi8(bits, select));
                _mm256_storeu_si256(out.add(32 * half).cast(), chosen);
            }
        }
    }

    #[inline(always)]
    unsafe fn split64(mask: u64, values: *const u8, mut zeros: *mut u8, mut ones: *mut u8) {
        for group in 0..8 {
            let bits = mask >> (8 * group) & 0xFF;
            // SAFETY: before group 7 at most 56 bytes of a stream were written, so 8 more fit.
            unsafe {
                let values = load8(values.add(8 * group));
                store8(zeros, _mm_shuffle_epi8(values, load8(ZEROS[bits as usize].as_ptr())));
                store8(ones, _mm_shuffle_epi8(values, load8(ONES[bits as usize].as_ptr())));
                ones = ones.add(bits.count_ones() as usize);
                zeros = zeros.add(8 - bits.count_ones() as usize);
            }
        }
    }

    #[inline(always)]
    unsafe fn at_least64(values: *const u8, pivot: u8) -> u64 {
        // SAFETY: 64 bytes at `values`.
        unsafe {
            let pivot = _mm256_set1_epi8(pivot as i8);
            let mut mask = 0;
            for half in 0..2 {
                let values = _mm256_loadu_si256(values.add(32 * half).cast());
                let reached = _mm256_cmpeq_epi8(_mm256_max_epu8(values, pivot), values);
                mask |= u64::from(_mm256_movemask_epi8(reached) as u32) << (32 * half);
            }
            mask
        }
    }

    #[inline(always)]
    unsafe fn fill(bytes: &mut [u8], list: &[u8], at: &mut usize) {
        let (chunks, rest) = bytes.as_chunks_mut::<64>();
        for chunk in chunks {
            // SAFETY: by the caller's promise.
            let mut marks = unsafe { escapes64(chunk) };
            // So many are filled without a branch to mispredict; where there are fewer, a byte is
            // replaced by itself.
            for _ in 0..USUAL {
                let here = marks.trailing_zeros() as usize % 64;
                let next = list.get(*at).copied().unwrap_or(0);
                let any = marks != 0;
                chunk[here] = if any { next } else { chunk[here] };
                *at += usize::from(any);
                marks &= marks.wrapping_sub(1);
            }
            while marks != 0 {
                chunk[marks.trailing_zeros() as usize] = list.get(*at).copied().unwrap_or(0);
                *at += 1;
                marks &= marks - 1;
            }
        }
        // SAFETY: the oracle needs no feature.
        unsafe { super::Scalar::fill(rest, list, at) };
    }

    #[inline(always)]
    unsafe fn spill(bytes: &[u8], codes: &[u8], list: &mut Vec<u8>) {
        let (chunks, rest) = codes.as_chunks::<64>();
        for (codes, bytes) in chunks.iter().zip(bytes.chunks_exact(64)) {
            // SAFETY: by the caller's promise.
            let mut marks = unsafe { escapes64(codes) };
            while marks != 0 {
                list.push(bytes[marks.trailing_zeros() as usize]);
                marks &= marks - 1;
            }
        }
        // SAFETY: the oracle needs no feature.
        unsafe { super::Scalar::spill(&bytes[64 * chunks.len()..], rest, list) };
    }
}

/// Escapes among 64 codes that are filled without branching.
const USUAL: usize = 4;

/// One bit per escape.
#[inline(always)]
unsafe fn escapes64(codes: &[u8; 64]) -> u64 {
    let escape = |at: usize| {
        // SAFETY: 32 bytes are there, and by the caller's promise the feature.
        unsafe {
            let codes = _mm256_loadu_si256(codes.as_ptr().add(at).cast());
            let marks = _mm256_cmpeq_epi8(codes, _mm256_set1_epi8(ESCAPE as i8));
            u64::from(_mm256_movemask_epi8(marks) as u32)
        }
    };
    escape(0) | escape(32) << 32
}

#[inline(always)]
unsafe fn load8(at: *const u8) -> __m128i {
    // SAFETY: the caller has 8 bytes at `at`.
    unsafe { _mm_loadl_epi64(at.cast()) }
}

#[inline(always)]
unsafe fn store8(at: *mut u8, value: __m128i) {
    // SAFETY: the caller has 8 bytes at `at`.
    unsafe { _mm_storel_epi64(at.cast(), value) }
}
