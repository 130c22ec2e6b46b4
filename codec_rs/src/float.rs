//! Floats taken apart: exponent, sign, mantissa.
//!
//! A codec codes the exponents (dense: the signs too) and stores the rest of each element as it is:
//! whole bytes as byte planes of the strip, the bits above them as a field.

use crate::fields::{STRIP, lanes, pack, unpack};

/// A float format, as its bits.
pub(crate) trait Float: Copy {
    /// Its bits.
    type Bits: Copy + Default + Ord;
    /// Its little-endian bytes.
    type Raw: Copy;
    /// Bytes of an element.
    const SIZE: usize;
    /// Bits of the mantissa.
    const MANTISSA: u32;

    /// The elements of raw bytes.
    fn elements(raw: &[u8]) -> &[Self::Raw];
    /// Inverse of `elements`.
    fn raw_bytes(elements: &[Self::Raw]) -> &[u8];
    /// The bits of an element.
    fn bits(raw: Self::Raw) -> Self::Bits;
    /// The element with these bits.
    fn raw(bits: Self::Bits) -> Self::Raw;
    /// Everything but the sign; orders as magnitudes do.
    fn magnitude(value: Self::Bits) -> Self::Bits;
    /// Exponent field, right-aligned.
    fn exponent(value: Self::Bits) -> u8;
    /// 1 when negative.
    fn sign(value: Self::Bits) -> u8;
    /// The mantissa and, above it, with `SIGNED`, the sign.
    fn rest<const SIGNED: bool>(value: Self::Bits) -> u32;
    /// Inverse of `exponent`, `sign` (without `SIGNED`) and `rest`.
    fn join<const SIGNED: bool>(exponent: u8, sign: u8, rest: u32) -> Self::Bits;
    #[cfg(feature = "zstd")]
    /// Byte `index` of the value rotated left by one bit.
    fn turned_byte(value: Self::Bits, index: usize) -> u8;
    #[cfg(feature = "zstd")]
    /// The value whose rotated bytes are given by index.
    fn from_turned(byte: impl Fn(usize) -> u8) -> Self::Bits;
}

