//! What a plane's symbols are coded with: offset, lags, labels and codes.
//!
//! Stored, the model is a byte for the offset, one for the number of clusters (with [`LAGGED`] when
//! any channel has a lag), a bit string with each channel's label and lag, and the codes.

use super::bits::{self, BitString, BitWriter};
use super::cluster::{CLUSTERS_MAX, fit};
use super::huffman::{Lengths, Tree};
use crate::error::CodecError;
use crate::isa::{Isa, per_isa};
use crate::masked::Masked;

/// Flag in the byte that counts clusters.
const LAGGED: u8 = 0x80;
/// Furthest token before that a sign is compared to.
const LAG_MAX: usize = 3;
const LAG_BITS: usize = 2;
/// Most clusters an encoder makes. Each level of the tree over channels is a pass over the plane: twice
/// as many save 0.5 % of the bytes and take 15 % more time to decode.
const CLUSTERS: usize = 4;
/// Symbols that pay for one more cluster's code.
const SYMBOLS_PER_CLUSTER: usize = 3072;
const DAMAGED: CodecError = CodecError::Damaged("dense model");

/// See the module.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) offset: u8,
    pub(super) lags: Vec<u8>,
    pub(super) labels: Vec<u8>,
    pub(super) trees: Vec<Tree>,
    lengths: Vec<Lengths>,
}

impl Model {
    /// The model of a plane whose signs have had their lags applied.
    pub(super) fn fit(
        isa: Isa,
        offset: u8,
        lags: Vec<u8>,
        symbols: &[u8],
        histograms: &mut Vec<u32>,
    ) -> Self {
        let channels = lags.len();
        let width = symbols.iter().copied().max().map_or(1, |symbol| usize::from(symbol) + 1);
        histograms.clear();
        histograms.resize(channels * width, 0);
        for token in symbols.chunks_exact(channels) {
            for (histogram, symbol) in histograms.chunks_exact_mut(width).zip(token) {
                histogram[usize::from(*symbol)] += 1;
            }
        }
        let clusters = (symbols.len() / SYMBOLS_PER_CLUSTER).clamp(1, CLUSTERS.min(channels));
        let (labels, clusters) = cluster_channels(isa, histograms, width, clusters);
        let mut counts = vec![0u32; clusters * width];
        for (histogram, label) in histograms.chunks_exact(width).zip(&labels) {
            let sums = &mut counts[usize::from(*label) * width..][..width];
            sums.iter_mut().zip(histogram).for_each(|(sum, count)| *sum += count);
        }
        let (trees, lengths) = counts.chunks_exact(width).map(Tree::fit).unzip();
        Self { offset, lags, labels, trees, lengths }
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let lagged = self.lags.iter().any(|lag| *lag > 0);
        let flag = if lagged { LAGGED } else { 0 };
        out.extend([self.offset, self.trees.len() as u8 | flag]);
        let mut bits = BitWriter::default();
        let label_bits = label_bits(self.trees.len());
        for (label, lag) in self.labels.iter().zip(&self.lags) {
            bits.put(u64::from(*label), label_bits);
            if lagged {
                bits.put(u64::from(*lag), LAG_BITS);
            }
        }
        bits.write(out);
        self.lengths.iter().for_each(|lengths| lengths.write(out));
    }

    /// Inverse of `write`; takes what it reads off `bytes`.
    pub(super) fn parse(isa: Isa, bytes: &mut &[u8], channels: usize) -> Result<Self, CodecError> {
        let (&[offset, clusters], rest) = bytes.split_first_chunk().ok_or(DAMAGED)?;
        let (lagged, clusters) = (clusters & LAGGED != 0, usize::from(clusters & !LAGGED));
        if clusters == 0 || clusters > CLUSTERS_MAX {
            return Err(DAMAGED);
        }
        let lag_bits = if lagged { LAG_BITS } else { 0 };
        let each = label_bits(clusters) + lag_bits;
        let (packed, rest) = rest.split_at_checked((channels * each).div_ceil(8)).ok_or(DAMAGED)?;
        let mut bits = BitString::default();
        bits::load(isa, &mut bits, packed);
        let field = |channel: usize, at: usize, width: usize| {
            (bits.word(channel * each + at) & ((1 << width) - 1)) as u8
        };
        let labels: Vec<u8> = (0..channels).map(|c| field(c, 0, label_bits(clusters))).collect();
        let lags = (0..channels).map(|c| field(c, label_bits(clusters), lag_bits)).collect();
        *bytes = rest;
        let trees: Vec<Tree> =
            (0..clusters).map(|_| Lengths::parse(bytes)).collect::<Result<_, _>>()?;
        // Each cluster has a channel, or the tree over channels would have a hole.
        if (0..clusters).all(|cluster| labels.contains(&(cluster as u8)))
            && labels.iter().all(|label| usize::from(*label) < clusters)
        {
            Ok(Self { offset, lags, labels, trees, lengths: Vec::new() })
        } else {
            Err(DAMAGED)
        }
    }
}

