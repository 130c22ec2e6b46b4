//! Which replica answers a request.
//!
//! Owns: the time-to-first-token score of the product, the reservations that keep bursts from
//! herding, the prediction of blocks that are being computed, and the rules of other systems as
//! controls. No I/O: the caller looks prefixes up in its index and passes what it found.
//!
//! Invariants: a decision names a replica that accepts requests, or none exists; all coefficients
//! come from [`Costs`], which the caller measures; ties are broken at random from a seeded
//! generator, so a run can be repeated.
//! Fails: never. Without an accepting replica, or over the latency objective, the answer is
//! [`Decision::Reject`] with the reason.

mod cost;
mod dynamo;
mod flow;
mod ledger;
mod mooncake;
mod pending;
mod planner;
mod ray_prefix;
mod rng;
mod simple;
mod ttft;

use std::str::FromStr;

pub use cost::{Costs, Prefill, Reuse, Runs, TIERS, Tier, TierCost};
pub use dynamo::Dynamo;
use ledger::Ledger;
pub use ledger::Row;
pub use mooncake::Mooncake;
pub use planner::{Among, Planner};
pub use ray_prefix::RayPrefix;
pub use rng::Rng;
pub use simple::{LongestPrefix, PowerOfTwo, RoundRobin};
pub use ttft::TtftRouter;

/// A request as the router sees it.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Prompt tokens.
    pub tokens: u32,
    /// 64 bits of the key of each block of the prompt, from the root.
    pub keys: &'a [u64],
}

/// What a replica is busy with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// Seconds until it could start another prompt.
    pub queue_s: f64,
    /// Prompt tokens accepted and not yet computed or loaded.
    pub prefill_tokens: u64,
    /// Requests accepted whose prompt has not ended.
    pub waiting: u32,
    /// Requests accepted and not finished.
    pub requests: u32,
    /// Blocks of KV that its unfinished requests hold.
    pub active_blocks: u64,
    /// It takes requests.
    pub accepting: bool,
}

/// The cluster at the moment of a decision; all slices have one entry per replica.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The caller's clock.
    pub now_s: f64,
    /// Loads, reservations included.
    pub loads: &'a [Load],
    /// Leading blocks of the prompt each replica can reach on its own node.
    pub runs: &'a [Runs],
    /// Leading blocks of the prompt that some node of the cluster holds.
    pub cluster_run: u32,
    /// Wins between replicas that are equal otherwise.
    pub prefer: Option<usize>,
    /// What each replica pays for blocks of other nodes; missing ones pay the router's own costs.
    pub links: &'a [TierCost],
}

impl View<'_> {
    /// Replicas that take requests.
    pub fn accepting(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.loads.len()).filter(|&replica| self.loads[replica].accepting)
    }

    /// `costs` as `replica` pays them.
    #[must_use]
    pub fn costs(&self, costs: &Costs, replica: usize) -> Costs {
        let mut costs = *costs;
        if let Some(link) = self.links.get(replica) {
            costs.tiers[Tier::Peer as usize] = *link;
        }
        costs
    }

    /// What `replica` can reach, other nodes included.
    #[must_use]
    pub fn reach(&self, replica: usize) -> Runs {
        let mut runs = self.runs[replica];
        runs.extend(Tier::Peer, self.cluster_run);
        runs
    }
}

/// A decision and what it rests on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// The chosen replica.
    pub replica: usize,
    /// Predicted wait before the prompt starts.
    pub queue_s: f64,
    /// Predicted reuse, with its load and prefill seconds.
    pub reuse: Reuse,
}

impl Plan {
    /// Predicted time to first token.
    #[must_use]
    pub fn ttft_s(&self) -> f64 {
        self.queue_s + self.reuse.total_s()
    }
}

/// The router's answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decision {
    /// Send the request there.
    Go(Plan),
    /// Refuse it now. `best_s` is the best time to first token on offer, infinite if no replica
    /// takes requests; it is also a sensible `Retry-After`.
    Reject {
        /// Seconds.
        best_s: f64,
    },
}

/// A routing rule. A returned [`Decision::Go`] is final: rules that keep a history record it.
pub trait Router: Send + Sync {
    /// Decide.
    fn route(&mut self, query: &Query<'_>, view: &View<'_>) -> Decision;

    /// Newer measurements. Rules that do not predict ignore them.
    fn set_costs(&mut self, _costs: &Costs) {}
}

/// The plan for a replica that was chosen by other means than its score.
fn plan_for(costs: &Costs, query: &Query<'_>, view: &View<'_>, replica: Option<usize>) -> Decision {
    replica.map_or(Decision::Reject { best_s: f64::INFINITY }, |replica| {
        Decision::Go(Plan {
            replica,
            queue_s: view.loads[replica].queue_s,
            reuse: costs.best_reuse(query.tokens, &view.reach(replica)),
        })
    })
}

/// The rules a router can be built with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterKind {
    /// Time to first token, with reservations and predictions.
    Ours,
    /// One after the other.
    RoundRobin,
    /// The shorter queue of two at random: Ray Serve's default.
    PowerOfTwo,
    /// The longest local prefix, whatever the load.
    LongestPrefix,
    /// Ray Serve LLM's prefix affinity.
    RayPrefix,
    /// Dynamo's KV cost.
    Dynamo,
    /// Mooncake's Algorithm 1.
    Mooncake,
}

impl RouterKind {
    /// A router.
    #[must_use]
    pub fn build(self, costs: &Costs, slo_s: Option<f64>, seed: u64) -> Box<dyn Router> {
        let rng = Rng::new(seed);
        match self {
            Self::Ours => Box::new(TtftRouter::new(*costs, slo_s, rng)),
            Self::RoundRobin => Box::new(RoundRobin::new(*costs)),
            Self::PowerOfTwo => Box::new(PowerOfTwo::new(*costs, rng)),
            Self::LongestPrefix => Box::new(LongestPrefix::new(*costs, rng)),
            Self::RayPrefix => Box::new(RayPrefix::new(*costs, rng)),
            Self::Dynamo => Box::new(Dynamo::new(*costs, rng)),
            Self::Mooncake => Box::new(Mooncake::new(*costs, slo_s, rng)),
        }
    }
}

impl FromStr for RouterKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Ok(match name {
            "ours" => Self::Ours,
            "round-robin" => Self::RoundRobin,
            "pow2" => Self::PowerOfTwo,
            "longest-prefix" => Self::LongestPrefix,
            "ray-prefix" => Self::RayPrefix,
            "dynamo" => Self::Dynamo,
            "mooncake" => Self::Mooncake,
            other => {
                return Err(format!(
                    "unknown router {other:?}: use ours, round-robin, pow2, longest-prefix, \
                     ray-prefix, dynamo or mooncake"
                ));
            }
        })
    }
}