macro_rules! float {
    ($(#[$doc:meta])* $name:ident, $bits:ty, $mantissa:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $name;

        impl $name {
            const TOP: u32 = <$bits>::BITS - 1;
        }

        impl Float for $name {
            type Bits = $bits;
            type Raw = [u8; size_of::<$bits>()];
            const SIZE: usize = size_of::<$bits>();
            const MANTISSA: u32 = $mantissa;

            #[inline(always)]
            fn elements(raw: &[u8]) -> &[Self::Raw] {
                raw.as_chunks().0
            }
            #[inline(always)]
            fn raw_bytes(elements: &[Self::Raw]) -> &[u8] {
                elements.as_flattened()
            }
            #[inline(always)]
            fn bits(raw: Self::Raw) -> $bits {
                <$bits>::from_le_bytes(raw)
            }
            #[inline(always)]
            fn raw(bits: $bits) -> Self::Raw {
                bits.to_le_bytes()
            }
            #[inline(always)]
            fn magnitude(value: $bits) -> $bits {
                value & !(1 << Self::TOP)
            }
            #[inline(always)]
            fn exponent(value: $bits) -> u8 {
                (Self::magnitude(value) >> $mantissa) as u8
            }
            #[inline(always)]
            fn sign(value: $bits) -> u8 {
                (value >> Self::TOP) as u8
            }
            #[inline(always)]
            fn rest<const SIGNED: bool>(value: $bits) -> u32 {
                let mantissa = value & ((1 << $mantissa) - 1);
                let sign = if SIGNED { value >> Self::TOP << $mantissa } else { 0 };
                u32::from(mantissa | sign)
            }
            #[inline(always)]
            fn join<const SIGNED: bool>(exponent: u8, sign: u8, rest: u32) -> $bits {
                let rest = rest as $bits;
                let sign = if SIGNED { rest >> $mantissa } else { <$bits>::from(sign) };
                let mantissa = rest & ((1 << $mantissa) - 1);
                mantissa | <$bits>::from(exponent) << $mantissa | sign << Self::TOP
            }
            #[cfg(feature = "zstd")]
            #[inline(always)]
            fn turned_byte(value: $bits, index: usize) -> u8 {
                value.rotate_left(1).to_le_bytes()[index]
            }
            #[cfg(feature = "zstd")]
            #[inline(always)]
            fn from_turned(byte: impl Fn(usize) -> u8) -> $bits {
                <$bits>::from_le_bytes(std::array::from_fn(byte)).rotate_right(1)
            }
        }
    };
}

float!(/// bfloat16.
    Bf16, u16, 7);
float!(/// IEEE half.
    F16, u16, 10);
float!(/// IEEE single.
    F32, u32, 23);
float!(/// 8-bit float, 4 exponent bits.
    F8E4M3, u8, 3);
float!(/// 8-bit float, 5 exponent bits.
    F8E5M2, u8, 2);

/// Evaluate an expression with `$F` being the float type of a dtype; None for opaque bytes.
macro_rules! for_float {
    ($dtype:expr, $F:ident => $value:expr) => {{
        use $crate::float as types;
        use $crate::shape::Dtype;
        match $dtype {
            Dtype::Opaque => None,
            Dtype::Bf16 => Some({
                type $F = types::Bf16;
                $value
            }),
            Dtype::F16 => Some({
                type $F = types::F16;
                $value
            }),
            Dtype::F32 => Some({
                type $F = types::F32;
                $value
            }),
            Dtype::F8E4M3 => Some({
                type $F = types::F8E4M3;
                $value
            }),
            Dtype::F8E5M2 => Some({
                type $F = types::F8E5M2;
                $value
            }),
        }
    }};
}

pub(crate) use for_float;

/// Bits of the stored rest of an element.
#[inline(always)]
pub(crate) const fn rest_bits<F: Float>(signed: bool) -> u32 {
    F::MANTISSA + signed as u32
}

/// Bytes of the stored rest of a strip with rows of `lanes`.
#[inline(always)]
pub(crate) const fn rest_len<F: Float>(signed: bool, lanes: usize) -> usize {
    rest_bits::<F>(signed) as usize * lanes
}

/// Store the rests of a strip's `8 × lanes` elements.
#[inline(always)]
pub(crate) fn split_rest<F: Float, const SIGNED: bool>(
    elements: &[F::Raw],
    lanes: usize,
    out: &mut [u8],
) {
    let (count, bits) = (8 * lanes, rest_bits::<F>(SIGNED));
    let byte = |raw: &F::Raw, at: u32| (F::rest::<SIGNED>(F::bits(*raw)) >> (8 * at)) as u8;
    let (whole, field) = out.split_at_mut(bits as usize / 8 * count);
    for (plane, bytes) in whole.chunks_exact_mut(count).enumerate() {
        for (out, raw) in bytes.iter_mut().zip(elements) {
            *out = byte(raw, plane as u32);
        }
    }
    if !bits.is_multiple_of(8) {
        let mut high = [0u8; STRIP];
        for (out, raw) in high[..count].iter_mut().zip(elements) {
            *out = byte(raw, bits / 8);
        }
        pack(&high, lanes, bits % 8, field);
    }
}

/// Rebuild a strip of elements from exponents, signs (unless `SIGNED`) and stored rests.
#[inline(always)]
pub(crate) fn join_rest<F: Float, const SIGNED: bool>(
    exponents: &[u8],
    signs: &[u8],
    rest: &[u8],
    lanes: usize,
    elements: &mut [F::Raw],
) {
    let (count, bits) = (8 * lanes, rest_bits::<F>(SIGNED));
    let planes = bits as usize / 8;
    let mut high = [0u8; STRIP];
    if !bits.is_multiple_of(8) {
        unpack(&rest[planes * count..], lanes, bits % 8, &mut high);
    }
    let plane = |at: usize| if at < planes { &rest[at * count..][..count] } else { &high[..count] };
    let (low, middle, top, high) = (plane(0), plane(1), plane(2), &high[..count]);
    let (exponents, signs) = (&exponents[..count], &signs[..count]);
    for (i, raw) in elements[..count].iter_mut().enumerate() {
        let mut rest = 0;
        for (at, bytes) in [low, middle, top].into_iter().enumerate().take(planes) {
            rest |= u32::from(bytes[i]) << (8 * at);
        }
        if !bits.is_multiple_of(8) {
            rest |= u32::from(high[i]) << (8 * planes);
        }
        *raw = F::raw(F::join::<SIGNED>(exponents[i], signs[i], rest));
    }
}

/// A plane's elements in strips: `(first element, elements, lanes)`.
#[inline(always)]
pub(crate) fn strips(elements: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..elements).step_by(STRIP).map(move |first| {
        let count = STRIP.min(elements - first);
        (first, count, lanes(count))
    })
}

/// A strip's elements on their way to the caller, aligned for whole vectors.
#[repr(align(64))]
pub(crate) struct Tile<F: Float>(pub(crate) [F::Raw; STRIP]);

impl<F: Float> Tile<F> {
    /// Zeros.
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self([F::raw(F::Bits::default()); STRIP])
    }
}
