//! Strings of bits: what the nodes of the wavelet tree are stored in.

use crate::masked::Words;

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
    len: usize,
}

impl BitString {
    /// Take a copy, so that what is counted and what is read later are the same bits.
    pub(super) fn load(&mut self, bytes: &[u8]) {
        let (whole, rest) = bytes.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.words.clear();
        self.words.extend(whole.iter().chain([&last]).map(|word| u64::from_le_bytes(*word)));
        // A reader looks at two words at a time, the second of which may lie behind the end.
        self.words.push(0);
        self.len = 8 * bytes.len();
    }

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
        Self { words: bits.words, len: pattern.len * copies }
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

    /// Set bits among the `len` from `at` on.
    #[inline(always)]
    pub(super) fn ones(&self, at: usize, len: usize) -> usize {
        let whole: u32 = (0..len / 64).map(|i| self.word(at + 64 * i).count_ones()).sum();
        let rest = self.word(at + len / 64 * 64) & ((1 << (len % 64)) - 1);
        whole as usize + rest.count_ones() as usize
    }

    /// Its words from `at` on.
    #[inline(always)]
    pub(super) fn from(&self, at: usize) -> Straight<'_> {
        Straight { bits: self, at }
    }

    /// Its words, starting over at the end of the repeated pattern.
    #[inline(always)]
    pub(super) fn cycle(&self) -> Cycle<'_> {
        Cycle { bits: self, at: 0 }
    }
}

/// Words one after another.
pub(super) struct Straight<'a> {
    bits: &'a BitString,
    at: usize,
}

impl Words for Straight<'_> {
    #[inline(always)]
    fn next(&mut self) -> u64 {
        let word = self.bits.word(self.at);
        self.at += 64;
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

    proptest! {
        #[test]
        fn what_is_put_is_read(fields in proptest::collection::vec((any::<u64>(), 0usize..=64), 0..40)) {
            let mut writer = BitWriter::default();
            let cut = |bits: u64, count: usize| if count == 0 { 0 } else { bits << (64 - count) >> (64 - count) };
            fields.iter().for_each(|(bits, count)| writer.put(cut(*bits, *count), *count));
            let mut bytes = Vec::new();
            writer.write(&mut bytes);
            let mut string = BitString::default();
            string.load(&bytes);
            let mut at = 0;
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
