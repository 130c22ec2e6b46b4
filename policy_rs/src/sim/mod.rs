//! A discrete-event simulator of a cluster: nodes with caches, one router, the requests of a trace.
//!
//! It runs the eviction policies and routers of this crate unchanged; what it adds is time, which
//! comes from a measured profile. Its rules:
//!
//! - A node prefills one prompt at a time, first come first served. A prompt's service is the load
//!   of the prefix it reuses plus the prefill of the rest; how much it reuses is decided when it
//!   starts, by the rule the router predicted with.
//! - Blocks are published, in the node's caches and in the index, when their prefill ends.
//! - A block of another node costs its transfer on that node's link, which is busy meanwhile, and
//!   then occupies both caches.
//! - A prefill starts only while a decode slot is free; its request holds the slot until its last
//!   token.
//! - A refused request has failed: it is counted and has no latency.
//!
//! Deterministic: the same trace, configuration and seed give the same report.

mod belady;
mod cache;
mod cluster;
mod config;
mod generator;
mod index;
mod node;
mod report;
pub mod trace;
mod workload;

use std::str::FromStr;
use std::sync::Arc;

use belady::{Belady, Future};
use cache::Cache;
use cluster::Cluster;
pub use config::{Config, Profile, Tiers};
pub use generator::{Shape, generate};
use node::Node;
pub use report::{Report, Series};
use trace::Trace;
use workload::Workload;

use crate::evict::{EvictionPolicy, PolicyKind};
use crate::route::{Planner, RouterKind};

/// Run one configuration.
///
/// # Errors
/// A configuration out of range, or a trace with another block size than the profile.
pub fn simulate(trace: &Trace, profile: &Profile, config: &Config) -> Result<Report, String> {
    config.validate()?;
    if trace.block_tokens != profile.block_tokens {
        return Err(format!(
            "the trace has blocks of {} tokens, profile {} of {}",
            trace.block_tokens, profile.name, profile.block_tokens
        ));
    }
    let trace = trace.slice(config.slice.0, config.slice.1);
    if trace.requests.is_empty() {
        return Err("the slice holds no request: widen it".to_owned());
    }
    let future = Arc::new(Future::of(&trace));
    let router =
        RouterKind::from_str(&config.router)?.build(&profile.costs(), config.slo_s, config.seed);
    // A cache larger than the trace is an infinite one; its bookkeeping need not be.
    let room = |blocks: usize| blocks.min(trace.unique_blocks);
    let mut nodes = Vec::with_capacity(config.nodes);
    for _ in 0..config.nodes {
        // The engine's own pool is its business: least recently used, whatever the store does.
        let device = PolicyKind::Lru.build(room(config.device_blocks));
        let dram = policy(&config.policy, room(config.dram_blocks), &future)?;
        let nvme = policy(&config.policy, room(config.nvme_blocks), &future)?;
        nodes.push(Node::new(
            Cache::new(device, config.device_blocks),
            Cache::new(dram, config.dram_blocks),
            Cache::new(nvme, config.nvme_blocks),
        ));
    }
    let workload = Workload::new(trace, config.hint_accuracy, &future, config.seed);
    Ok(Cluster::new(config, profile, workload, nodes, Planner::new(router, 0.0), future).run())
}

fn policy(
    name: &str,
    capacity: usize,
    future: &Arc<Future>,
) -> Result<Box<dyn EvictionPolicy>, String> {
    if name == "belady" {
        return Ok(Box::new(Belady::new(Arc::clone(future))));
    }
    let kind = PolicyKind::from_str(name)
        .map_err(|error| format!("{error}, or belady in the simulator"))?;
    Ok(kind.build(capacity))
}
