//! NEON shuffles eight bytes at a time by table.

use std::arch::aarch64::*;

use super::Masked;
use super::table::{MERGE, ONES, ONTO, ZEROS};

/// Baseline vectors of aarch64.
pub(crate) struct Neon;

// SAFETY of every method: by the trait's contract.
impl Masked for Neon {
    #[inline(always)]
    unsafe fn merge64(mask: u64, mut zeros: *const u8, mut ones: *const u8, out: *mut u8) {
        for group in 0..8 {
            let bits = mask >> (8 * group) & 0xFF;
            // SAFETY: before group 7 at most 56 bytes of a stream were used, so 8 more are readable.
            unsafe {
                let both = vcombine_u8(vld1_u8(zeros), vld1_u8(ones));
                let order = vld1_u8(MERGE[bits as usize].as_ptr());
                vst1_u8(out.add(8 * group), vqtbl1_u8(both, order));
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
                let both = vcombine_u8(vld1_u8(out), vld1_u8(stream));
                let order = vld1_u8(ONTO[bits as usize].as_ptr());
                vst1_u8(out, vqtbl1_u8(both, order));
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
                let values = vld1_u8(values.add(8 * group));
                vst1_u8(ones, vtbl1_u8(values, vld1_u8(ONES[bits as usize].as_ptr())));
                ones = ones.add(bits.count_ones() as usize);
            }
        }
    }

    #[inline(always)]
    unsafe fn choose64(mask: u64, zero: u8, one: u8, out: *mut u8) {
        // SAFETY: 64 bytes at `out`; the rest are registers.
        unsafe {
            let select = vcreate_u8(0x8040_2010_0804_0201);
            let (zero, one) = (vdup_n_u8(zero), vdup_n_u8(one));
            for group in 0..8 {
                let bits = vdup_n_u8((mask >> (8 * group)) as u8);
                vst1_u8(out.add(8 * group), vbsl_u8(vtst_u8(bits, select), one, zero));
            }
        }
    }

    #[inline(always)]
    unsafe fn split64(mask: u64, values: *const u8, mut zeros: *mut u8, mut ones: *mut u8) {
        for group in 0..8 {
            let bits = mask >> (8 * group) & 0xFF;
            // SAFETY: before group 7 at most 56 bytes of a stream were written, so 8 more fit.
            unsafe {
                let values = vld1_u8(values.add(8 * group));
                vst1_u8(zeros, vtbl1_u8(values, vld1_u8(ZEROS[bits as usize].as_ptr())));
                vst1_u8(ones, vtbl1_u8(values, vld1_u8(ONES[bits as usize].as_ptr())));
                ones = ones.add(bits.count_ones() as usize);
                zeros = zeros.add(8 - bits.count_ones() as usize);
            }
        }
    }

    #[inline(always)]
    unsafe fn at_least64(values: *const u8, pivot: u8) -> u64 {
        // SAFETY: 64 bytes at `values`.
        unsafe {
            let weights = vcreate_u8(0x8040_2010_0804_0201);
            (0..8).fold(0, |mask, group| {
                let reached = vcge_u8(vld1_u8(values.add(8 * group)), vdup_n_u8(pivot));
                mask | u64::from(vaddv_u8(vand_u8(reached, weights))) << (8 * group)
            })
        }
    }
}
