//! What to simulate.

use serde::{Deserialize, Serialize};

use crate::route::{Costs, Prefill, TierCost};

/// One run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Nodes, each with one replica and one store.
    pub nodes: usize,
    /// Blocks of each engine's own cache.
    pub device_blocks: usize,
    /// Blocks of each store in memory.
    pub dram_blocks: usize,
    /// Blocks of each store on disk.
    pub nvme_blocks: usize,
    /// Name of the routing rule.
    pub router: String,
    /// Name of the eviction policy.
    pub policy: String,
    /// Arrivals are this much faster than in the trace.
    pub speed: f64,
    /// Requests whose predicted time to first token is longer are refused by routers that can.
    pub slo_s: Option<f64>,
    /// Share of requests whose hint (will a later request extend me?) is right; none for no hints.
    pub hint_accuracy: Option<f64>,
    /// Nodes load from other nodes. Without, each has only what it computed itself.
    pub peers: bool,
    /// Seconds between load reports of a node.
    pub report_s: f64,
    /// Seed of every random choice.
    pub seed: u64,
    /// Part of the trace, as fractions of its requests.
    pub slice: (f64, f64),
    /// Return the outcome of every request too.
    pub series: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            nodes: 8,
            device_blocks: 0,
            dram_blocks: 5860,
            nvme_blocks: 0,
            router: "ours".to_owned(),
            policy: "ours".to_owned(),
            speed: 1.0,
            slo_s: None,
            hint_accuracy: None,
            peers: true,
            report_s: 0.02,
            seed: 0,
            slice: (0.0, 1.0),
            series: false,
        }
    }
}

impl Config {
    /// Check the ranges.
    ///
    /// # Errors
    /// Names the field and what it must be.
    pub fn validate(&self) -> Result<(), String> {
        let positive = |name: &str, value: f64| {
            if value > 0.0 && value.is_finite() {
                return Ok(());
            }
            Err(format!("{name} is {value}: it must be positive"))
        };
        if self.nodes == 0 || self.nodes > 100_000 {
            return Err(format!("nodes is {}: it must be 1 to 100,000", self.nodes));
        }
        if self.dram_blocks == 0 {
            return Err("dram_blocks is 0: the store needs memory".to_owned());
        }
        positive("speed", self.speed)?;
        self.slo_s.map_or(Ok(()), |slo_s| positive("slo_s", slo_s))?;
        let (from, to) = self.slice;
        if !(0.0 <= from && from < to && to <= 1.0) {
            return Err(format!("slice is {from}:{to}: it must be two rising fractions"));
        }
        match self.hint_accuracy {
            Some(share) if !(0.0..=1.0).contains(&share) => {
                Err(format!("hint_accuracy is {share}: it must be 0 to 1"))
            }
            _ => Ok(()),
        }
    }
}

/// Measured costs of a node, as in a profile file. Unknown keys are notes of its author.
#[derive(Clone, Debug, Deserialize)]
pub struct Profile {
    /// What it was measured on.
    pub name: String,
    /// Seconds of any prefill.
    pub fixed_s: f64,
    /// Seconds a token.
    pub token_s: f64,
    /// Seconds a token and token of context.
    pub attn_s: f64,
    /// Bytes of KV a token.
    pub kv_bytes_per_token: f64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Load costs.
    pub tiers: Tiers,
    /// Seconds a generated token.
    pub decode_s_per_token: f64,
    /// Requests that decode at once.
    pub max_decode: u32,
}

/// Load costs by tier.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Tiers {
    /// The engine's own cache.
    pub device: TierCost,
    /// The node's memory.
    pub dram: TierCost,
    /// The node's disk.
    pub nvme: TierCost,
    /// Another node's memory.
    pub peer: TierCost,
}

impl Profile {
    /// The cost model the router predicts with.
    #[must_use]
    pub fn costs(&self) -> Costs {
        let tiers = &self.tiers;
        Costs {
            prefill: Prefill { fixed_s: self.fixed_s, token_s: self.token_s, attn_s: self.attn_s },
            tiers: [tiers.device, tiers.dram, tiers.nvme, tiers.peer],
            kv_bytes_per_token: self.kv_bytes_per_token,
            block_tokens: self.block_tokens,
        }
    }
}
