//! How long things took: counts by upper bound, written by any thread without a lock.
//!
//! A reader sees each count whole, but counts and sum of slightly different moments.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds in µs; what took longer counts for the total only.
pub const BOUNDS_US: [u64; 10] =
    [100, 250, 500, 1000, 2500, 5000, 10_000, 50_000, 250_000, 1_000_000];

/// Durations since the store started.
#[derive(Debug, Default)]
pub struct Latency {
    within: [AtomicU64; BOUNDS_US.len()],
    count: AtomicU64,
    sum_us: AtomicU64,
}

impl Latency {
    /// Something took this long.
    pub fn record(&self, took: Duration) {
        let us = took.as_micros() as u64;
        if let Some(at) = BOUNDS_US.iter().position(|&bound| us <= bound) {
            self.within[at].fetch_add(1, Ordering::Relaxed);
        }
        self.sum_us.fetch_add(us, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// `name_us_le_BOUND` for each bound, counting all below it too, `name_us_count`, `name_us_sum`.
    pub fn values(&self, name: &str) -> Vec<(String, u64)> {
        let mut below = 0;
        let bounds = BOUNDS_US.iter().zip(&self.within).map(|(bound, within)| {
            below += within.load(Ordering::Relaxed);
            (format!("{name}_us_le_{bound}"), below)
        });
        let mut values: Vec<_> = bounds.collect();
        values.push((format!("{name}_us_count"), self.count.load(Ordering::Relaxed)));
        values.push((format!("{name}_us_sum"), self.sum_us.load(Ordering::Relaxed)));
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_counts_all_below_it() {
        let latency = Latency::default();
        for us in [100, 101, 9_999_999] {
            latency.record(Duration::from_micros(us));
        }
        let values = latency.values("read");
        let value = |name: &str| values.iter().find(|(n, _)| n == name).map(|(_, value)| *value);
        assert_eq!(value("read_us_le_100"), Some(1));
        assert_eq!(value("read_us_le_250"), Some(2));
        assert_eq!(value("read_us_le_1000000"), Some(2));
        assert_eq!(value("read_us_count"), Some(3));
        assert_eq!(value("read_us_sum"), Some(10_000_200));
    }
}
