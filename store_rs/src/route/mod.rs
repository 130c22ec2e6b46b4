//! The router of one process: the planner that the simulator runs, over the cluster index.
//!
//! Owns what this process knows of the replicas: who runs where, the newest row of each, and the
//! requests this process has sent and not seen end. Replicas say through the index how busy they
//! are and what prefill costs them; the measured rates of loads and fetches are there too. A
//! replica whose rows do not come (no store, or one that is gone) is judged by this process's own
//! requests alone. Nothing waits and nothing fails: without a replica the answer is a rejection.

use std::collections::HashMap;

use mooncake_policy::route::{
    Among, Costs, Decision, Load, Planner, Prefill, Query, RouterKind, Row, Runs, Tier, TierCost,
};

use crate::cluster::{ClusterView, ReplicaRow, Runs as NodeRuns};
use crate::index::Entry;
use crate::key::Key;

/// A row taken sooner after a decision may not show it: the way of a request to its replica.
const GRACE_S: f64 = 0.1;
/// A row older than this says nothing; replicas report at least every second.
const STALE_S: f64 = 3.0;
/// Rows change at most 50 times a second; requests in between share one look.
const LOOK_EVERY_S: f64 = 0.005;

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

#[derive(Debug)]
struct Replica {
    name: String,
    node: String,
    present: bool,
    row: Option<ReplicaRow>,
}

/// A request this process has sent.
#[derive(Debug, Clone, Copy)]
struct Sent {
    replica: usize,
    planned_s: f64,
    work_s: f64,
    tokens: u64,
    prefilling: bool,
}

/// Where a request goes, and what that rests on.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// The replica's name.
    pub replica: String,
    /// Predicted wait before the prompt starts.
    pub queue_s: f64,
    /// Predicted seconds of loading and of computing.
    pub load_s: f64,
    /// See above.
    pub prefill_s: f64,
    /// Blocks reused from device, dram, nvme, peer.
    pub blocks: [u32; 4],
}

/// What may answer a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Choice<'a> {
    /// Only this one, if it is there.
    pub only: Option<&'a str>,
    /// None of these.
    pub avoid: &'a [String],
    /// Wins between replicas that are equal otherwise.
    pub prefer: Option<&'a str>,
}

/// See the module.
pub struct Router {
    planner: Planner,
    costs: Costs,
    assumed: Assumed,
    replicas: Vec<Replica>,
    by_name: HashMap<String, usize>,
    looked_s: f64,
    sent: HashMap<u64, Sent>,
    view: Option<ClusterView>,
    runs: NodeRuns,
    local: Vec<Runs>,
    keys: Vec<u64>,
}

impl Router {
    /// A router that knows no replica and no model yet. Requests whose first token would take
    /// longer than `slo_s` on every replica are rejected.
    #[must_use]
    pub fn new(assumed: Assumed, slo_s: Option<f64>, seed: u64) -> Self {
        let rate = |rate| TierCost { latency_s: 0.0, bytes_per_s: Some(rate) };
        let dram = rate(assumed.dram_bytes_per_s);
        let costs = Costs {
            prefill: Prefill { fixed_s: 0.0, token_s: assumed.token_s, attn_s: 0.0 },
            tiers: [
                TierCost { latency_s: 0.0, bytes_per_s: None },
                dram,
                dram,
                rate(assumed.peer_bytes_per_s),
            ],
            kv_bytes_per_token: 1.0,
            block_tokens: 256,
        };
        Self {
            planner: Planner::new(RouterKind::Ours.build(&costs, slo_s, seed), GRACE_S),
            costs,
            assumed,
            replicas: Vec::new(),
            by_name: HashMap::new(),
            looked_s: f64::NEG_INFINITY,
            sent: HashMap::new(),
            view: None,
            runs: NodeRuns::default(),
            local: Vec::new(),
            keys: Vec::new(),
        }
    }

    /// A block has `block_tokens` tokens of `token_bytes` of KV each.
    pub fn set_model(&mut self, block_tokens: u32, token_bytes: f64) {
        self.costs.block_tokens = block_tokens;
        self.costs.kv_bytes_per_token = token_bytes;
        self.looked_s = f64::NEG_INFINITY;
    }

    /// Read the cluster through `view` from now on; None while there is no store.
    pub fn set_view(&mut self, view: Option<ClusterView>) {
        self.view = view;
    }

    /// Whether a view must be asked for anew.
    #[must_use]
    pub fn wants_view(&self) -> bool {
        self.view.as_ref().is_none_or(ClusterView::moved)
    }

