//! How much a second of work on a replica costs besides the request that causes it.
//!
//! Owns: running averages of the gap between arrivals and of the work they bring. While a replica
//! has a backlog, work added to it delays everyone who arrives before the backlog has drained. At
//! utilization ρ a backlog of `n` requests drains in the time of `n / (1 − ρ)` services, in which
//! `ρ·n / (1 − ρ)` requests arrive: so many are delayed, and that is what a second of avoidable
//! work is worth.
//!
//! On an idle cluster the price vanishes and the fastest placement wins; near saturation it makes
//! the router prefer the replica with the most cache over one that is free a little sooner.

/// Arrivals over which the averages forget.
const MEMORY: f64 = 200.0;
/// Utilization is measured with noise, and 1 / (1 − ρ) explodes near 1.
const UTILIZATION_MAX: f64 = 0.97;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Flow {
    last_s: Option<f64>,
    gap_s: f64,
    work_s: f64,
    seen: f64,
}

impl Flow {
    /// A request arrived and brings `work_s` of work.
    pub(super) fn observe(&mut self, now_s: f64, work_s: f64) {
        let gap_s = self.last_s.map_or(0.0, |last_s| (now_s - last_s).max(0.0));
        self.last_s = Some(now_s);
        self.seen = (self.seen + 1.0).min(MEMORY);
        self.gap_s += (gap_s - self.gap_s) / self.seen;
        self.work_s += (work_s - self.work_s) / self.seen;
    }

    /// Requests that a second of work delays by a second each, when `waiting` requests wait for
    /// `replicas` replicas.
    pub(super) fn delayed(&self, waiting: u64, replicas: usize) -> f64 {
        if replicas == 0 || self.gap_s <= 0.0 {
            return 0.0;
        }
        let replicas = replicas as f64;
        let utilization = (self.work_s / (self.gap_s * replicas)).min(UTILIZATION_MAX);
        utilization * waiting as f64 / replicas / (1.0 - utilization)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steady(gap_s: f64, work_s: f64) -> Flow {
        let mut flow = Flow::default();
        for arrival in 0..2000 {
            flow.observe(f64::from(arrival) * gap_s, work_s);
        }
        flow
    }

    #[test]
    fn grows_with_the_backlog_and_the_utilization() {
        let half = steady(1.0, 2.0);
        assert_eq!(half.delayed(0, 4), 0.0);
        assert!((half.delayed(8, 4) - 2.0).abs() < 0.1, "2 waiting each at half utilization");
        assert!(steady(1.0, 3.6).delayed(8, 4) > 4.0 * half.delayed(8, 4));
    }

    #[test]
    fn is_bounded_in_overload_and_silent_without_history() {
        assert!(steady(1.0, 50.0).delayed(4, 4) <= 1.0 / (1.0 - UTILIZATION_MAX) + 1e-9);
        assert_eq!(Flow::default().delayed(100, 4), 0.0);
        assert_eq!(steady(0.0, 1.0).delayed(100, 4), 0.0, "one burst tells no rate");
    }
}
