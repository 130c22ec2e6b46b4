//! Algorithm 1 of Mooncake (FAST'25).
//!
//! An instance whose own prefix is much shorter than the best one in the cluster is scored as if it
//! fetched the difference, any other with its own prefix; the least
//! `transfer + queue + prefill` wins and a request that would miss its objective is refused. The
//! paper tunes the threshold by hand and does not print it.

use super::{Costs, Decision, Plan, Query, Rng, Router, Runs, Tier, View};

/// Fetch when the best prefix is longer than the instance's own by more than this factor. Of 1,
/// 1.5, 2, 4 and 16, the value that serves the rule best overall on the conversation trace.
const BALANCING_THRESHOLD: f64 = 1.0;

/// See the module.
pub struct Mooncake {
    costs: Costs,
    slo_s: Option<f64>,
    rng: Rng,
}

impl Mooncake {
    /// A rule with an optional objective for the time to first token.
    #[must_use]
    pub fn new(costs: Costs, slo_s: Option<f64>, rng: Rng) -> Self {
        Self { costs, slo_s, rng }
    }

    fn prefill_s(&self, tokens: u32, blocks: u32) -> f64 {
        let cached = (blocks * self.costs.block_tokens).min(tokens.saturating_sub(1));
        self.costs.prefill.seconds(tokens - cached, cached)
    }

    fn score(&self, query: &Query<'_>, queue_s: f64, own: &Runs, best: u32) -> f64 {
        let local = own.on_node();
        if f64::from(best) > BALANCING_THRESHOLD * f64::from(local) {
            let transfer_s = self.costs.load_s(Tier::Peer, best - local);
            transfer_s + queue_s + self.prefill_s(query.tokens, best)
        } else {
            queue_s + self.prefill_s(query.tokens, local)
        }
    }
}

impl Router for Mooncake {
    fn route(&mut self, query: &Query<'_>, view: &View<'_>) -> Decision {
        let best = view.runs.iter().map(Runs::on_node).max().unwrap_or(0);
        let mut best_s = f64::INFINITY;
        let scored = view.accepting().map(|replica| {
            let queue_s = view.loads[replica].queue_s;
            let score = self.score(query, queue_s, &view.runs[replica], best);
            best_s = best_s.min(score);
            (replica, score)
        });
        let scored: Vec<(usize, f64)> = scored.collect();
        match self.rng.argmin(scored.into_iter()) {
            Some(replica) if self.slo_s.is_none_or(|slo_s| best_s <= slo_s) => Decision::Go(Plan {
                replica,
                queue_s: view.loads[replica].queue_s,
                reuse: self.costs.best_reuse(query.tokens, &view.reach(replica)),
            }),
            _ => Decision::Reject { best_s },
        }
    }
}
