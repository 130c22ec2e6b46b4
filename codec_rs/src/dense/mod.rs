//! The dense codec: Huffman codes of exponent and sign, shared by alike channels.
//!
//! A symbol is an element's exponent (less an offset of the plane) and its sign. A sign may be coded
//! as its change since the same channel's 1, 2 or 3 tokens before (its *lag*): rotary embeddings make
//! the signs of slow channels persist. Channels are clustered by their symbols' histograms, up to four
//! clusters with a code each, and the codes' bits are laid out as a wavelet tree, so that decoding
//! is merging of byte streams under masks (PivCo-Huffman, arXiv 2606.05765). A coded plane:
//!
//! ```text
//! per strip: stored mantissas │ model (see `model`) │ bits of the tree
//! ```
//!
//! Every part tells its own length or gets it from the shape; what is left over after decoding is an
//! error. Memory is bounded by the plane's size times the depth of a tree.

mod bits;
mod cluster;
mod huffman;
mod model;
mod wavelet;

use crate::checksum::Sink;
use crate::error::CodecError;
use crate::fields::STRIP;
use crate::float::{Float, Tile, join_rest, rest_len, split_rest, strips};
use crate::isa::{Isa, per_isa};
use crate::masked::Masked;
use bits::{BitString, BitWriter};
use model::Model;
use wavelet::{Levels, Reader, Writer, make_room};

/// Buffers reused from plane to plane.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    symbols: Vec<u8>,
    histograms: Vec<u32>,
    levels: Levels,
    writer: BitWriter,
    reader: BitString,
}

/// Append the coded form of `raw`, tokens of `channels` elements each, to `out`; false when the
/// exponents span too far for this codec.
pub(crate) fn encode<F: Float>(
    isa: Isa,
    raw: &[u8],
    channels: usize,
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> bool {
    let elements = raw.len() / F::SIZE;
    let Some(offset) = offset::<F>(isa, raw) else { return false };
    make_room(&mut scratch.symbols, elements);
    take_apart::<F>(isa, raw, offset, &mut scratch.symbols, out);
    let symbols = &mut scratch.symbols[..elements];
    let lags = model::choose_lags(isa, symbols, channels);
    model::apply_lags(isa, symbols, &lags);
    let model = Model::fit(isa, offset, lags, symbols, &mut scratch.histograms);
    model.write(out);
    scratch.writer.clear();
    let mut writer = Writer { isa, trees: &model.trees, bits: &mut scratch.writer };
    let clusters = 0..model.trees.len() as u8;
    let levels = scratch.levels.all();
    writer.channels(&model.labels, clusters, &mut scratch.symbols, elements, levels);
    scratch.writer.write(out);
    true
}

/// Decode a plane into `out`, which tells its size; returns the checksum of what was decoded.
pub(crate) fn decode<F: Float>(
    isa: Isa,
    coded: &[u8],
    channels: usize,
    scratch: &mut Scratch,
    out: &mut [u8],
) -> Result<u64, CodecError> {
    let elements = out.len() / F::SIZE;
    let stored = strips(elements).map(|(.., lanes)| rest_len::<F>(false, lanes)).sum();
    let (rests, mut coded) =
        coded.split_at_checked(stored).ok_or(CodecError::Damaged("dense plane too short"))?;
    let model = Model::parse(isa, &mut coded, channels)?;
    bits::load(isa, &mut scratch.reader, coded);
    let (trees, bits) = (&model.trees[..], &scratch.reader);
    let mut reader = Reader { isa, trees, bits, at: 0, later: rests };
    let levels = scratch.levels.all();
    reader.plane(&model.labels, elements, levels, &mut scratch.symbols)?;
    if reader.at.div_ceil(8) != coded.len() {
        return Err(CodecError::Damaged("dense plane too long"));
    }
    let symbols = &mut scratch.symbols[..elements];
    model::undo_lags(isa, symbols, &model.lags);
    Ok(put_together::<F>(isa, symbols, model.offset, rests, out))
}

per_isa! {
    /// What to subtract from exponents, so that zero stays zero, the least other one becomes 1, and
    /// the largest at most 127.
    fn offset<F: Float>(raw: &[u8]) -> Option<u8> = offset_on
}

#[inline(always)]
unsafe fn offset_on<F: Float, K: Masked>(raw: &[u8]) -> Option<u8> {
    // Zero wraps to 255, so that it is never the least.
    let (mut least, mut largest) = (u8::MAX, 0);
    for raw in F::elements(raw) {
        let exponent = F::exponent(F::bits(*raw));
        least = least.min(exponent.wrapping_sub(1));
        largest = largest.max(exponent);
    }
    let offset = least.min(largest);
    (largest - offset <= 127).then_some(offset)
}

per_isa! {
    /// Symbols into `symbols`, stored mantissas behind `out`.
    fn take_apart<F: Float>(raw: &[u8], offset: u8, symbols: &mut [u8], out: &mut Vec<u8>)
        = take_apart_on
}

#[inline(always)]
unsafe fn take_apart_on<F: Float, K: Masked>(
    raw: &[u8],
    offset: u8,
    symbols: &mut [u8],
    out: &mut Vec<u8>,
) {
    let elements = F::elements(raw);
    for (symbol, raw) in symbols.iter_mut().zip(elements) {
        let bits = F::bits(*raw);
        *symbol = F::exponent(bits).saturating_sub(offset) << 1 | F::sign(bits);
    }
    for (first, count, lanes) in strips(elements.len()) {
        let strip = &elements[first..first + count];
        let start = out.len();
        out.resize(start + rest_len::<F>(false, lanes), 0);
        if count == STRIP {
            split_rest::<F, false>(strip, 64, &mut out[start..]);
        } else {
            let mut padded = Tile::<F>::new();
            padded.0[..count].copy_from_slice(strip);
            split_rest::<F, false>(&padded.0, lanes, &mut out[start..]);
        }
    }
}

per_isa! {
    /// Inverse of `take_apart`; returns the checksum of `out`.
    fn put_together<F: Float>(symbols: &[u8], offset: u8, rests: &[u8], out: &mut [u8]) -> u64
        = put_together_on
}

#[inline(always)]
unsafe fn put_together_on<F: Float, K: Masked>(
    symbols: &[u8],
    offset: u8,
    mut rests: &[u8],
    out: &mut [u8],
) -> u64 {
    let mut sink = Sink::new(out);
    let (mut exponents, mut signs) = ([0u8; STRIP], [0u8; STRIP]);
    let mut tile = Tile::<F>::new();
    for (first, count, lanes) in strips(symbols.len()) {
        let (strip, later) = rests.split_at(rest_len::<F>(false, lanes));
        rests = later;
        let symbols = &symbols[first..first + count];
        for ((exponent, sign), symbol) in exponents.iter_mut().zip(&mut signs).zip(symbols) {
            let above = symbol >> 1;
            *exponent = if above == 0 { 0 } else { above.wrapping_add(offset) };
            *sign = symbol & 1;
        }
        if count == STRIP {
            join_rest::<F, false>(&exponents, &signs, strip, 64, &mut tile.0);
        } else {
            join_rest::<F, false>(&exponents, &signs, strip, lanes, &mut tile.0);
        }
        sink.push(&F::raw_bytes(&tile.0)[..count * F::SIZE]);
    }
    sink.finish()
}
