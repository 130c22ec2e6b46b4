//! What a plane's symbols are coded with: offset, lags, labels and codes.
//!
//! Stored, the model is a byte for the offset, one for the number of clusters (with [`LAGGED`] when
//! any channel has a lag), a bit string with each channel's label and lag, and the codes.

use super::bits::{BitString, BitWriter};
use super::cluster::{CLUSTERS_MAX, fit};
use super::huffman::{Lengths, Tree};
use super::lags::LAG_BITS;
use crate::error::CodecError;
use crate::isa::{Isa, per_isa};
use crate::masked::Masked;

/// Flag in the byte that counts clusters.
const LAGGED: u8 = 0x80;
/// Most clusters an encoder makes. Every word of a plane is woven from a part of each: twice as many
/// save 0.5 % of the bytes and take 15 % more time to decode.
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
    pub(super) fn parse(bytes: &mut &[u8], channels: usize) -> Result<Self, CodecError> {
        let (&[offset, clusters], rest) = bytes.split_first_chunk().ok_or(DAMAGED)?;
        let (lagged, clusters) = (clusters & LAGGED != 0, usize::from(clusters & !LAGGED));
        if clusters == 0 || clusters > CLUSTERS_MAX {
            return Err(DAMAGED);
        }
        let lag_bits = if lagged { LAG_BITS } else { 0 };
        let label_bits = label_bits(clusters);
        let each = label_bits + lag_bits;
        let (packed, rest) = rest.split_at_checked((channels * each).div_ceil(8)).ok_or(DAMAGED)?;
        let mut bits = BitString::default();
        bits.load(packed);
        let (mut labels, mut lags) = (Vec::with_capacity(channels), Vec::with_capacity(channels));
        for field in (0..channels).map(|channel| bits.word(channel * each)) {
            labels.push((field & ((1 << label_bits) - 1)) as u8);
            lags.push((field >> label_bits & ((1 << lag_bits) - 1)) as u8);
        }
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
