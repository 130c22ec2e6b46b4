//! Canonical Huffman codes of one cluster's symbols.
//!
//! A code is the path to a leaf of the wavelet tree. Leaves are ordered by (length, symbol), which is
//! also the order of the codes, so a node is a range of leaves and its bit tells whether a leaf's
//! position reaches the middle.

use crate::error::CodecError;

/// Longest code; a length fits into four bits.
pub(super) const LENGTH_MAX: u32 = 15;
const DAMAGED: CodecError = CodecError::Damaged("dense code table");

/// The leaves of a tree, from left to right.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    len: usize,
    symbols: [u8; 256],
    /// Path of each leaf, first turn in the highest bit.
    codes: [u16; 256],
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
                return (Self::new(&lengths), lengths);
            }
            // Flatter counts give shorter codes; equal ones need eight bits at most.
            leaves.iter_mut().for_each(|leaf| leaf.0 = leaf.0.div_ceil(2));
        }
    }

    /// The canonical tree of these lengths.
    fn new(lengths: &Lengths) -> Self {
        let coded =
            || (lengths.first..=u8::MAX).zip(&lengths.each).filter(|(_, length)| **length > 0);
        let mut tree = Self { len: 1, symbols: [lengths.first; 256], codes: [0; 256] };
        if lengths.each.is_empty() {
            return tree;
        }
        let mut starts = [0; LENGTH_MAX as usize + 2];
        coded().for_each(|(_, length)| starts[usize::from(*length) + 1] += 1);
        for at in 1..starts.len() {
            starts[at] += starts[at - 1];
        }
        tree.len = starts[LENGTH_MAX as usize + 1];
        let (mut code, mut leaf) = (0u32, 0);
        for length in 1..=LENGTH_MAX {
            while leaf < starts[length as usize + 1] {
                tree.codes[leaf] = code as u16;
                code += 1 << (16 - length);
                leaf += 1;
            }
        }
        for (symbol, length) in coded() {
            let leaf = &mut starts[usize::from(*length)];
            tree.symbols[*leaf] = symbol;
            *leaf += 1;
        }
        tree
    }

    /// Number of leaves.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Symbol of a leaf.
    pub(super) fn symbol(&self, leaf: usize) -> u8 {
        self.symbols[leaf]
    }

    /// Leaf of each symbol that has one.
    pub(super) fn leaves(&self) -> [u8; 256] {
        let mut leaves = [0; 256];
        for (leaf, symbol) in self.symbols[..self.len].iter().enumerate() {
            leaves[usize::from(*symbol)] = leaf as u8;
        }
        leaves
    }

    /// First leaf of the right side of the node over leaves `low..high` at `depth`.
    pub(super) fn middle(&self, low: usize, high: usize, depth: usize) -> usize {
        let bit = 0x8000 >> depth;
        low + self.codes[low..high].partition_point(|code| code & bit == 0)
    }
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
        *bytes = rest;
        if first == last {
            return Ok(Tree::new(&Self { first, each: Vec::new() }));
        }
        let count = usize::from(last).checked_sub(usize::from(first)).ok_or(DAMAGED)? + 1;
        let (packed, rest) = rest.split_at_checked(count.div_ceil(2)).ok_or(DAMAGED)?;
        *bytes = rest;
        let nibbles = packed.iter().flat_map(|pair| [pair & 15, pair >> 4]);
        let each: Vec<u8> = nibbles.take(count).collect();
        let used = each.iter().filter(|length| **length > 0);
        let space: u32 = used.map(|length| 1 << (LENGTH_MAX - u32::from(*length))).sum();
        // Kraft: a tree without holes, so that every node has two sides.
        if space != 1 << LENGTH_MAX { Err(DAMAGED) } else { Ok(Tree::new(&Self { first, each })) }
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
