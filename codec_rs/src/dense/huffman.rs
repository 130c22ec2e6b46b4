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
#[derive(Debug, Default, Clone)]
pub(super) struct Tree {
    symbols: Vec<u8>,
    /// Path of each leaf, first turn in the highest bit.
    codes: Vec<u16>,
    lengths: Vec<u8>,
}

impl Tree {
    /// The best code for symbols that occur `counts[symbol]` times, at least one of them.
    pub(super) fn fit(counts: &[u32]) -> Self {
        let mut leaves: Vec<(u32, u8)> = (0..=u8::MAX)
            .zip(counts)
            .filter_map(|(symbol, &count)| (count > 0).then_some((count, symbol)))
            .collect();
        loop {
            leaves.sort_unstable();
            let lengths = code_lengths(&leaves);
            if lengths.iter().all(|&length| u32::from(length) <= LENGTH_MAX) {
                let pairs = leaves.iter().zip(&lengths).map(|(leaf, length)| (*length, leaf.1));
                return Self::canonical(pairs.collect());
            }
            // Flatter counts give shorter codes; equal ones need eight bits at most.
            leaves.iter_mut().for_each(|leaf| leaf.0 = leaf.0.div_ceil(2));
        }
    }

    fn canonical(mut pairs: Vec<(u8, u8)>) -> Self {
        pairs.sort_unstable();
        let mut tree = Self::default();
        let mut code: u32 = 0;
        for (length, symbol) in pairs {
            tree.symbols.push(symbol);
            tree.lengths.push(length);
            tree.codes.push(code as u16);
            code += 1 << (16 - u32::from(length));
        }
        tree
    }

    /// Append the first symbol, the last, and between them a length for each, 0 for none.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let first = self.symbols.iter().copied().min().unwrap_or(0);
        let last = self.symbols.iter().copied().max().unwrap_or(0);
        out.extend([first, last]);
        if first == last {
            return;
        }
        let mut lengths = [0u8; 256];
        for (symbol, length) in self.symbols.iter().zip(&self.lengths) {
            lengths[usize::from(symbol - first)] = *length;
        }
        let used = usize::from(last - first) + 1;
        out.extend(
            lengths[..used.next_multiple_of(2)].chunks(2).map(|pair| pair[0] | pair[1] << 4),
        );
    }

    /// Inverse of `write`; takes what it reads off `bytes`.
    pub(super) fn parse(bytes: &mut &[u8]) -> Result<Self, CodecError> {
        let (&[first, last], rest) = bytes.split_first_chunk().ok_or(DAMAGED)?;
        if last <= first {
            *bytes = rest;
            return if first == last {
                Ok(Self::canonical(vec![(0, first)]))
            } else {
                Err(DAMAGED)
            };
        }
        let packed = (usize::from(last - first) + 1).div_ceil(2);
        let (lengths, rest) = rest.split_at_checked(packed).ok_or(DAMAGED)?;
        *bytes = rest;
        let pairs: Vec<(u8, u8)> = (first..=last)
            .zip(lengths.iter().flat_map(|pair| [pair & 15, pair >> 4]))
            .filter_map(|(symbol, length)| (length > 0).then_some((length, symbol)))
            .collect();
        // Kraft: a tree without holes, so that every node has two sides.
        let space: u32 =
            pairs.iter().map(|(length, _)| 1 << (LENGTH_MAX - u32::from(*length))).sum();
        if space != 1 << LENGTH_MAX { Err(DAMAGED) } else { Ok(Self::canonical(pairs)) }
    }

    /// Number of leaves.
    pub(super) fn len(&self) -> usize {
        self.symbols.len()
    }

    /// Symbol of a leaf.
    pub(super) fn symbol(&self, leaf: usize) -> u8 {
        self.symbols[leaf]
    }

    /// Leaf of each symbol that has one.
    pub(super) fn leaves(&self) -> [u8; 256] {
        let mut leaves = [0; 256];
        for (leaf, symbol) in self.symbols.iter().enumerate() {
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
