//! The cost of NVIDIA Dynamo's KV router with its defaults, in blocks:
//!
//! ```text
//! max(0, active_prefill + incoming − credit) + active blocks,  argmin, ties at random
//! credit = 1.0·device + 0.75·host + 0.25·disk
//! ```

use super::{Costs, Decision, Query, Rng, Router, Tier, View, plan_for};

const HOST_CREDIT: f64 = 0.75;
const DISK_CREDIT: f64 = 0.25;

/// See the module.
pub struct Dynamo {
    costs: Costs,
    rng: Rng,
}

impl Dynamo {
    /// A rule that breaks ties with `rng`.
    #[must_use]
    pub fn new(costs: Costs, rng: Rng) -> Self {
        Self { costs, rng }
    }
}

impl Router for Dynamo {
    fn route(&mut self, query: &Query<'_>, view: &View<'_>) -> Decision {
        let block_tokens = f64::from(self.costs.block_tokens);
        let incoming = f64::from(query.tokens) / block_tokens;
        let chosen = self.rng.argmin(view.accepting().map(|replica| {
            let (runs, load) = (&view.runs[replica], &view.loads[replica]);
            let device = f64::from(runs.up_to(Tier::Device));
            let host = f64::from(runs.up_to(Tier::Dram)) - device;
            let disk = f64::from(runs.on_node()) - host - device;
            let credit = device + HOST_CREDIT * host + DISK_CREDIT * disk;
            let prefill = load.prefill_tokens as f64 / block_tokens + incoming - credit;
            (replica, prefill.max(0.0) + load.active_blocks as f64)
        }));
        plan_for(&self.costs, query, view, chosen)
    }
}
