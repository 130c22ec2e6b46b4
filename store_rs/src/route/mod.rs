//! The router of one process: the planner that the simulator runs, over the cluster index.
//!
//! Owns what this process knows of the replicas: who runs where, the newest row of each, and the
//! requests this process has sent and not seen end. Replicas say through the index how busy they
//! are, what their pools hold and what work costs them. A replica whose rows do not come (no store,
//! or one that is gone) is judged by this process's own requests alone. Nothing waits and nothing
//! fails: without a replica the answer is a rejection.

mod measured;

use std::collections::HashMap;

use mooncake_policy::route::{
    Among, Costs, Decision, Load, Planner, Query, RouterKind, Row, Runs, TierCost,
};

use crate::cluster::{ClusterView, ReplicaRow, Runs as NodeRuns};
use crate::index::Entry;
use crate::key::Key;
pub use measured::Assumed;
use measured::Measured;

/// A row taken sooner after a decision may not show it: the way of a request to its replica.
const GRACE_S: f64 = 0.1;
/// A row older than this says nothing; replicas report at least every second.
const STALE_S: f64 = 3.0;
/// Rows change at most 50 times a second; requests in between share one look.
const LOOK_EVERY_S: f64 = 0.005;

#[derive(Debug)]
struct Replica {
    name: String,
    node: String,
    present: bool,
    row: Option<ReplicaRow>,
    /// Its own row of the index and its node's, as of the last look.
    rows: (Option<u16>, Option<u16>),
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
    measured: Measured,
    replicas: Vec<Replica>,
    by_name: HashMap<String, usize>,
    looked_s: f64,
    sent: HashMap<u64, Sent>,
    view: Option<ClusterView>,
    runs: NodeRuns,
    local: Vec<Runs>,
    links: Vec<TierCost>,
    keys: Vec<u64>,
}

impl Router {
    /// A router that knows no replica and no model yet. Requests whose first token would take
    /// longer than `slo_s` on every replica are rejected.
    #[must_use]
    pub fn new(assumed: Assumed, slo_s: Option<f64>, seed: u64) -> Self {
        let measured = Measured::new(assumed);
        let rule = RouterKind::Ours.build(&measured.costs, slo_s, seed);
        Self {
            planner: Planner::new(rule, GRACE_S),
            measured,
            replicas: Vec::new(),
            by_name: HashMap::new(),
            looked_s: f64::NEG_INFINITY,
            sent: HashMap::new(),
            view: None,
            runs: NodeRuns::default(),
            local: Vec::new(),
            links: Vec::new(),
            keys: Vec::new(),
        }
    }

    /// A block has `block_tokens` tokens of `token_bytes` of KV each.
    pub fn set_model(&mut self, block_tokens: u32, token_bytes: f64) {
        self.measured.costs.block_tokens = block_tokens;
        self.measured.costs.kv_bytes_per_token = token_bytes;
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
                    let (present, row, rows) = (true, None, (None, None));
                    self.replicas.push(Replica { name, node, present, row, rows });
                }
            }
        }
        for at in 0..self.replicas.len() {
            self.report(at, now_s);
        }
        self.looked_s = f64::NEG_INFINITY;
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
        let among = Among { may: &may, prefer, links: &self.links };
        let query = Query { tokens, keys: &self.keys };
        let (local, cluster) = (&self.local, self.runs.cluster);
        match self.planner.plan_among(request, &query, local, cluster, now_s, &among) {
            Decision::Reject { best_s } => Err(best_s),
            Decision::Go(plan) => {
                let cached = plan.reuse.prefix() * self.costs().block_tokens;
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
        &self.measured.costs
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
        let nodes = self.view.as_ref().map(ClusterView::nodes).unwrap_or_default();
        self.measured.take(&rows, &nodes);
        self.planner.set_costs(&self.measured.costs);
        self.links.clear();
        for replica in &mut self.replicas {
            let node = nodes.iter().find(|(_, node)| node.name == replica.node);
            replica.rows = (None, node.map(|(at, _)| *at));
            self.links.push(self.measured.link(node.map(|(_, node)| node)));
        }
        for (own, row) in rows {
            if let Some(at) = self.position(&row.load.name) {
                (self.replicas[at].row, self.replicas[at].rows.0) = (Some(row), Some(own));
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
        let queue_s = self.costs().prefill.seconds(row.load.prefill_tokens, 0);
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

    /// The chain's runs by replica, into `self.local`.
    fn look_up(&mut self, keys: &[Key]) {
        self.keys.clear();
        self.keys
            .extend(keys.iter().map(|key| Entry::new(key, crate::index::Tier::Dram).fingerprint));
        self.local.clear();
        self.local.resize(self.replicas.len(), Runs::NONE);
        let Some(view) = &self.view else {
            self.runs = NodeRuns::default();
            return;
        };
        view.runs(keys, &mut self.runs);
        let NodeRuns { nodes, pools, .. } = &self.runs;
        for (replica, local) in self.replicas.iter().zip(&mut self.local) {
            let (own, node) = replica.rows;
            let run = nodes.iter().find(|run| Some(run.node) == node);
            let pool = pools.iter().find(|run| Some(run.replica) == own);
            let (dram, nvme) = run.map_or((0, 0), |run| (run.dram, run.nvme));
            *local = Runs::local(pool.map_or(0, |run| run.blocks), dram, nvme);
        }
    }
}

#[cfg(test)]
mod tests;
