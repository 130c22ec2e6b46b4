//! What a prompt costs on a replica: loading what is cached, computing the rest.
//!
//! Owns: the measured cost model and the one rule that decides how much of a cached prefix is worth
//! loading. The router predicts with it and the simulator's nodes execute it, so both agree.

use serde::{Deserialize, Serialize};

/// Where a cached block is, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// The engine's own paged cache.
    Device,
    /// The node's shared memory.
    Dram,
    /// The node's disk.
    Nvme,
    /// Another node.
    Peer,
}

/// All tiers, nearest first.
pub const TIERS: [Tier; 4] = [Tier::Device, Tier::Dram, Tier::Nvme, Tier::Peer];

/// How many leading blocks of a prompt are reachable when only tiers up to the given one count.
/// Never decreasing from tier to tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Runs([u32; 4]);

impl Runs {
    /// Nothing cached.
    pub const NONE: Self = Self([0; 4]);

    /// Local runs; each at least as long as the one before it.
    #[must_use]
    pub fn local(device: u32, dram: u32, nvme: u32) -> Self {
        let dram = dram.max(device);
        let nvme = nvme.max(dram);
        Self([device, dram, nvme, nvme])
    }

    /// Blocks reachable through tiers up to `tier`.
    #[must_use]
    pub fn up_to(&self, tier: Tier) -> u32 {
        self.0[tier as usize]
    }

    /// Blocks reachable without another node.
    #[must_use]
    pub fn on_node(&self) -> u32 {
        self.up_to(Tier::Nvme)
    }

    /// At least `blocks` are reachable through `tier`.
    pub fn extend(&mut self, tier: Tier, blocks: u32) {
        for run in &mut self.0[tier as usize..] {
            *run = (*run).max(blocks);
        }
    }
}

/// Seconds to load from a tier.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TierCost {
    /// Seconds before the first byte.
    pub latency_s: f64,
    /// Bytes a second; none for no transfer at all.
    pub bytes_per_s: Option<f64>,
}

/// Seconds to compute `new` tokens behind a prefix:
/// `fixed_s + new·token_s + new·(prefix + new/2)·attn_s`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prefill {
    /// Seconds of any prefill.
    pub fixed_s: f64,
    /// Seconds a token.
    pub token_s: f64,
    /// Seconds a token and token of context.
    pub attn_s: f64,
}

impl Prefill {
    /// See the type.
    #[must_use]
    pub fn seconds(&self, new: u32, prefix: u32) -> f64 {
        let (new, prefix) = (f64::from(new), f64::from(prefix));
        self.fixed_s + new * self.token_s + new * (prefix + new / 2.0) * self.attn_s
    }
}

/// How much of a prompt is taken from where, and what that costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reuse {
    /// Blocks loaded from each tier.
    pub blocks: [u32; 4],
    /// Seconds of loading.
    pub load_s: f64,
    /// Seconds of computing.
    pub prefill_s: f64,
}

impl Reuse {
    /// Blocks reused.
    #[must_use]
    pub fn prefix(&self) -> u32 {
        self.blocks.iter().sum()
    }

    /// Seconds from start to first token.
    #[must_use]
    pub fn total_s(&self) -> f64 {
        self.load_s + self.prefill_s
    }
}

/// The measured cost model of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Prefill curve.
    pub prefill: Prefill,
    /// Load cost by tier, nearest first.
    pub tiers: [TierCost; 4],
    /// Bytes of KV a token.
    pub kv_bytes_per_token: f64,
    /// Tokens of a full block.
    pub block_tokens: u32,
}

impl Costs {
    /// Seconds to load `blocks` from `tier`.
    #[must_use]
    pub fn load_s(&self, tier: Tier, blocks: u32) -> f64 {
        if blocks == 0 {
            return 0.0;
        }
        let cost = &self.tiers[tier as usize];
        let bytes = f64::from(blocks) * f64::from(self.block_tokens) * self.kv_bytes_per_token;
        cost.latency_s + cost.bytes_per_s.map_or(0.0, |rate| bytes / rate)
    }

    /// The usable prefix with the least load plus prefill time.
    ///
    /// Loading is linear within a tier and prefill is concave in the tokens left, so the minimum
    /// lies at the end of a run: five candidates decide. At least one token is always computed.
    #[must_use]
    pub fn best_reuse(&self, tokens: u32, runs: &Runs) -> Reuse {
        let mut reuse = Reuse { prefill_s: self.prefill.seconds(tokens, 0), ..Reuse::default() };
        let mut best = reuse;
        for tier in TIERS {
            let blocks = runs.up_to(tier) - reuse.prefix();
            if blocks == 0 {
                continue;
            }
            reuse.blocks[tier as usize] = blocks;
            reuse.load_s += self.load_s(tier, blocks);
            let cached = (reuse.prefix() * self.block_tokens).min(tokens.saturating_sub(1));
            reuse.prefill_s = self.prefill.seconds(tokens - cached, cached);
            if reuse.total_s() <= best.total_s() {
                best = reuse;
            }
        }
        best
    }
}
