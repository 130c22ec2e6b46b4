//! A router with its bookkeeping: what the product's ingress and the simulator both hold.
//!
//! Owns: the load rows, the reservations and the rule. `plan` decides and reserves in one step, so
//! requests of a burst see each other.
//! Invariant: a plan names a replica that reported itself as accepting.

use super::{Costs, Decision, Ledger, Load, Query, Router, Row, Runs, TierCost, View};

/// See the module.
pub struct Planner {
    router: Box<dyn Router>,
    ledger: Ledger,
    loads: Vec<Load>,
    runs: Vec<Runs>,
}

/// Which replicas a request may go to, and what sets them apart.
pub struct Among<'a> {
    /// Whether this one may take it.
    pub may: &'a dyn Fn(usize) -> bool,
    /// Wins between replicas that are equal otherwise.
    pub prefer: Option<usize>,
    /// What each pays for blocks of other nodes, where that is known.
    pub links: &'a [TierCost],
}

impl Planner {
    /// A planner for replicas that have yet to report. `grace_s` covers the way of a request to
    /// its replica: a load row taken sooner after the decision may not show it.
    #[must_use]
    pub fn new(router: Box<dyn Router>, grace_s: f64) -> Self {
        Self { router, ledger: Ledger::new(grace_s), loads: Vec::new(), runs: Vec::new() }
    }

    /// A replica's newest load; an unknown replica is added, `accepting: false` takes one out.
    pub fn report(&mut self, replica: usize, row: Row) {
        self.ledger.report(replica, row);
    }

    /// When `replica` last reported; minus infinity if it never did.
    #[must_use]
    pub fn reported_s(&self, replica: usize) -> f64 {
        self.ledger.reported_s(replica)
    }

    /// Choose a replica for `request` and count it there. `runs` are the local runs by replica
    /// (missing ones hold nothing), `cluster_run` the longest run over all nodes together.
    pub fn plan(
        &mut self,
        request: u64,
        query: &Query<'_>,
        runs: &[Runs],
        cluster_run: u32,
        now_s: f64,
    ) -> Decision {
        self.plan_among(
            request,
            query,
            runs,
            cluster_run,
            now_s,
            &Among { may: &|_| true, prefer: None, links: &[] },
        )
    }

    /// The same, among some of the replicas.
    pub fn plan_among(
        &mut self,
        request: u64,
        query: &Query<'_>,
        runs: &[Runs],
        cluster_run: u32,
        now_s: f64,
        among: &Among<'_>,
    ) -> Decision {
        self.ledger.loads(now_s, &mut self.loads);
        for (replica, load) in self.loads.iter_mut().enumerate() {
            load.accepting &= (among.may)(replica);
        }
        self.runs.clear();
        self.runs.extend_from_slice(&runs[..runs.len().min(self.loads.len())]);
        self.runs.resize(self.loads.len(), Runs::NONE);
        let &Among { prefer, links, .. } = among;
        let view = View { now_s, loads: &self.loads, runs: &self.runs, cluster_run, prefer, links };
        let decision = self.router.route(query, &view);
        if let Decision::Go(plan) = &decision {
            self.ledger.reserve(request, plan, query.tokens, query.keys.len(), now_s);
        }
        decision
    }

    /// The loads at `now_s`, reservations included.
    pub fn loads(&self, now_s: f64, out: &mut Vec<Load>) {
        self.ledger.loads(now_s, out);
    }

    /// Predict with newer measurements from now on.
    pub fn set_costs(&mut self, costs: &Costs) {
        self.router.set_costs(costs);
    }

    /// The request never reached its replica.
    pub fn cancel(&mut self, request: u64) {
        self.ledger.cancel(request);
    }
}
