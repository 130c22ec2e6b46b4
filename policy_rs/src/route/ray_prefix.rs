//! The rule of Ray Serve LLM's `PrefixCacheAffinityRouter` with its defaults.
//!
//! Owns: the history of what was routed where (no eviction, as shipped), which stands for the
//! caches. A match of at least a tenth of the prompt goes to the replicas with the longest match,
//! anything else to the replicas that were sent the least text; among several the shorter queue of
//! two wins. The imbalance threshold is infinite as shipped, so load plays no other part.

use std::collections::HashMap;

use super::simple::shorter_of_two;
use super::{Costs, Decision, Query, Rng, Router, View, plan_for};

const MATCH_RATE_MIN: f64 = 0.1;

/// See the module.
pub struct RayPrefix {
    costs: Costs,
    rng: Rng,
    routed: HashMap<u64, Vec<u32>>,
    sent_blocks: Vec<u64>,
}

impl RayPrefix {
    /// An empty history.
    #[must_use]
    pub fn new(costs: Costs, rng: Rng) -> Self {
        Self { costs, rng, routed: HashMap::new(), sent_blocks: Vec::new() }
    }

    /// The replicas with the longest match, and its length in blocks.
    fn longest_match(&self, query: &Query<'_>, view: &View<'_>) -> (Vec<usize>, usize) {
        let mut matched: Vec<usize> = view.accepting().collect();
        for (length, key) in query.keys.iter().enumerate() {
            let Some(holders) = self.routed.get(key) else {
                return (matched, length);
            };
            let mut longer = matched.clone();
            longer.retain(|&replica| holders.contains(&(replica as u32)));
            if longer.is_empty() {
                return (matched, length);
            }
            matched = longer;
        }
        (matched, query.keys.len())
    }

    fn record(&mut self, query: &Query<'_>, replica: usize) {
        for &key in query.keys {
            let holders = self.routed.entry(key).or_default();
            if !holders.contains(&(replica as u32)) {
                holders.push(replica as u32);
                self.sent_blocks[replica] += 1;
            }
        }
    }
}

impl Router for RayPrefix {
    fn route(&mut self, query: &Query<'_>, view: &View<'_>) -> Decision {
        self.sent_blocks.resize(view.loads.len(), 0);
        let (mut candidates, length) = self.longest_match(query, view);
        if (length as f64) < MATCH_RATE_MIN * query.keys.len() as f64 || length == 0 {
            candidates = view.accepting().collect();
            let least = candidates.iter().map(|&replica| self.sent_blocks[replica]).min();
            candidates.retain(|&replica| Some(self.sent_blocks[replica]) == least);
        }
        let chosen = shorter_of_two(&mut self.rng, view, &candidates);
        if let Some(replica) = chosen {
            self.record(query, replica);
        }
        plan_for(&self.costs, query, view, chosen)
    }
}