    /// These replicas run, each by name on its node. Others are gone.
    pub fn set_replicas(&mut self, running: &[(String, String)], now_s: f64) {
        for replica in &mut self.replicas {
            replica.present = false;
        }
        for (name, node) in running {
            match self.position(name) {
                Some(at) => {
                    (self.replicas[at].node, self.replicas[at].present) = (node.clone(), true)
                }
                None => {
                    let (name, node) = (name.clone(), node.clone());
                    self.by_name.insert(name.clone(), self.replicas.len());
                    self.replicas.push(Replica { name, node, present: true, row: None });
                }
            }
        }
        for at in 0..self.replicas.len() {
            self.report(at, now_s);
        }
    }

    /// This replica is gone, before anybody reports the new set.
    pub fn drop_replica(&mut self, name: &str, now_s: f64) {
        if let Some(at) = self.position(name) {
            self.replicas[at].present = false;
            self.report(at, now_s);
        }
    }

    /// Names of the running replicas, in a stable order.
    #[must_use]
    pub fn replicas(&self) -> Vec<&str> {
        let present = self.replicas.iter().filter(|replica| replica.present);
        let mut names: Vec<_> = present.map(|replica| replica.name.as_str()).collect();
        names.sort_unstable();
        names
    }

    /// Choose a replica for a prompt of `tokens` tokens whose full blocks have `keys`, and count it
    /// there. Err holds the best time to first token on offer.
    pub fn plan(
        &mut self,
        request: u64,
        tokens: u32,
        keys: &[Key],
        among: Choice<'_>,
        now_s: f64,
    ) -> Result<Route, f64> {
        self.refresh(now_s);
        self.look_up(keys);
        let replicas = &self.replicas;
        let may = |at: usize| {
            let name = &replicas[at].name;
            among.only.is_none_or(|only| only == name) && !among.avoid.contains(name)
        };
        let prefer = among.prefer.and_then(|name| self.position(name));
        let among = Among { may: &may, prefer };
        let query = Query { tokens, keys: &self.keys };
        let (local, cluster) = (&self.local, self.runs.cluster);
        match self.planner.plan_among(request, &query, local, cluster, now_s, &among) {
            Decision::Reject { best_s } => Err(best_s),
            Decision::Go(plan) => {
                let cached = plan.reuse.prefix() * self.costs.block_tokens;
                self.sent.insert(
                    request,
                    Sent {
                        replica: plan.replica,
                        planned_s: now_s,
                        work_s: plan.reuse.total_s(),
                        tokens: u64::from(tokens.saturating_sub(cached)),
                        prefilling: true,
                    },
                );
                Ok(Route {
                    replica: self.replicas[plan.replica].name.clone(),
                    queue_s: plan.queue_s,
                    load_s: plan.reuse.load_s,
                    prefill_s: plan.reuse.prefill_s,
                    blocks: plan.reuse.blocks,
                })
            }
        }
    }

    /// The request has its first token.
    pub fn first_token(&mut self, request: u64) {
        if let Some(sent) = self.sent.get_mut(&request) {
            sent.prefilling = false;
            self.planner.cancel(request);
        }
    }

    /// The request ended, or never reached its replica.
    pub fn end(&mut self, request: u64) {
        if self.sent.remove(&request).is_some() {
            self.planner.cancel(request);
        }
    }

    /// What this process has sent, by replica: prompt tokens without a first token, and requests.
    #[must_use]
    pub fn outstanding(&self) -> HashMap<&str, (u64, u64)> {
        let mut by_name: HashMap<&str, (u64, u64)> =
            self.replicas().into_iter().map(|name| (name, (0, 0))).collect();
        for sent in self.sent.values() {
            if let Some(entry) = by_name.get_mut(self.replicas[sent.replica].name.as_str()) {
                entry.0 += if sent.prefilling { sent.tokens } else { 0 };
                entry.1 += 1;
            }
        }
        by_name
    }

    /// Prompt tokens that wait for all replicas together, as far as this process knows.
    #[must_use]
    pub fn queued_tokens(&self, now_s: f64) -> u64 {
        let mut loads = Vec::new();
        self.planner.loads(now_s, &mut loads);
        loads.iter().filter(|load| load.accepting).map(|load| load.prefill_tokens).sum()
    }

    /// What predictions rest on.
    #[must_use]
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Take what the index says of the replicas, and judge the silent ones by our own requests.
    fn refresh(&mut self, now_s: f64) {
        if now_s - self.looked_s < LOOK_EVERY_S {
            return;
        }
        self.looked_s = now_s;
        let rows = self.view.as_ref().map(ClusterView::replicas).unwrap_or_default();
        self.measure(&rows);
        for row in rows {
            if let Some(at) = self.position(&row.load.name) {
                self.replicas[at].row = Some(row);
            }
        }
        for at in 0..self.replicas.len() {
            self.report(at, now_s);
        }
    }

