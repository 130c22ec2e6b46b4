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
mod lags;
mod model;
mod wavelet;
mod weave;

use crate::checksum::Sink;
use crate::error::CodecError;
use crate::fields::{STRIP, lanes};
use crate::float::{Float, Tile, join_rest, rest_len, split_rest, strips};
use crate::isa::{Isa, per_isa, prefetch};
use crate::masked::Masked;
use bits::{BitString, BitWriter};
use cluster::CLUSTERS_MAX;
use lags::{LAG_MAX, Lags};
use model::Model;
use wavelet::{Levels, Source, make_room};
use weave::{Pattern, Weaver};

/// Buffers reused from plane to plane.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    symbols: Vec<u8>,
    histograms: Vec<u32>,
    pattern: Pattern,
    levels: Levels,
    /// Each cluster's symbols, one cluster behind the other.
    streams: Vec<u8>,
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
    let Scratch { symbols, histograms, pattern, levels, streams, writer, .. } = scratch;
    let before = LAG_MAX * channels;
    make_room(symbols, before + elements);
    symbols[..before].fill(0);
    take_apart::<F>(isa, raw, offset, &mut symbols[before..], out);
    let lags = lags::choose(isa, &symbols[before..before + elements], channels);
    lags::apply(isa, &Lags::new(&lags), symbols, elements);
    let symbols = &symbols[before..];
    let model = Model::fit(isa, offset, lags, &symbols[..elements], histograms);
    model.write(out);
    writer.clear();
    weave::pattern(isa, &model.labels, elements, pattern);
    for (cluster, tree) in model.trees.iter().enumerate() {
        let len = weave::pick(isa, pattern, cluster, symbols, elements, streams);
        wavelet::write(isa, tree, streams, len, levels, writer);
    }
    writer.write(out);
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
    // The rows of all strips together are those of one so long.
    let stored = rest_len::<F>(false, lanes(elements));
    let (rests, mut coded) =
        coded.split_at_checked(stored).ok_or(CodecError::Damaged("dense plane too short"))?;
    // The bits are on their way while the model is read.
    prefetch(coded, 0, coded.len());
    let model = Model::parse(&mut coded, channels)?;
    let Scratch { symbols, pattern, levels, streams, reader, .. } = scratch;
    reader.load(coded);
    weave::pattern(isa, &model.labels, elements, pattern);
    // A strip may be taken from any place in it.
    make_room(streams, elements + STRIP);
    let mut source = Source::new(reader, rests);
    let (mut starts, mut end) = (Vec::with_capacity(CLUSTERS_MAX), 0);
    for (cluster, tree) in model.trees.iter().enumerate() {
        let width = model.labels.iter().filter(|label| usize::from(**label) == cluster).count();
        let len = elements / channels * width;
        wavelet::read(isa, tree, len, levels, &mut source, &mut streams[end..])?;
        starts.push(end);
        end += len;
    }
    if source.at().div_ceil(8) != coded.len() {
        return Err(CodecError::Damaged("dense plane too long"));
    }
    let lags = Lags::new(&model.lags);
    let before = lags.zeros();
    make_room(symbols, before + elements);
    symbols[..before].fill(0);
    let weaver = Weaver::new(pattern, streams, &starts);
    Ok(put_together::<F>(isa, weaver, &lags, model.offset, symbols, rests, out))
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
    /// Inverse of all that `encode` does to symbols, and of `take_apart`; returns the checksum of `out`.
    fn put_together<F: Float>(
        weaver: Weaver<'_>, lags: &Lags, offset: u8, symbols: &mut [u8], rests: &[u8], out: &mut [u8],
    ) -> u64 = put_together_on
}

#[inline(always)]
unsafe fn put_together_on<F: Float, K: Masked>(
    mut weaver: Weaver<'_>,
    lags: &Lags,
    offset: u8,
    symbols: &mut [u8],
    mut rests: &[u8],
    out: &mut [u8],
) -> u64 {
    let before = lags.zeros();
    let elements = out.len() / F::SIZE;
    let mut sink = Sink::new(out);
    let (mut exponents, mut signs) = ([0u8; STRIP], [0u8; STRIP]);
    let mut tile = Tile::<F>::new();
    for (first, count, lanes) in strips(elements) {
        let (strip, later) = rests.split_at(rest_len::<F>(false, lanes));
        rests = later;
        let (from, to) = (before + first, before + first + count);
        // SAFETY: by the caller's promise.
        unsafe { weaver.weave::<K>(&mut symbols[from..from + count.next_multiple_of(64)]) };
        lags.undo(symbols, first..first + count);
        let symbols = &symbols[from..to];
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