/// Bits of a label.
fn label_bits(clusters: usize) -> usize {
    clusters.next_power_of_two().trailing_zeros() as usize
}

per_isa! {
    /// Labels of the channels, and how many clusters they use.
    fn cluster_channels(histograms: &[u32], width: usize, clusters: usize) -> (Vec<u8>, usize)
        = cluster_channels_on
}

#[inline(always)]
unsafe fn cluster_channels_on<K: Masked>(
    histograms: &[u32],
    width: usize,
    clusters: usize,
) -> (Vec<u8>, usize) {
    let mut labels = Vec::new();
    let clusters = fit(histograms, width, clusters, &mut labels);
    (labels, clusters)
}

per_isa! {
    /// For each channel, the lag that leaves its signs most one-sided; 0 for none.
    pub(super) fn choose_lags(symbols: &[u8], channels: usize) -> Vec<u8> = choose_lags_on
}

#[inline(always)]
unsafe fn choose_lags_on<K: Masked>(symbols: &[u8], channels: usize) -> Vec<u8> {
    // Counters have 16 bits: a longer plane's first tokens stand for it.
    let tokens = (symbols.len() / channels).min(usize::from(u16::MAX));
    let symbols = &symbols[..tokens * channels];
    let mut lags = vec![0; channels];
    let mut best = minorities(symbols, &vec![0; symbols.len()], channels);
    for lag in 1..=LAG_MAX.min(tokens - 1) {
        let of_lag = minorities(&symbols[lag * channels..], symbols, channels);
        for ((best, lags), of_lag) in best.iter_mut().zip(&mut lags).zip(of_lag) {
            if of_lag < *best {
                (*best, *lags) = (of_lag, lag as u8);
            }
        }
    }
    lags
}

/// For each channel, how often its signs differ from those `before`, or how often they do not.
#[inline(always)]
fn minorities(now: &[u8], before: &[u8], channels: usize) -> Vec<u16> {
    let mut ones = vec![0u16; channels];
    for (now, before) in now.chunks_exact(channels).zip(before.chunks_exact(channels)) {
        for ((ones, now), before) in ones.iter_mut().zip(now).zip(before) {
            *ones += u16::from((now ^ before) & 1);
        }
    }
    let all = (now.len() / channels) as u16;
    ones.iter_mut().for_each(|ones| *ones = (*ones).min(all - *ones));
    ones
}

per_isa! {
    /// Replace each sign by its change since the channel's lag; the first tokens keep theirs.
    pub(super) fn apply_lags(symbols: &mut [u8], lags: &[u8]) = apply_lags_on
}

#[inline(always)]
unsafe fn apply_lags_on<K: Masked>(symbols: &mut [u8], lags: &[u8]) {
    change_signs::<true>(symbols, lags);
}

per_isa! {
    /// Inverse of `apply_lags`.
    pub(super) fn undo_lags(symbols: &mut [u8], lags: &[u8]) = undo_lags_on
}

#[inline(always)]
unsafe fn undo_lags_on<K: Masked>(symbols: &mut [u8], lags: &[u8]) {
    change_signs::<false>(symbols, lags);
}

/// Flip the symbols whose sign is set a lag before: as it was with `APPLY`, else as it has become.
#[inline(always)]
fn change_signs<const APPLY: bool>(symbols: &mut [u8], lags: &[u8]) {
    if lags.iter().all(|lag| *lag == 0) {
        return;
    }
    let whole = change_columns::<64, APPLY>(symbols, lags, 0);
    let most = change_columns::<16, APPLY>(symbols, lags, whole);
    change_columns::<1, APPLY>(symbols, lags, most);
}

/// `WIDTH` channels at a time, from `first` on, as long as there are so many; returns the next one.
/// Down a few columns, the last rows stay in registers.
#[inline(always)]
fn change_columns<const WIDTH: usize, const APPLY: bool>(
    symbols: &mut [u8],
    lags: &[u8],
    first: usize,
) -> usize {
    let columns = lags[first..].as_chunks::<WIDTH>().0;
    for (number, lags_here) in columns.iter().enumerate() {
        let start = first + number * WIDTH;
        let mask = |lag| lags_here.map(|of| u8::from(of == lag));
        let (mask1, mask2, mask3) = (mask(1), mask(2), mask(3));
        // Before the first token no sign is set.
        let (mut before1, mut before2, mut before3) = ([0; WIDTH], [0; WIDTH], [0; WIDTH]);
        for token in symbols.chunks_exact_mut(lags.len()) {
            let Some(now) = token[start..].first_chunk_mut::<WIDTH>() else { return start };
            let was = *now;
            for (i, symbol) in now.iter_mut().enumerate() {
                *symbol ^= before1[i] & mask1[i] ^ before2[i] & mask2[i] ^ before3[i] & mask3[i];
            }
            (before3, before2, before1) = (before2, before1, if APPLY { was } else { *now });
        }
    }
    first + columns.len() * WIDTH
}
