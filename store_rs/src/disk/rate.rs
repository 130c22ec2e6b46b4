//! How much may be written: a bucket that fills at the configured rate. Pure; time is passed in.

use crate::index::Tick;

/// See the module.
pub(super) struct Rate {
    per_s: u64,
    most: u64,
    left: u64,
    at: Tick,
}

impl Rate {
    /// `per_s` bytes a second; 0 is no limit. A bucket holds a second's worth, and `largest` at
    /// least, so that one write of that size gets its turn.
    pub(super) fn new(per_s: u64, largest: u64) -> Self {
        let most = per_s.max(largest);
        Self { per_s, most, left: most, at: 0 }
    }

    /// Bytes that may be written now.
    pub(super) fn left(&mut self, now: Tick) -> u64 {
        if self.per_s == 0 {
            return u64::MAX;
        }
        let passed = u128::from(now.saturating_sub(self.at)) * u128::from(self.per_s) / 1_000_000;
        if passed > 0 {
            self.at = now;
            let left = u128::from(self.left) + passed;
            self.left = left.min(u128::from(self.most)) as u64;
        }
        self.left
    }

    /// Whether so much is left that less urgent writes may go, too.
    pub(super) fn has_plenty(&mut self, now: Tick) -> bool {
        self.left(now) > self.most / 2
    }

    /// That much was written.
    pub(super) fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_fills_with_time_and_never_overflows() {
        let mut rate = Rate::new(1_000_000, 10);
        assert!(rate.has_plenty(0));
        rate.spend(900_000);
        assert_eq!(rate.left(0), 100_000);
        assert!(!rate.has_plenty(1));
        assert_eq!(rate.left(300_000), 400_000);
        assert_eq!(rate.left(u64::MAX), 1_000_000);
        rate.spend(u64::MAX);
        assert_eq!(rate.left(u64::MAX), 0);
        assert_eq!(Rate::new(0, 0).left(5), u64::MAX);
        assert_eq!(Rate::new(10, 5000).left(0), 5000);
    }
}
