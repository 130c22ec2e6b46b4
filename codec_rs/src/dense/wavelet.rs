//! The tree a plane's symbols are sorted through.
//!
//! Its upper nodes part the channels by cluster; their bits follow from the labels, a pattern that
//! repeats with every token, and are not stored. Its lower nodes part the symbols by the cluster's
//! code; their bits are stored node by node, a node before its sides, left before right. A side of one
//! leaf needs no bits. Decoding rebuilds the nodes from the leaves up by merging their sides; encoding
//! goes down by splitting.

use std::ops::Range;

use super::bits::{BitString, BitWriter};
use super::huffman::{LENGTH_MAX, Tree};
use crate::error::CodecError;
use crate::isa::{Isa, per_isa, prefetch};
use crate::masked::{Masked, SLACK, Side, Words, merge, split};

/// Depth of the channel tree, of the deepest symbol tree, and its leaves.
const DEPTH: usize = 4 + LENGTH_MAX as usize + 1;

/// Both sides of the node being worked on, per depth.
#[derive(Debug)]
pub(super) struct Levels([[Vec<u8>; 2]; DEPTH]);

impl Default for Levels {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Default::default()))
    }
}

impl Levels {
    /// All of them.
    pub(super) fn all(&mut self) -> &mut [[Vec<u8>; 2]] {
        &mut self.0
    }
}

/// Make a buffer hold `len` symbols and the slack vectors need.
pub(super) fn make_room(buffer: &mut Vec<u8>, len: usize) {
    if buffer.len() < len + SLACK {
        buffer.resize(len + SLACK, 0);
    }
}

per_isa! {
    fn merge_stored(
        bits: &BitString, at: usize, len: usize, left: Side<'_>, right: Side<'_>, out: &mut [u8],
    ) = merge_stored_on
}
per_isa! {
    fn merge_pattern(
        bits: &BitString, len: usize, left: Side<'_>, right: Side<'_>, out: &mut [u8],
    ) = merge_pattern_on
}
per_isa! {
    fn split_pattern(
        bits: &BitString, values: &[u8], len: usize, left: &mut [u8], right: &mut [u8],
    ) -> usize = split_pattern_on
}
per_isa! {
    fn split_symbols(
        pivot: u8, values: &[u8], len: usize, left: &mut [u8], right: &mut [u8], bits: &mut BitWriter,
    ) -> usize = split_symbols_on
}
per_isa! {
    fn ones(bits: &BitString, at: usize, len: usize) -> usize = ones_on
}

// SAFETY of the five functions below: the caller vouches for the features of `K`.

#[inline(always)]
unsafe fn merge_stored_on<K: Masked>(
    bits: &BitString,
    at: usize,
    len: usize,
    left: Side<'_>,
    right: Side<'_>,
    out: &mut [u8],
) {
    // SAFETY: see above.
    unsafe { merge::<K>(bits.from(at), len, left, right, out) }
}

#[inline(always)]
unsafe fn merge_pattern_on<K: Masked>(
    bits: &BitString,
    len: usize,
    left: Side<'_>,
    right: Side<'_>,
    out: &mut [u8],
) {
    // SAFETY: see above.
    unsafe { merge::<K>(bits.cycle(), len, left, right, out) }
}

#[inline(always)]
unsafe fn split_pattern_on<K: Masked>(
    bits: &BitString,
    values: &[u8],
    len: usize,
    left: &mut [u8],
    right: &mut [u8],
) -> usize {
    let mut masks = bits.cycle();
    // SAFETY: see above.
    unsafe { split::<K>(values, len, |_| masks.next(), left, right) }
}

#[inline(always)]
unsafe fn split_symbols_on<K: Masked>(
    pivot: u8,
    values: &[u8],
    len: usize,
    left: &mut [u8],
    right: &mut [u8],
    bits: &mut BitWriter,
) -> usize {
    let mut left_to_put = len;
    let mask = |values: &[u8]| {
        let count = left_to_put.min(64);
        left_to_put -= count;
        // SAFETY: see above; `split` gives 64 values.
        let mask = unsafe { K::at_least64(values.as_ptr(), pivot) } & (u64::MAX >> (64 - count));
        bits.put(mask, count);
        mask
    };
    // SAFETY: see above.
    unsafe { split::<K>(values, len, mask, left, right) }
}

