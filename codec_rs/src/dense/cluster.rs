//! Channels with alike distributions share a code.
//!
//! k-means over the channels' histograms, the distance being the bits a channel would take under a
//! cluster's distribution. All arithmetic is elementwise in `f32`, in a fixed order, so an encoder
//! gives the same bytes on every instruction set.

use std::ops::Range;

/// Most clusters a plane may have.
pub(super) const CLUSTERS_MAX: usize = 8;
const ROUNDS: usize = 5;
/// Count given to every symbol of every cluster, so that none is impossible.
const PRIOR: f32 = 0.05;

/// Label each channel. `histograms` holds `width` counts per channel; labels are `0..clusters`, all of
/// them used; returns how many.
#[inline(always)]
pub(super) fn fit(
    histograms: &[u32],
    width: usize,
    clusters: usize,
    labels: &mut Vec<u8>,
) -> usize {
    by_mean(histograms, width, clusters, labels);
    let ranges: Vec<Range<usize>> = histograms.chunks_exact(width).map(range).collect();
    let mut costs = vec![[0f32; CLUSTERS_MAX]; width];
    for _ in 0..ROUNDS {
        costs_of(histograms, labels, &mut costs);
        let mut changed = false;
        let channels = histograms.chunks_exact(width).zip(&ranges).zip(labels.iter_mut());
        for ((histogram, range), label) in channels {
            let best = cheapest(&histogram[range.clone()], &costs[range.clone()], clusters);
            changed |= *label != best;
            *label = best;
        }
        if !changed {
            break;
        }
    }
    drop_empty(labels)
}

/// The symbols that occur.
fn range(histogram: &[u32]) -> Range<usize> {
    let first = histogram.iter().position(|count| *count > 0).unwrap_or(0);
    let last = histogram.iter().rposition(|count| *count > 0).unwrap_or(0);
    first..last + 1
}

/// Start: as many channels in each cluster, ordered by their mean symbol.
fn by_mean(histograms: &[u32], width: usize, clusters: usize, labels: &mut Vec<u8>) {
    let weight = |histogram: &[u32]| -> u64 {
        histogram.iter().enumerate().map(|(symbol, &count)| symbol as u64 * u64::from(count)).sum()
    };
    let mut order: Vec<(u64, usize)> =
        histograms.chunks_exact(width).map(weight).zip(0..).collect();
    order.sort_unstable();
    labels.clear();
    labels.resize(order.len(), 0);
    for (rank, (_, channel)) in order.iter().enumerate() {
        labels[*channel] = (rank * clusters / order.len()) as u8;
    }
}

/// Bits of each symbol under each cluster.
#[inline(always)]
fn costs_of(histograms: &[u32], labels: &[u8], costs: &mut [[f32; CLUSTERS_MAX]]) {
    let width = costs.len();
    let mut counts = vec![PRIOR; CLUSTERS_MAX * width];
    for (histogram, label) in histograms.chunks_exact(width).zip(labels) {
        let sums = &mut counts[usize::from(*label) * width..][..width];
        for (sum, &count) in sums.iter_mut().zip(histogram) {
            *sum += count as f32;
        }
    }
    let mut totals = [0f32; CLUSTERS_MAX];
    for (symbol, cost) in costs.iter_mut().enumerate() {
        for (cluster, (cost, total)) in cost.iter_mut().zip(&mut totals).enumerate() {
            *cost = counts[cluster * width + symbol];
            *total += *cost;
        }
    }
    for total in &mut totals {
        *total = log2(*total);
    }
    for cost in costs {
        for (cost, total) in cost.iter_mut().zip(&totals) {
            *cost = total - log2(*cost);
        }
    }
}

#[inline(always)]
fn cheapest(histogram: &[u32], costs: &[[f32; CLUSTERS_MAX]], clusters: usize) -> u8 {
    let mut sums = [0f32; CLUSTERS_MAX];
    for (cost, &count) in costs.iter().zip(histogram) {
        let count = count as f32;
        for (sum, cost) in sums.iter_mut().zip(cost) {
            *sum += count * cost;
        }
    }
    let mut best = 0;
    for cluster in 1..clusters {
        if sums[cluster] < sums[best] {
            best = cluster;
        }
    }
    best as u8
}

/// Close the gaps empty clusters leave.
fn drop_empty(labels: &mut [u8]) -> usize {
    let mut used = [false; CLUSTERS_MAX];
    labels.iter().for_each(|label| used[usize::from(*label)] = true);
    let mut names = [0u8; CLUSTERS_MAX];
    let mut count = 0;
    for (name, _) in names.iter_mut().zip(used).filter(|(_, used)| *used) {
        *name = count;
        count += 1;
    }
    labels.iter_mut().for_each(|label| *label = names[usize::from(*label)]);
    usize::from(count)
}

/// Base-2 logarithm of a positive normal number to about 0.01.
#[inline(always)]
fn log2(value: f32) -> f32 {
    let bits = value.to_bits();
    let exponent = (bits >> 23) as i32 - 127;
    let mantissa = f32::from_bits(bits & 0x7F_FFFF | 0x3F80_0000) - 1.0;
    exponent as f32 + mantissa * (1.3465 - 0.3465 * mantissa)
}
