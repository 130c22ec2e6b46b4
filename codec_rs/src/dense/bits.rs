//! Strings of bits: what the nodes of the wavelet tree are stored in.

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
        self.words.extend(whole.iter().map(|word| u64::from_le_bytes(*word)));
        // A reader looks at two words at a time, the second of which may lie behind the end.
        self.words.extend([u64::from_le_bytes(last), 0]);
        self.len = 8 * bytes.len();
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

    /// Set bits among the `len` from `at` on, all of them in the string.
    #[inline(always)]
    pub(super) fn ones(&self, at: usize, len: usize) -> usize {
        let (first, last) = (at / 64, (at + len) / 64);
        let words = &self.words[first..=last];
        let sum: u32 = words.iter().map(|word| word.count_ones()).sum();
        let before = words[0] & ((1 << (at % 64)) - 1);
        let after = words[last - first] >> ((at + len) % 64);
        (sum - before.count_ones() - after.count_ones()) as usize
    }

    /// The `len` bits from `at` on, all of them in the string, as words; the last has more of it.
    #[inline(always)]
    pub(super) fn words(&self, at: usize, len: usize) -> impl Iterator<Item = u64> {
        let (first, shift) = (at / 64, at % 64);
        let words = &self.words[first..=first + len.div_ceil(64)];
        words.windows(2).map(move |pair| pair[0] >> shift | pair[1] << 1 << (63 - shift))
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
            for (index, word) in string.words(0, string.len()).enumerate() {
                prop_assert_eq!(word, string.word(64 * index));
            }
            for (bits, count) in fields {
                prop_assert_eq!(cut(string.word(at), count), cut(bits, count));
                prop_assert_eq!(string.ones(at, count), cut(bits, count).count_ones() as usize);
                at += count;
            }
            prop_assert_eq!(bytes.len(), at.div_ceil(8));
        }
    }
}
