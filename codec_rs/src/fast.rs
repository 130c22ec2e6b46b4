//! The fast codec: three bits per exponent, decoded at memory speed.
//!
//! Each channel has a base, its largest exponent in the plane. An exponent is coded as its distance
//! below the base if that is under 7; 7 is an escape, whose distance follows in a list. A coded plane
//! is the bases, the strips (stored rests, then codes), and the escapes in element order:
//!
//! ```text
//! channels × u8 │ per strip: rest bits × lanes, 3 × lanes │ escapes
//! ```
//!
//! Every length but the last follows from the shape, and the last from the plane's own, so nothing in
//! a damaged plane can lead out of it.

use crate::checksum::Sink;
use crate::error::CodecError;
use crate::fields::{STRIP, lanes, pack, unpack};
use crate::float::{Float, Tile, join_rest, rest_len, split_rest, strips};
use crate::isa::{AHEAD, per_isa, prefetch};
use crate::masked::{ESCAPE, Masked};

const CODE_BITS: u32 = 3;

/// Buffers reused from plane to plane.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    bases: Vec<u8>,
    escapes: Vec<u8>,
}

per_isa! {
    /// Append the coded form of `raw`, tokens of `channels` elements each, to `out`.
    pub(crate) fn encode<F: Float>(
        raw: &[u8], channels: usize, scratch: &mut Scratch, out: &mut Vec<u8>,
    ) = encode_on
}

per_isa! {
    /// Decode a plane into `out`, which tells its size; returns the checksum of what was decoded.
    pub(crate) fn decode<F: Float>(
        coded: &[u8], channels: usize, scratch: &mut Scratch, out: &mut [u8],
    ) -> Result<u64, CodecError> = decode_on
}

/// Bytes of a strip.
#[inline(always)]
fn strip_len<F: Float>(lanes: usize) -> usize {
    rest_len::<F>(true, lanes) + CODE_BITS as usize * lanes
}

#[inline(always)]
unsafe fn encode_on<F: Float, K: Masked>(
    raw: &[u8],
    channels: usize,
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) {
    find_bases::<F>(raw, channels, &mut scratch.bases);
    scratch.escapes.clear();
    out.extend_from_slice(&scratch.bases[..channels]);
    let elements = F::elements(raw);
    for (first, count, lanes) in strips(elements.len()) {
        let strip = &elements[first..first + count];
        let bases = &scratch.bases[first % channels..];
        let start = out.len();
        out.resize(start + strip_len::<F>(lanes), 0);
        let target = &mut out[start..];
        if count == STRIP {
            // SAFETY: by the caller's promise.
            unsafe { encode_strip::<F, K>(strip, bases, 64, target, &mut scratch.escapes) };
        } else {
            let mut padded = Tile::<F>::new();
            padded.0[..count].copy_from_slice(strip);
            // SAFETY: as above.
            unsafe { encode_strip::<F, K>(&padded.0, bases, lanes, target, &mut scratch.escapes) };
        }
    }
    out.extend_from_slice(&scratch.escapes);
}

#[inline(always)]
unsafe fn encode_strip<F: Float, K: Masked>(
    elements: &[F::Raw],
    bases: &[u8],
    lanes: usize,
    out: &mut [u8],
    escapes: &mut Vec<u8>,
) {
    let count = 8 * lanes;
    let (rest, coded) = out.split_at_mut(rest_len::<F>(true, lanes));
    let elements = &elements[..count];
    split_rest::<F, true>(elements, lanes, rest);
    let (mut distances, mut codes) = ([0u8; STRIP], [0u8; STRIP]);
    for ((distance, base), raw) in distances.iter_mut().zip(bases).zip(elements) {
        *distance = base.wrapping_sub(F::exponent(F::bits(*raw)));
    }
    for (code, distance) in codes[..count].iter_mut().zip(&distances) {
        *code = (*distance).min(ESCAPE);
    }
    pack(&codes, lanes, CODE_BITS, coded);
    // SAFETY: by the caller's promise.
    unsafe { K::spill(&distances[..count], &codes[..count], escapes) };
}

/// The largest exponent of each channel, repeated until a strip can start at any channel.
#[inline(always)]
fn find_bases<F: Float>(raw: &[u8], channels: usize, bases: &mut Vec<u8>) {
    let mut largest = vec![F::Bits::default(); channels];
    for token in F::elements(raw).chunks_exact(channels) {
        for (largest, raw) in largest.iter_mut().zip(token) {
            *largest = (*largest).max(F::magnitude(F::bits(*raw)));
        }
    }
    bases.clear();
    bases.extend(largest.iter().map(|&bits| F::exponent(bits)));
    repeat(bases, channels);
}

/// Repeat the first `channels` values so that any strip's values lie in one piece.
fn repeat(bases: &mut Vec<u8>, channels: usize) {
    let whole = channels + STRIP;
    while bases.len() < whole {
        bases.extend_from_within(..channels.min(whole - bases.len()));
    }
}

#[inline(always)]
unsafe fn decode_on<F: Float, K: Masked>(
    coded: &[u8],
    channels: usize,
    scratch: &mut Scratch,
    out: &mut [u8],
) -> Result<u64, CodecError> {
    let elements = out.len() / F::SIZE;
    // The rows of all strips together are those of one so long.
    let fixed = channels + strip_len::<F>(lanes(elements));
    if coded.len() < fixed {
        return Err(CodecError::Damaged("fast plane too short"));
    }
    let (bases, coded) = coded.split_at(channels);
    let (mut coded, escapes) = coded.split_at(fixed - channels);
    scratch.bases.clear();
    scratch.bases.extend_from_slice(bases);
    repeat(&mut scratch.bases, channels);
    let mut sink = Sink::new(out);
    let mut used = 0;
    let mut tile = Tile::<F>::new();
    for (first, count, lanes) in strips(elements) {
        let (strip, later) = coded.split_at(strip_len::<F>(lanes));
        coded = later;
        prefetch(coded, AHEAD, strip.len());
        let bases = &scratch.bases[first % channels..];
        // SAFETY: by the caller's promise. Whole strips get their own, constant copy.
        unsafe {
            if count == STRIP {
                decode_strip::<F, K>(strip, bases, 64, escapes, &mut used, &mut tile.0);
            } else {
                decode_strip::<F, K>(strip, bases, lanes, escapes, &mut used, &mut tile.0);
            }
        }
        sink.push(&F::raw_bytes(&tile.0)[..count * F::SIZE]);
    }
    if used != escapes.len() {
        return Err(CodecError::Damaged("fast plane with a wrong number of escapes"));
    }
    Ok(sink.finish())
}

#[inline(always)]
unsafe fn decode_strip<F: Float, K: Masked>(
    strip: &[u8],
    bases: &[u8],
    lanes: usize,
    escapes: &[u8],
    used: &mut usize,
    elements: &mut [F::Raw],
) {
    let count = 8 * lanes;
    let (rest, coded) = strip.split_at(rest_len::<F>(true, lanes));
    let mut values = [0u8; STRIP];
    unpack(coded, lanes, CODE_BITS, &mut values);
    // SAFETY: by the caller's promise; codes of three bits do not exceed `ESCAPE`.
    unsafe { K::fill(&mut values[..count], escapes, used) };
    for (value, base) in values[..count].iter_mut().zip(bases) {
        *value = base.wrapping_sub(*value);
    }
    join_rest::<F, true>(&values, &values, rest, lanes, elements);
}
