//! Strings of bits: what the nodes of the wavelet tree are stored in.

use crate::isa::per_isa;
use crate::masked::{Masked, Words};

/// Bits being written, lowest first.
#[derive(Debug, Default)]
pub(super) struct BitWriter {
    words: Vec<u64>,
    len: usize,
}

impl BitWriter {
    pub(super) fn clear(&mut self) {
        self.words.clear();
        self.len = 0;
    }

    /// Append the low `count` (at most 64) bits of `bits`; the others must be clear.
    #[inline(always)]
    pub(super) fn put(&mut self, bits: u64, count: usize) {
        if count == 0 {
            return;
        }
        let used = self.len % 64;
        self.len += count;
        if used == 0 {
            self.words.push(bits);
            return;
        }
        if let Some(last) = self.words.last_mut() {
            *last |= bits << used;
        }
        if used + count > 64 {
            self.words.push(bits >> (64 - used));
        }
    }

    /// Append everything to `out`, rounded up to bytes.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend(self.words.iter().flat_map(|word| word.to_le_bytes()));
        out.truncate(start + self.len.div_ceil(8));
    }
}

/// Bits being read; past their end they are zeros.
#[derive(Debug, Default)]
pub(super) struct BitString {
    words: Vec<u64>,
    /// Set bits before each word.
    ranks: Vec<u32>,
    len: usize,
}

per_isa! {
    /// Take a copy, so that what is counted and what is read later are the same bits.
    pub(super) fn load(bits: &mut BitString, bytes: &[u8]) = load_on
}

#[inline(always)]
unsafe fn load_on<K: Masked>(bits: &mut BitString, bytes: &[u8]) {
    let (whole, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    bits.words.clear();
    bits.words.extend(whole.iter().map(|word| u64::from_le_bytes(*word)));
    // A reader looks at two words at a time, the second of which may lie behind the end.
    bits.words.extend([u64::from_le_bytes(last), 0]);
    bits.len = 8 * bytes.len();
    let mut rank = 0;
    bits.ranks.clear();
    bits.ranks.extend(bits.words.iter().map(|word| {
        let before = rank;
        rank += word.count_ones();
        before
    }));
}

impl BitString {
    /// A string that repeats `pattern` (not empty), so that a word can be read from any place in it.
    pub(super) fn repeating(pattern: &BitWriter) -> Self {
        let copies = 64usize.div_ceil(pattern.len);
        let mut bits = BitWriter::default();
        for _ in 0..2 * copies {
            for (word, at) in pattern.words.iter().zip((0..pattern.len).step_by(64)) {
                bits.put(*word, 64.min(pattern.len - at));
            }
        }
        bits.words.push(0);
        Self { words: bits.words, ranks: Vec::new(), len: pattern.len * copies }
    }

    /// Bits in the string.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The 64 bits from `at` on.
    #[inline(always)]
    pub(super) fn word(&self, at: usize) -> u64 {
        let (index, shift) = (at / 64, at % 64);
        let low = self.words.get(index).copied().unwrap_or(0);
        let high = self.words.get(index + 1).copied().unwrap_or(0);
        low >> shift | high << 1 << (63 - shift)
    }

    /// Set bits among the `len` from `at` on; of a string that was loaded.
    #[inline(always)]
    pub(super) fn ones(&self, at: usize, len: usize) -> usize {
        self.rank(at + len) - self.rank(at)
    }

    #[inline(always)]
    fn rank(&self, at: usize) -> usize {
        let (index, shift) = (at / 64, at % 64);
        let before = self.ranks.get(index).copied().unwrap_or(0);
        let word = self.words.get(index).copied().unwrap_or(0) & ((1 << shift) - 1);
        before as usize + word.count_ones() as usize
    }

    /// Its words from `at` on.
    #[inline(always)]
    pub(super) fn from(&self, at: usize) -> Straight<'_> {
        let (words, shift) = (self.words.get(at / 64..).unwrap_or(&[]), (at % 64) as u32);
        let mut words = words.iter();
        Straight { low: words.next().copied().unwrap_or(0), words, shift }
    }

    /// Its words, starting over at the end of the repeated pattern.
    #[inline(always)]
    pub(super) fn cycle(&self) -> Cycle<'_> {
        Cycle { bits: self, at: 0 }
    }
}

/// Words one after another, each from parts of two stored ones.
pub(super) struct Straight<'a> {
    low: u64,
    words: std::slice::Iter<'a, u64>,
    shift: u32,
}

impl Words for Straight<'_> {
    #[inline(always)]
    fn next(&mut self) -> u64 {
        let high = self.words.next().copied().unwrap_or(0);
        let word = self.low >> self.shift | high << 1 << (63 - self.shift);
        self.low = high;
        word
    }
}

/// Words of a pattern without end.
pub(super) struct Cycle<'a> {
    bits: &'a BitString,
    at: usize,
}

impl Words for Cycle<'_> {
    #[inline(always)]
    fn next(&mut self) -> u64 {
        let word = self.bits.word(self.at);
        self.at += 64;
        if self.at >= self.bits.len {
            self.at -= self.bits.len;
        }
        word
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::isa::Isa;

    proptest! {
        #[test]
        fn what_is_put_is_read(fields in proptest::collection::vec((any::<u64>(), 0usize..=64), 0..40)) {
            let mut writer = BitWriter::default();
            let cut = |bits: u64, count: usize| if count == 0 { 0 } else { bits << (64 - count) >> (64 - count) };
            fields.iter().for_each(|(bits, count)| writer.put(cut(*bits, *count), *count));
            let mut bytes = Vec::new();
            writer.write(&mut bytes);
            let mut string = BitString::default();
            load(Isa::current(), &mut string, &bytes);
            let mut at = 0;
            let mut words = string.from(at);
            for index in 0..bytes.len() / 8 {
                prop_assert_eq!(words.next(), string.word(64 * index));
            }
            for (bits, count) in fields {
                prop_assert_eq!(cut(string.word(at), count), cut(bits, count));
                prop_assert_eq!(string.ones(at, count), cut(bits, count).count_ones() as usize);
                at += count;
            }
            prop_assert_eq!(bytes.len(), at.div_ceil(8));
        }

        #[test]
        fn a_pattern_repeats(pattern in proptest::collection::vec(any::<bool>(), 1..200), words in 1usize..20) {
            let mut writer = BitWriter::default();
            pattern.iter().for_each(|bit| writer.put(u64::from(*bit), 1));
            let string = BitString::repeating(&writer);
            let mut cycle = string.cycle();
            for word in 0..words {
                let bits = cycle.next();
                for bit in 0..64 {
                    let want = pattern[(64 * word + bit) % pattern.len()];
                    prop_assert_eq!(bits >> bit & 1 == 1, want);
                }
            }
        }
    }
}