    fn report(&mut self, at: usize, now_s: f64) {
        let replica = &self.replicas[at];
        let fresh = replica.row.as_ref().filter(|row| now_s - row.at_us as f64 / 1e6 < STALE_S);
        let mut row = match fresh {
            Some(row) => self.reported(row),
            None => self.guessed(at, now_s),
        };
        row.load.accepting = replica.present;
        if !replica.present {
            row.at_s = now_s;
        }
        self.planner.report(at, row);
    }

    fn reported(&self, row: &ReplicaRow) -> Row {
        let queue_s = self.costs.prefill.seconds(row.load.prefill_tokens, 0);
        let load = Load {
            queue_s: if row.load.prefill_tokens == 0 { 0.0 } else { queue_s },
            prefill_tokens: row.load.prefill_tokens.into(),
            waiting: row.load.waiting.into(),
            requests: u32::from(row.load.waiting) + u32::from(row.load.running),
            ..Load::default()
        };
        Row { at_s: row.at_us as f64 / 1e6, load }
    }

    /// By our own requests, but for those that the planner still counts as reserved.
    fn guessed(&self, at: usize, now_s: f64) -> Row {
        let mut load = Load::default();
        for sent in self.sent.values() {
            if sent.replica != at || sent.planned_s + GRACE_S > now_s {
                continue;
            }
            load.requests += 1;
            if sent.prefilling {
                load.waiting += 1;
                load.prefill_tokens += sent.tokens;
                load.queue_s += sent.work_s;
            }
        }
        // The oldest of them has been at it since; what it took is gone from the queue.
        let prefilling = self.sent.values().filter(|sent| sent.replica == at && sent.prefilling);
        let since_s = prefilling.map(|sent| sent.planned_s).fold(now_s, f64::min);
        load.queue_s = (load.queue_s - (now_s - since_s)).max(0.0);
        Row { at_s: now_s, load }
    }

    /// Costs from what replicas and stores measured; assumptions where nobody has.
    fn measure(&mut self, rows: &[ReplicaRow]) {
        let mean = |values: &mut dyn Iterator<Item = f64>| {
            let (sum, count) =
                values.filter(|v| *v > 0.0).fold((0.0, 0), |(s, n), v| (s + v, n + 1));
            (count > 0).then(|| sum / f64::from(count))
        };
        let known = |row: &&ReplicaRow| row.load.prefill[1] > 0.0;
        let curve = |at: usize| {
            mean(&mut rows.iter().filter(known).map(|row| f64::from(row.load.prefill[at])))
        };
        let load = mean(&mut rows.iter().map(|row| f64::from(row.load.load_bytes_per_s)));
        let nodes = self.view.as_ref().map(ClusterView::nodes).unwrap_or_default();
        let peers = || nodes.iter().map(|(_, node)| node).filter(|node| node.alive);
        let peer = mean(&mut peers().map(|node| node.bytes_per_s));
        let latency = mean(&mut peers().map(|node| node.latency_s));
        let Costs { prefill, tiers, .. } = &mut self.costs;
        prefill.fixed_s = curve(0).unwrap_or(0.0);
        prefill.token_s = curve(1).unwrap_or(self.assumed.token_s);
        prefill.attn_s = curve(2).unwrap_or(0.0);
        let load = load.unwrap_or(self.assumed.dram_bytes_per_s);
        tiers[Tier::Dram as usize].bytes_per_s = Some(load);
        tiers[Tier::Nvme as usize].bytes_per_s = Some(load);
        let peer = peer.unwrap_or(self.assumed.peer_bytes_per_s);
        // A fetched block is loaded like any other once it is here.
        tiers[Tier::Peer as usize].bytes_per_s = Some(1.0 / (1.0 / peer + 1.0 / load));
        tiers[Tier::Peer as usize].latency_s = latency.unwrap_or(0.0);
        self.planner.set_costs(&self.costs);
    }

    /// The chain's runs by replica, into `self.local`.
    fn look_up(&mut self, keys: &[Key]) {
        self.keys.clear();
        self.keys
            .extend(keys.iter().map(|key| Entry::new(key, crate::index::Tier::Dram).fingerprint));
        self.local.clear();
        self.local.resize(self.replicas.len(), Runs::NONE);
        let Some(view) = &self.view else {
            self.runs.nodes.clear();
            self.runs.cluster = 0;
            return;
        };
        view.runs(keys, &mut self.runs);
        if self.runs.nodes.is_empty() {
            return;
        }
        for (at, node) in view.nodes() {
            let Some(run) = self.runs.nodes.iter().find(|run| run.node == at) else { continue };
            for (replica, local) in self.replicas.iter().zip(&mut self.local) {
                if replica.node == node.name {
                    *local = Runs::local(0, run.dram, run.nvme);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
