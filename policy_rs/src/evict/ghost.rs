//! Memory of blocks that left: their key, when they were last used, and one byte.
//!
//! Owns: a set-associative table of 8-byte entries, newest first within a set, so the oldest of the
//! set makes room. Bounded by construction and never grows. Approximate in three harmless ways: a
//! set may forget before the table is full, keys are cut to 32 bits beside their set, and stamps to
//! multiples of 64.

const WAYS: usize = 8;
const VALUE_BITS: u32 = 8;
const STAMP_BITS: u32 = 24;
/// Stamps are kept in units of 2^6.
const STAMP_SHIFT: u32 = 6;
const TAG_SHIFT: u32 = VALUE_BITS + STAMP_BITS;
/// No live entry is zero: tags never are.
const EMPTY: u64 = 0;

/// What is remembered of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ghost {
    pub(super) value: u8,
    pub(super) stamp: u32,
}

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
    pub(super) fn remember(&mut self, key: u64, ghost: Ghost) {
        self.recall(key);
        let (set, tag) = self.locate(key);
        let entries = &mut self.sets[set];
        if entries[WAYS - 1] != EMPTY {
            self.counts[value_of(entries[WAYS - 1]) as usize] -= 1;
        }
        entries.copy_within(0..WAYS - 1, 1);
        let stamp = u64::from(ghost.stamp >> STAMP_SHIFT) & ((1 << STAMP_BITS) - 1);
        entries[0] = tag << TAG_SHIFT | stamp << VALUE_BITS | u64::from(ghost.value);
        self.counts[ghost.value as usize] += 1;
    }

    /// What is remembered of `key`, which is forgotten.
    pub(super) fn recall(&mut self, key: u64) -> Option<Ghost> {
        let (set, tag) = self.locate(key);
        let entries = &mut self.sets[set];
        let at = entries.iter().position(|&entry| entry >> TAG_SHIFT == tag)?;
        let entry = entries[at];
        entries.copy_within(at + 1..WAYS, at);
        entries[WAYS - 1] = EMPTY;
        self.counts[value_of(entry) as usize] -= 1;
        let stamp = (entry >> VALUE_BITS) as u32 & ((1 << STAMP_BITS) - 1);
        Some(Ghost { value: value_of(entry), stamp: stamp << STAMP_SHIFT })
    }

    /// The set of `key` and its tag, which is not zero.
    fn locate(&self, key: u64) -> (usize, u64) {
        // Keys are cut from a hash in the product but may be small integers elsewhere: mix them.
        let mut mixed = (key ^ (key >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^= mixed >> 29;
        mixed = mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^= mixed >> 32;
        let set = ((u128::from(mixed) * self.sets.len() as u128) >> 64) as usize;
        (set, (mixed & u64::from(u32::MAX)).max(1))
    }
}

fn value_of(entry: u64) -> u8 {
    entry as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ghost(value: u64) -> Ghost {
        Ghost { value: value as u8, stamp: 64 * value as u32 }
    }

    #[test]
    fn remembers_until_recalled() {
        let mut ghosts = GhostTable::new(1024);
        for key in 0..500 {
            ghosts.remember(key, ghost(key % 7));
        }
        assert_eq!(ghosts.recall(13), Some(Ghost { value: 6, stamp: 384 }));
        assert_eq!(ghosts.recall(13), None);
        assert_eq!(ghosts.recall(10_000), None);
    }

    #[test]
    fn counts_match_the_entries() {
        let mut ghosts = GhostTable::new(64);
        for key in 0..10_000u64 {
            ghosts.remember(key, ghost(key % 3));
        }
        let total: usize = (0..3).map(|value| ghosts.count(value)).sum();
        assert_eq!(total, 64, "a table that was overfilled is exactly full");
        let found = (0..10_000u64).filter(|&key| ghosts.recall(key).is_some()).count();
        assert_eq!(found, 64);
        assert_eq!((0..3).map(|value| ghosts.count(value)).sum::<usize>(), 0);
    }
}
