//! What work costs, as replicas and stores measured it; assumptions where nobody has.
//!
//! Prefill and loads from memory are means over the replicas, which run on alike machines: alone,
//! the figures of one are too noisy to prefer another by. Fetches differ with the network, so every
//! node has its own.

use mooncake_policy::route::{Costs, Prefill, Tier, TierCost};

use crate::cluster::{NodeRow, ReplicaRow};

/// What is assumed until the first measurement arrives; one prompt later it is gone.
#[derive(Debug, Clone, Copy)]
pub struct Assumed {
    /// Seconds to compute a token.
    pub token_s: f64,
    /// Rate of loads from the node's memory.
    pub dram_bytes_per_s: f64,
    /// Rate of fetches from another node.
    pub peer_bytes_per_s: f64,
}

/// See the module.
pub(super) struct Measured {
    /// Those of a replica of which nothing else is known.
    pub(super) costs: Costs,
    assumed: Assumed,
}

impl Measured {
    pub(super) fn new(assumed: Assumed) -> Self {
        let free = TierCost { latency_s: 0.0, bytes_per_s: None };
        let prefill = Prefill { fixed_s: 0.0, token_s: 0.0, attn_s: 0.0 };
        let costs = Costs { prefill, tiers: [free; 4], kv_bytes_per_token: 1.0, block_tokens: 256 };
        let mut measured = Self { costs, assumed };
        measured.take(&[], &[]);
        measured
    }

    /// Take what the index says.
    pub(super) fn take(&mut self, replicas: &[(u16, ReplicaRow)], nodes: &[(u16, NodeRow)]) {
        let rows = || replicas.iter().map(|(_, row)| &row.load);
        let curve = |at: usize| {
            let known = rows().filter(|load| load.prefill[1] > 0.0);
            mean(known.map(|load| f64::from(load.prefill[at])))
        };
        let Self { costs, assumed } = self;
        costs.prefill = Prefill {
            fixed_s: curve(0).unwrap_or(0.0),
            token_s: curve(1).unwrap_or(assumed.token_s),
            attn_s: curve(2).unwrap_or(0.0),
        };
        let load = mean(rows().map(|load| f64::from(load.load_bytes_per_s)));
        let load = load.unwrap_or(assumed.dram_bytes_per_s);
        for tier in [Tier::Dram, Tier::Nvme] {
            costs.tiers[tier as usize].bytes_per_s = Some(load);
        }
        let known = || nodes.iter().map(|(_, node)| node).filter(|node| node.alive);
        let peer = mean(known().map(|node| node.fetch.bytes_per_s));
        let latency = mean(known().map(|node| node.fetch.latency_s)).unwrap_or(0.0);
        let peer = peer.unwrap_or(assumed.peer_bytes_per_s);
        costs.tiers[Tier::Peer as usize] = behind(load, peer, latency);
    }

    /// What a fetch costs the replicas on `node`.
    pub(super) fn link(&self, node: Option<&NodeRow>) -> TierCost {
        let all = self.costs.tiers[Tier::Peer as usize];
        let measured = node.map(|node| node.fetch).filter(|fetch| fetch.bytes_per_s > 0.0);
        let load = self.costs.tiers[Tier::Dram as usize].bytes_per_s;
        measured
            .zip(load)
            .map_or(all, |(fetch, load)| behind(load, fetch.bytes_per_s, fetch.latency_s))
    }
}

/// A fetched block is loaded like any other once it is on the node.
fn behind(load: f64, fetch: f64, latency_s: f64) -> TierCost {
    TierCost { latency_s, bytes_per_s: Some(1.0 / (1.0 / fetch + 1.0 / load)) }
}

/// Of what was measured: not of zeros.
fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let add = |(sum, count): (f64, u32), value| (sum + value, count + 1);
    let (sum, count) = values.filter(|value| *value > 0.0).fold((0.0, 0), add);
    (count > 0).then(|| sum / f64::from(count))
}
