//! Memory of blocks that left: their key and one byte.
//!
//! Owns: a set-associative table of 8-byte entries, newest first within a set, so the oldest of the
//! set makes room. Bounded by construction and never grows. Approximate in two harmless ways: a set
//! may forget before the table is full, and keys are cut to 56 bits.

const WAYS: usize = 8;
const VALUE_BITS: u32 = 8;
/// Keys are mapped so that no live entry is zero.
const EMPTY: u64 = 0;

/// See the module.
#[derive(Debug)]
pub(super) struct GhostTable {
    sets: Vec<[u64; WAYS]>,
    counts: [usize; 256],
}

impl GhostTable {
    /// A table that remembers about `capacity` blocks.
    pub(super) fn new(capacity: usize) -> Self {
        let sets = capacity.div_ceil(WAYS).max(1);
        Self { sets: vec![[EMPTY; WAYS]; sets], counts: [0; 256] }
    }

    pub(super) fn bytes(&self) -> usize {
        self.sets.len() * WAYS * size_of::<u64>()
    }

    /// Entries that carry `value`.
    pub(super) fn count(&self, value: u8) -> usize {
        self.counts[value as usize]
    }

    /// Remember `key`, in place of what was known about it.
    pub(super) fn remember(&mut self, key: u64, value: u8) {
        self.recall(key);
        let (set, tag) = self.locate(key);
        let entries = &mut self.sets[set];
        if entries[WAYS - 1] != EMPTY {
            self.counts[(entries[WAYS - 1] as u8) as usize] -= 1;
        }
        entries.copy_within(0..WAYS - 1, 1);
        entries[0] = tag | u64::from(value);
        self.counts[value as usize] += 1;
    }

    /// The value remembered for `key`, which is forgotten.
    pub(super) fn recall(&mut self, key: u64) -> Option<u8> {
        let (set, tag) = self.locate(key);
        let entries = &mut self.sets[set];
        let at = entries.iter().position(|&entry| entry & !0xff == tag && entry != EMPTY)?;
        let value = entries[at] as u8;
        entries.copy_within(at + 1..WAYS, at);
        entries[WAYS - 1] = EMPTY;
        self.counts[value as usize] -= 1;
        Some(value)
    }

    fn locate(&self, key: u64) -> (usize, u64) {
        // Keys are cut from a hash in the product but may be small integers elsewhere: mix them.
        let mut mixed = (key ^ (key >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^= mixed >> 29;
        mixed = mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^= mixed >> 32;
        let set = ((u128::from(mixed) * self.sets.len() as u128) >> 64) as usize;
        let tag = mixed << VALUE_BITS;
        (set, if tag == 0 { 1 << VALUE_BITS } else { tag })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_until_recalled() {
        let mut ghosts = GhostTable::new(1024);
        for key in 0..500 {
            ghosts.remember(key, (key % 7) as u8);
        }
        assert_eq!(ghosts.recall(13), Some(6));
        assert_eq!(ghosts.recall(13), None);
        assert_eq!(ghosts.recall(10_000), None);
    }

    #[test]
    fn counts_match_the_entries() {
        let mut ghosts = GhostTable::new(64);
        for key in 0..10_000u64 {
            ghosts.remember(key, (key % 3) as u8);
        }
        let total: usize = (0..3).map(|value| ghosts.count(value)).sum();
        assert_eq!(total, 64, "a table that was overfilled is exactly full");
        let found = (0..10_000u64).filter(|&key| ghosts.recall(key).is_some()).count();
        assert_eq!(found, 64);
        assert_eq!((0..3).map(|value| ghosts.count(value)).sum::<usize>(), 0);
    }
}
