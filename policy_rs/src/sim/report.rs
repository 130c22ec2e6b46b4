//! What a run came to.

use serde::Serialize;

/// Mean and percentiles of a latency, seconds. Zero when no request finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Summary {
    pub(super) fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values[((values.len() - 1) as f64 * share).round() as usize];
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        Self { mean, p50: at(0.5), p99: at(0.99) }
    }
}

/// Shares of all prompt blocks, by where they came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TierShares {
    /// The engine's own cache.
    pub device: f64,
    /// The node's memory.
    pub dram: f64,
    /// The node's disk.
    pub nvme: f64,
    /// Another node.
    pub peer: f64,
}

/// The outcome of every served request, in the order they arrived.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Series {
    /// Arrival, seconds of simulated time.
    pub arrival_s: Vec<f64>,
    /// Time to first token.
    pub ttft_s: Vec<f64>,
    /// Prompt blocks.
    pub blocks: Vec<u32>,
    /// Prompt blocks that were reused.
    pub reused: Vec<u32>,
    /// The node that served it.
    pub node: Vec<u32>,
    /// Seconds of load and prefill.
    pub work_s: Vec<f64>,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Requests of the trace.
    pub requests: usize,
    /// Requests refused.
    pub rejected: usize,
    /// Reused prompt blocks over all prompt blocks, refused requests included.
    pub hit_rate: f64,
    /// The same by tier.
    pub hit_rate_by_tier: TierShares,
    /// Blocks the router promised over blocks reused; 1 when every prediction held.
    pub predicted_over_reused: f64,
    /// Most over mean work of the nodes.
    pub imbalance: f64,
    /// Time to first token.
    pub ttft_s: Summary,
    /// Time before the prompt started.
    pub queue_s: Summary,
    /// Seconds of load and prefill, all nodes.
    pub work_s: f64,
    /// Seconds from the first arrival to the last token.
    pub makespan_s: f64,
    /// Per request, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub series: Option<Series>,
}