#[inline(always)]
unsafe fn ones_on<K: Masked>(bits: &BitString, at: usize, len: usize) -> usize {
    bits.ones(at, len)
}

/// A node over channels: which of them go right, and both sides' labels.
struct Parted {
    pattern: BitString,
    left: Vec<u8>,
    right: Vec<u8>,
}

impl Parted {
    fn new(labels: &[u8], middle: u8) -> Self {
        let mut pattern = BitWriter::default();
        let (mut left, mut right) = (vec![0; labels.len()], vec![0; labels.len()]);
        let (mut lefts, mut rights) = (0, 0);
        for labels in labels.chunks(64) {
            let mut bits = 0;
            for (at, label) in labels.iter().enumerate() {
                // Both sides take it, and one keeps it: no branch to mispredict.
                let goes_right = *label >= middle;
                (left[lefts], right[rights]) = (*label, *label);
                lefts += usize::from(!goes_right);
                rights += usize::from(goes_right);
                bits |= u64::from(goes_right) << at;
            }
            pattern.put(bits, labels.len());
        }
        left.truncate(lefts);
        right.truncate(rights);
        Self { pattern: BitString::repeating(&pattern), left, right }
    }
}

/// Codes the symbols of a plane.
pub(super) struct Writer<'a> {
    pub(super) isa: Isa,
    pub(super) trees: &'a [Tree],
    pub(super) bits: &'a mut BitWriter,
}

impl Writer<'_> {
    /// Store the first `len` of `values`, symbols of channels with these labels in turn, all of them
    /// in `clusters`. Padded by `SLACK`; overwritten.
    pub(super) fn channels(
        &mut self,
        labels: &[u8],
        clusters: Range<u8>,
        values: &mut [u8],
        len: usize,
        levels: &mut [[Vec<u8>; 2]],
    ) {
        if clusters.len() == 1 {
            let tree = &self.trees[usize::from(clusters.start)];
            let leaves = tree.leaves();
            values[..len].iter_mut().for_each(|value| *value = leaves[usize::from(*value)]);
            return self.symbols(tree, 0..tree.len(), 0, values, len, levels);
        }
        let middle = clusters.start + clusters.len() as u8 / 2;
        let parted = Parted::new(labels, middle);
        let ([left, right], deeper) = sides(levels, len);
        let rights = split_pattern(self.isa, &parted.pattern, values, len, left, right);
        self.channels(&parted.left, clusters.start..middle, left, len - rights, deeper);
        self.channels(&parted.right, middle..clusters.end, right, rights, deeper);
    }

    /// Store leaf numbers.
    fn symbols(
        &mut self,
        tree: &Tree,
        leaves: Range<usize>,
        depth: usize,
        values: &[u8],
        len: usize,
        levels: &mut [[Vec<u8>; 2]],
    ) {
        if leaves.len() == 1 {
            return;
        }
        let middle = tree.middle(leaves.start, leaves.end, depth);
        let ([left, right], deeper) = sides(levels, len);
        let rights = split_symbols(self.isa, middle as u8, values, len, left, right, self.bits);
        self.symbols(tree, leaves.start..middle, depth + 1, left, len - rights, deeper);
        self.symbols(tree, middle..leaves.end, depth + 1, right, rights, deeper);
    }
}

/// The buffers of a node's sides, either of which may get all `len` symbols.
fn sides(levels: &mut [[Vec<u8>; 2]], len: usize) -> (&mut [Vec<u8>; 2], &mut [[Vec<u8>; 2]]) {
    let (sides, deeper) = levels.split_at_mut(1);
    sides[0].iter_mut().for_each(|side| make_room(side, len));
    (&mut sides[0], deeper)
}

