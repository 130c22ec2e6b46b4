//! The product's router: the least time to first token, with avoidable work priced by the load.
//!
//! For every replica it predicts `queue + load + prefill` over the best usable prefix, counting all
//! tiers of all nodes and the blocks that are in the making. The least
//! `queue + price·(load + prefill + displaced)` wins. The price of a second of work is 1 for the
//! request itself, plus the later requests that it holds up: on the cluster (see `flow`), and on
//! this replica in particular. `displaced` is what blocks pulled from another node will cost, since
//! each takes the place of one that some later request would have used. Alone on an idle cluster
//! all this is the plain time to first token.
//!
//! Owns: the blocks in the making and the measured flow. Reservations are the caller's ledger's.

use super::flow::Flow;
use super::pending::{Pending, PendingBlocks};
use super::{Costs, Decision, Plan, Query, Reuse, Rng, Router, Runs, Tier, View};

/// Share of the requests waiting on a replica that new work there is priced for, besides the price
/// on the whole cluster. It sends long prompts where few wait, and so keeps the short ones from
/// waiting behind them. More of it lowers the mean further and lifts the tail: 0.2 costs the 99th
/// percentile 10 % in overload.
const OWN_QUEUE: f64 = 0.08;
/// Chance that the block a pulled one displaces would have been used again.
const DISPLACED_REUSE: f64 = 0.015;

/// See the module.
pub struct TtftRouter {
    costs: Costs,
    slo_s: Option<f64>,
    rng: Rng,
    pending: PendingBlocks,
    flow: Flow,
    making: Vec<Option<Pending>>,
    plans: Vec<Plan>,
}

impl TtftRouter {
    /// A router with an optional objective for the time to first token.
    #[must_use]
    pub fn new(costs: Costs, slo_s: Option<f64>, rng: Rng) -> Self {
        Self {
            costs,
            slo_s,
            rng,
            pending: PendingBlocks::default(),
            flow: Flow::default(),
            making: Vec::new(),
            plans: Vec::new(),
        }
    }

    /// What `replica` will reach once its queue has drained, blocks in the making included.
    fn reach(&self, view: &View<'_>, replica: usize) -> Runs {
        let mut runs = view.reach(replica);
        if self.making.is_empty() {
            return runs;
        }
        let starts_s = view.now_s + view.loads[replica].queue_s;
        let own = |made: &Pending| made.replica == replica;
        let local = view.runs[replica].on_node();
        let made_here = self.made_from(local, own);
        if made_here > 0 {
            runs.extend(Tier::Dram, local + made_here);
        }
        let reached = runs.up_to(Tier::Peer);
        let made = self.made_from(reached, |made| own(made) || made.ready_s <= starts_s);
        runs.extend(Tier::Peer, reached + made);
        runs
    }

    /// Blocks in the making that count, from block `from` on without a gap.
    fn made_from(&self, from: u32, counts: impl Fn(&Pending) -> bool) -> u32 {
        let blocks = self.making.iter().skip(from as usize);
        blocks.take_while(|block| block.as_ref().is_some_and(&counts)).count() as u32
    }

    /// A plan for every accepting replica, into `self.plans`.
    fn plan_all(&mut self, query: &Query<'_>, view: &View<'_>) {
        let mut making = std::mem::take(&mut self.making);
        self.pending.look_up(query.keys, view.now_s, &mut making);
        self.making = making;
        let mut plans = std::mem::take(&mut self.plans);
        plans.clear();
        plans.extend(view.accepting().map(|replica| {
            Plan {
                replica,
                queue_s: view.loads[replica].queue_s,
                reuse: view
                    .costs(&self.costs, replica)
                    .best_reuse(query.tokens, &self.reach(view, replica)),
            }
        }));
        self.plans = plans;
    }
}

impl Router for TtftRouter {
    fn route(&mut self, query: &Query<'_>, view: &View<'_>) -> Decision {
        self.plan_all(query, view);
        let best_s = self.plans.iter().map(Plan::ttft_s).fold(f64::INFINITY, f64::min);
        if self.plans.is_empty() || self.slo_s.is_some_and(|slo_s| best_s > slo_s) {
            return Decision::Reject { best_s };
        }
        let waiting = view.accepting().map(|replica| u64::from(view.loads[replica].waiting)).sum();
        let price = 1.0 + self.flow.delayed(waiting, self.plans.len());
        let objective_s = self.slo_s.unwrap_or(f64::INFINITY);
        let ranked = self.plans.iter().enumerate().filter(|(_, plan)| plan.ttft_s() <= objective_s);
        let costs = &self.costs;
        let cost = |plan: &Plan| {
            let own = OWN_QUEUE * f64::from(view.loads[plan.replica].waiting);
            let work_s = plan.reuse.total_s() + displaced_s(costs, &plan.reuse);
            plan.queue_s + (price + own) * work_s
        };
        let Some(least) = self.rng.argmin(ranked.map(|(at, plan)| (at, cost(plan)))) else {
            return Decision::Reject { best_s };
        };
        let drawn = self.plans[least];
        let equal = |plan: &&Plan| Some(plan.replica) == view.prefer && cost(plan) == cost(&drawn);
        let chosen = self.plans.iter().find(equal).copied().unwrap_or(drawn);
        self.flow.observe(view.now_s, chosen.reuse.total_s());
        let local = view.runs[chosen.replica].on_node() as usize;
        let new = query.keys.get(local..).unwrap_or_default();
        self.pending.announce(chosen.replica, new, view.now_s, view.now_s + chosen.ttft_s());
        Decision::Go(chosen)
    }

    fn set_costs(&mut self, costs: &Costs) {
        self.costs = *costs;
    }
}

/// Seconds that later requests will compute because pulled blocks took the place of others.
fn displaced_s(costs: &Costs, reuse: &Reuse) -> f64 {
    let pulled = reuse.blocks[Tier::Peer as usize] * costs.block_tokens;
    DISPLACED_REUSE * f64::from(pulled) * costs.prefill.token_s
}
