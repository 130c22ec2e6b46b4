//! Canonical Huffman codes of one cluster's symbols.
//!
//! A code is the path to a leaf of the wavelet tree. Leaves are ordered by (length, symbol), which is
//! also the order of the codes, so a node is a range of leaves, and a leaf belongs to its right side
//! if it is not before the middle.

use std::iter::repeat_n;

use crate::error::CodecError;

/// Longest code; a length fits into four bits.
pub(super) const LENGTH_MAX: u32 = 15;
const DAMAGED: CodecError = CodecError::Damaged("dense code table");

/// The tree of a code.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    /// Symbols from left to right, at least one.
    pub(super) leaves: Vec<u8>,
    /// Inner nodes, each before its sides, left before right; none when there is one leaf.
    pub(super) nodes: Vec<Node>,
}

/// An inner node.
#[derive(Debug, Clone)]
pub(super) struct Node {
    /// Turns on the way from the root.
    pub(super) depth: u8,
    /// Which side of its parent it is: 0 or 1.
    pub(super) side: u8,
    /// First leaf of its right side.
    pub(super) middle: u8,
    /// The symbols of those sides that are leaves.
    pub(super) symbols: [Option<u8>; 2],
}

impl Tree {
    /// The best code for symbols that occur `counts[symbol]` times, at least one of them.
    pub(super) fn fit(counts: &[u32]) -> (Self, Lengths) {
        let mut leaves: Vec<(u32, u8)> = (0..=u8::MAX)
            .zip(counts)
            .filter_map(|(symbol, &count)| (count > 0).then_some((count, symbol)))
            .collect();
        loop {
            leaves.sort_unstable();
            let found = code_lengths(&leaves);
            if found.iter().all(|&length| u32::from(length) <= LENGTH_MAX) {
                let lengths = Lengths::new(leaves.iter().map(|leaf| leaf.1).zip(found));
                return (Self::canonical(lengths.first, &lengths.each), lengths);
            }
            // Flatter counts give shorter codes; equal ones need eight bits at most.
            leaves.iter_mut().for_each(|leaf| leaf.0 = leaf.0.div_ceil(2));
        }
    }

    /// The canonical code of the symbols from `first` on: `lengths`, 0 for those without a code, leave
    /// no hole in the tree; there are none when `first` is the only symbol.
    fn canonical(first: u8, lengths: &[u8]) -> Self {
        let mut counts = [0; LENGTH_MAX as usize + 1];
        lengths.iter().for_each(|length| counts[usize::from(*length)] += 1);
        let (mut starts, mut sum) = (counts, 0);
        for start in &mut starts {
            (*start, sum) = (sum, sum + *start);
        }
        // Sorted without a branch on what is coded: symbols without a code come first.
        let mut sorted = [first; 256];
        for (symbol, length) in (first..=u8::MAX).zip(lengths) {
            let at = &mut starts[usize::from(*length)];
            sorted[*at] = symbol;
            *at += 1;
        }
        let leaves = &sorted[counts[0]..lengths.len().max(1)];
        Self { leaves: leaves.to_vec(), nodes: nodes(leaves, &counts) }
    }

    /// Number of each symbol's leaf, if it has one.
    pub(super) fn numbers(&self) -> [u8; 256] {
        let mut numbers = [0; 256];
        for (leaf, symbol) in self.leaves.iter().enumerate() {
            numbers[usize::from(*symbol)] = leaf as u8;
        }
        numbers
    }
}