/// Decodes the symbols of a plane.
pub(super) struct Reader<'a> {
    pub(super) isa: Isa,
    pub(super) trees: &'a [Tree],
    pub(super) bits: &'a BitString,
    /// Bits read.
    pub(super) at: usize,
    /// What is read next, asked for while memory is idle.
    pub(super) later: &'a [u8],
}

/// Bytes asked for at each node: those of a plane, over all of its nodes.
const ASKED: usize = 768;

impl Reader<'_> {
    /// Inverse of `Writer::channels`: `len` symbols into `out`.
    pub(super) fn plane(
        &mut self,
        labels: &[u8],
        len: usize,
        levels: &mut [[Vec<u8>; 2]],
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let clusters = 0..self.trees.len() as u8;
        make_room(out, len);
        self.channels(labels, clusters.clone(), len, levels, out)?;
        if let Side::Same(symbol) = self.side_of_channels(&clusters, out) {
            out[..len].fill(symbol);
        }
        Ok(())
    }

    /// Rebuild a node over channels; nothing if it is a single symbol.
    fn channels(
        &mut self,
        labels: &[u8],
        clusters: Range<u8>,
        len: usize,
        levels: &mut [[Vec<u8>; 2]],
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        if clusters.len() == 1 {
            let tree = &self.trees[usize::from(clusters.start)];
            return self.symbols(tree, 0..tree.len(), 0, len, levels, out);
        }
        let middle = clusters.start + clusters.len() as u8 / 2;
        let parted = Parted::new(labels, middle);
        let ([left, right], deeper) = levels.split_first_mut().ok_or(TOO_DEEP)?;
        let tokens = len / labels.len();
        let (lefts, rights) = (tokens * parted.left.len(), tokens * parted.right.len());
        let (low, high) = (clusters.start..middle, middle..clusters.end);
        self.channels(&parted.left, low.clone(), lefts, deeper, left)?;
        self.channels(&parted.right, high.clone(), rights, deeper, right)?;
        make_room(out, len);
        let (low, high) = (self.side_of_channels(&low, left), self.side_of_channels(&high, right));
        merge_pattern(self.isa, &parted.pattern, len, low, high, out);
        Ok(())
    }

    /// Rebuild a node over symbols; nothing if it is a leaf.
    fn symbols(
        &mut self,
        tree: &Tree,
        leaves: Range<usize>,
        depth: usize,
        len: usize,
        levels: &mut [[Vec<u8>; 2]],
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        if leaves.len() == 1 {
            return Ok(());
        }
        let ([left, right], deeper) = levels.split_first_mut().ok_or(TOO_DEEP)?;
        prefetch(self.later, 0, ASKED);
        self.later = self.later.get(ASKED..).unwrap_or(&[]);
        let middle = tree.middle(leaves.start, leaves.end, depth);
        let start = self.at;
        if len > self.bits.len() - start {
            return Err(CodecError::Damaged("dense plane too short"));
        }
        self.at += len;
        let rights = ones(self.isa, self.bits, start, len);
        let (low, high) = (leaves.start..middle, middle..leaves.end);
        self.symbols(tree, low.clone(), depth + 1, len - rights, deeper, left)?;
        self.symbols(tree, high.clone(), depth + 1, rights, deeper, right)?;
        make_room(out, len);
        let (low, high) = (side(tree, &low, left), side(tree, &high, right));
        merge_stored(self.isa, self.bits, start, len, low, high, out);
        Ok(())
    }

    fn side_of_channels<'o>(&self, clusters: &Range<u8>, stream: &'o [u8]) -> Side<'o> {
        let tree = &self.trees[usize::from(clusters.start)];
        if clusters.len() == 1 {
            side(tree, &(0..tree.len()), stream)
        } else {
            Side::Stream(stream)
        }
    }
}

/// What `symbols` made of these leaves.
fn side<'o>(tree: &Tree, leaves: &Range<usize>, stream: &'o [u8]) -> Side<'o> {
    if leaves.len() == 1 { Side::Same(tree.symbol(leaves.start)) } else { Side::Stream(stream) }
}

const TOO_DEEP: CodecError = CodecError::Damaged("dense code too long");
