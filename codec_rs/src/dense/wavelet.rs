//! The tree a cluster's symbols are sorted through.
//!
//! A node parts the symbols of its leaves by the next bit of their codes; the bits are stored node by
//! node, in the order of the tree's nodes. A side that is a leaf needs no bits. Encoding goes down the
//! nodes and splits, decoding comes back up and merges. A node is done with one side before it begins
//! the other, so a pair of buffers per depth holds the sides of all nodes in work.

use super::bits::{BitString, BitWriter};
use super::huffman::{LENGTH_MAX, Node, Tree};
use crate::error::CodecError;
use crate::isa::{per_isa, prefetch_line};
use crate::masked::{Masked, SLACK, Side, merge, split};

const DEPTHS: usize = LENGTH_MAX as usize;

/// Buffers of a tree's nodes.
#[derive(Debug, Default)]
pub(super) struct Levels {
    /// Both sides of a node, per depth.
    sides: [[Vec<u8>; 2]; DEPTHS],
    /// Each node's bits.
    spans: Vec<Span>,
}

/// Where the bits of a node begin, how many they are, and how many of them are set.
#[derive(Debug)]
struct Span {
    at: usize,
    len: usize,
    rights: usize,
}

/// Make a buffer hold `len` symbols and the slack vectors need.
#[inline(always)]
pub(super) fn make_room(buffer: &mut Vec<u8>, len: usize) {
    if buffer.len() < len + SLACK {
        buffer.resize(len + SLACK, 0);
    }
}

per_isa! {
    /// Store the first `len` of `symbols`, each of which has a leaf. Padded by `SLACK`; overwritten.
    pub(super) fn write(
        tree: &Tree, symbols: &mut [u8], len: usize, levels: &mut Levels, bits: &mut BitWriter,
    ) = write_on
}

#[inline(always)]
unsafe fn write_on<K: Masked>(
    tree: &Tree,
    symbols: &mut [u8],
    len: usize,
    levels: &mut Levels,
    bits: &mut BitWriter,
) {
    let numbers = tree.numbers();
    symbols[..len].iter_mut().for_each(|value| *value = numbers[usize::from(*value)]);
    let mut lens = [[0; 2]; DEPTHS + 1];
    lens[0][0] = len;
    for Node { depth, side, middle, .. } in &tree.nodes {
        let (depth, side) = (usize::from(*depth), usize::from(*side));
        let len = lens[depth][side];
        let (above, below) = levels.sides.split_at_mut(depth);
        let values = above.last().map_or(&*symbols, |sides| &sides[side]);
        let [left, right] = &mut below[0];
        make_room(left, len);
        make_room(right, len);
        let mut left_to_put = len;
        let mask = |values: &[u8]| {
            let count = left_to_put.min(64);
            left_to_put -= count;
            // SAFETY: by the caller's promise; `split` gives 64 values.
            let mask = unsafe { K::at_least64(values.as_ptr(), *middle) };
            let mask = mask & (u64::MAX >> (64 - count));
            bits.put(mask, count);
            mask
        };
        // SAFETY: by the caller's promise.
        let rights = unsafe { split::<K>(values, len, mask, left, right) };
        lens[depth + 1] = [len - rights, rights];
    }
}

/// Bits being read, and bytes that are asked for meanwhile.
pub(super) struct Source<'a> {
    bits: &'a BitString,
    /// Bits read.
    at: usize,
    later: &'a [u8],
    /// Bytes to ask for with each word, so that all of `later` is when the bits end.
    step: usize,
    asked: usize,
}

impl<'a> Source<'a> {
    /// Read `bits`; `later` is read next, and asked for while memory is idle.
    pub(super) fn new(bits: &'a BitString, later: &'a [u8]) -> Self {
        let step = later.len().div_ceil(bits.len() / 64 + 1);
        Self { bits, at: 0, later, step, asked: 0 }
    }

    /// Bits read.
    pub(super) fn at(&self) -> usize {
        self.at
    }
}

per_isa! {
    /// Inverse of `write`, into the first `len` bytes of `out`, which is padded by `SLACK`.
    pub(super) fn read(
        tree: &Tree, len: usize, levels: &mut Levels, source: &mut Source<'_>, out: &mut [u8],
    ) -> Result<(), CodecError> = read_on
}

#[inline(always)]
unsafe fn read_on<K: Masked>(
    tree: &Tree,
    len: usize,
    levels: &mut Levels,
    source: &mut Source<'_>,
    out: &mut [u8],
) -> Result<(), CodecError> {
    if let [symbol] = tree.leaves[..] {
        out[..len].fill(symbol);
        return Ok(());
    }
    find_spans(tree, len, &mut levels.spans, source)?;
    let Source { bits, later, step, mut asked, .. } = *source;
    for (node, span) in tree.nodes.iter().zip(&levels.spans).rev() {
        let (above, below) = levels.sides.split_at_mut(usize::from(node.depth));
        let out = match above.last_mut() {
            Some(sides) => {
                let side = &mut sides[usize::from(node.side)];
                make_room(side, span.len);
                &mut side[..]
            }
            None => &mut *out,
        };
        let [left, right] = [0, 1].map(|side| match node.symbols[side] {
            Some(symbol) => Side::Same(symbol),
            None => Side::Stream(&below[0][side]),
        });
        let masks = bits.words(span.at, span.len).inspect(|_| {
            prefetch_line(later, asked);
            asked += step;
        });
        // SAFETY: by the caller's promise; `find_spans` counted these bits.
        unsafe { merge::<K>(masks, (span.len, span.rights), left, right, out) };
    }
    source.asked = asked;
    Ok(())
}

/// Where the bits of each node are: how many of a node's are set tells how long its sides are.
#[inline(always)]
fn find_spans(
    tree: &Tree,
    len: usize,
    spans: &mut Vec<Span>,
    source: &mut Source<'_>,
) -> Result<(), CodecError> {
    let mut lens = [[0; 2]; DEPTHS + 1];
    lens[0][0] = len;
    spans.clear();
    for Node { depth, side, .. } in &tree.nodes {
        let (depth, side) = (usize::from(*depth), usize::from(*side));
        let (at, len) = (source.at, lens[depth][side]);
        if len > source.bits.len() - at {
            return Err(CodecError::Damaged("dense plane too short"));
        }
        let rights = source.bits.ones(at, len);
        lens[depth + 1] = [len - rights, rights];
        source.at += len;
        spans.push(Span { at, len, rights });
    }
    Ok(())
}