/// The nodes above leaves, of which `counts` have each length. The way to a leaf begins as the way to
/// the leaf before, turns right where that one turned left, and goes left from there.
fn nodes(leaves: &[u8], counts: &[usize; LENGTH_MAX as usize + 1]) -> Vec<Node> {
    let mut nodes: Vec<Node> = Vec::with_capacity(leaves.len());
    // The node at each depth on the way to the leaf.
    let mut way = [0usize; LENGTH_MAX as usize];
    let lengths = (1..).zip(&counts[1..]).flat_map(|(length, count)| repeat_n(length, *count));
    let (mut depth, mut side, mut code) = (0, 0, 0u32);
    for ((leaf, symbol), length) in leaves.iter().enumerate().zip(lengths) {
        if leaf > 0 {
            let fork = LENGTH_MAX - 1 - code.trailing_zeros();
            nodes[way[fork as usize]].middle = leaf as u8;
            (depth, side) = (fork + 1, 1);
        }
        while depth < length {
            way[depth as usize] = nodes.len();
            nodes.push(Node { depth: depth as u8, side, middle: 0, symbols: [None; 2] });
            (depth, side) = (depth + 1, 0);
        }
        nodes[way[length as usize - 1]].symbols[usize::from(side)] = Some(*symbol);
        code += 1 << (LENGTH_MAX - length);
    }
    nodes
}

/// Code lengths of the symbols from `first` on, 0 for those that do not occur; none when `first` is
/// the only symbol.
#[derive(Debug, Clone)]
pub(super) struct Lengths {
    first: u8,
    each: Vec<u8>,
}

impl Lengths {
    fn new(pairs: impl Iterator<Item = (u8, u8)> + Clone) -> Self {
        let symbols = pairs.clone().map(|pair| pair.0);
        let (first, last) =
            symbols.fold((u8::MAX, 0), |(a, b), symbol| (a.min(symbol), b.max(symbol)));
        let span = usize::from(last - first);
        let mut each = vec![0; if span > 0 { span + 1 } else { 0 }];
        if span > 0 {
            pairs.for_each(|(symbol, length)| each[usize::from(symbol - first)] = length);
        }
        Self { first, each }
    }

    /// Append the first symbol, the last, and the lengths, four bits each.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let last = usize::from(self.first) + self.each.len().saturating_sub(1);
        out.extend([self.first, last as u8]);
        out.extend(self.each.chunks(2).map(|pair| pair[0] | pair.get(1).unwrap_or(&0) << 4));
    }

    /// Inverse of `write`, as the tree; takes what it reads off `bytes`.
    pub(super) fn parse(bytes: &mut &[u8]) -> Result<Tree, CodecError> {
        let (&[first, last], rest) = bytes.split_first_chunk().ok_or(DAMAGED)?;
        let span = usize::from(last.checked_sub(first).ok_or(DAMAGED)?);
        let count = if span > 0 { span + 1 } else { 0 };
        let (packed, rest) = rest.split_at_checked(count.div_ceil(2)).ok_or(DAMAGED)?;
        *bytes = rest;
        let mut lengths = [0; 256];
        for (pair, packed) in lengths.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
            *pair = [packed & 15, packed >> 4];
        }
        let lengths = &lengths[..count];
        let used = lengths.iter().filter(|length| **length > 0);
        let space: u32 = used.map(|length| 1 << (LENGTH_MAX - u32::from(*length))).sum();
        // Kraft: a tree without holes, so that every node has two sides.
        let whole = count == 0 || space == 1 << LENGTH_MAX;
        if whole { Ok(Tree::canonical(first, lengths)) } else { Err(DAMAGED) }
    }
}

/// Huffman's algorithm with two queues over leaves in order of their counts.
fn code_lengths(leaves: &[(u32, u8)]) -> Vec<u8> {
    let count = leaves.len();
    let mut weights: Vec<u64> = leaves.iter().map(|leaf| u64::from(leaf.0)).collect();
    let mut parents = vec![0; 2 * count - 1];
    let (mut leaf, mut node) = (0, count);
    for made in count..2 * count - 1 {
        let mut sum = 0;
        for _ in 0..2 {
            let take_leaf = leaf < count && (node >= made || weights[leaf] <= weights[node]);
            let taken = if take_leaf { &mut leaf } else { &mut node };
            sum += weights[*taken];
            parents[*taken] = made;
            *taken += 1;
        }
        weights.push(sum);
    }
    let mut depths = vec![0u8; 2 * count - 1];
    for at in (0..2 * count - 2).rev() {
        depths[at] = depths[parents[at]] + 1;
    }
    depths.truncate(count);
    depths
}
