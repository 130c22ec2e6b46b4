//! Controls that look at one thing: turn, queue length, or prefix.

use super::{Costs, Decision, Query, Rng, Router, View, plan_for};

/// One replica after the other.
pub struct RoundRobin {
    costs: Costs,
    next: usize,
}

impl RoundRobin {
    /// Starts with replica 0.
    #[must_use]
    pub fn new(costs: Costs) -> Self {
        Self { costs, next: 0 }
    }
}

impl Router for RoundRobin {
    fn route(&mut self, query: &Query<'_>, view: &View<'_>) -> Decision {
        let replicas = view.loads.len();
        let turns = (self.next..self.next + replicas).map(|turn| turn % replicas);
        let chosen = turns.into_iter().find(|&replica| view.loads[replica].accepting);
        self.next = chosen.map_or(self.next, |replica| replica + 1);
        plan_for(&self.costs, query, view, chosen)
    }
}

/// The shorter queue, in requests, of two replicas drawn at random.
pub struct PowerOfTwo {
    costs: Costs,
    rng: Rng,
}

impl PowerOfTwo {
    /// A rule that draws from `rng`.
    #[must_use]
    pub fn new(costs: Costs, rng: Rng) -> Self {
        Self { costs, rng }
    }
}

/// Power of two choices among `candidates`.
pub(super) fn shorter_of_two(
    rng: &mut Rng,
    view: &View<'_>,
    candidates: &[usize],
) -> Option<usize> {
    if candidates.len() < 2 {
        return candidates.first().copied();
    }
    let first = rng.below(candidates.len());
    let second = (first + 1 + rng.below(candidates.len() - 1)) % candidates.len();
    let pair = [candidates[first], candidates[second]];
    rng.argmin(pair.iter().map(|&replica| (replica, view.loads[replica].requests)))
}

impl Router for PowerOfTwo {
    fn route(&mut self, query: &Query<'_>, view: &View<'_>) -> Decision {
        let candidates: Vec<usize> = view.accepting().collect();
        let chosen = shorter_of_two(&mut self.rng, view, &candidates);
        plan_for(&self.costs, query, view, chosen)
    }
}

/// The longest prefix on the replica's own node; equal prefixes go to the shorter queue.
pub struct LongestPrefix {
    costs: Costs,
    rng: Rng,
}

impl LongestPrefix {
    /// A rule that breaks ties with `rng`.
    #[must_use]
    pub fn new(costs: Costs, rng: Rng) -> Self {
        Self { costs, rng }
    }
}

impl Router for LongestPrefix {
    fn route(&mut self, query: &Query<'_>, view: &View<'_>) -> Decision {
        let scored = view.accepting().map(|replica| {
            let missing = -i64::from(view.runs[replica].on_node());
            (replica, (missing, view.loads[replica].requests))
        });
        let chosen = self.rng.argmin(scored);
        plan_for(&self.costs, query, view, chosen)
    }
}
