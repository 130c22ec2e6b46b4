//! The event loop: arrivals, ends of prefills, ends of decodes.
//!
//! Invariants: time never goes back; every request is served once or refused; events at the same
//! time happen in the order they were scheduled.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::sync::Arc;

use super::belady::Future;
use super::cache::key;
use super::config::{Config, Profile};
use super::index::Index;
use super::node::{Job, Node};
use super::report::{Report, Series, Summary, TierShares};
use super::workload::Workload;
use crate::route::{Costs, Decision, Plan, Planner, Query, Reuse, Row, Runs, Tier};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Arrival(usize),
    PrefillEnd(usize),
    DecodeEnd { node: usize, blocks: u32 },
}

#[derive(Clone, Copy, Debug)]
struct Event {
    at_s: f64,
    number: u64,
    what: What,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at_s.total_cmp(&other.at_s).then(self.number.cmp(&other.number))
    }
}

/// What happened to a request.
#[derive(Clone, Copy, Debug, Default)]
struct Outcome {
    served: bool,
    node: usize,
    predicted_blocks: u32,
    queue_s: f64,
    reuse: Reuse,
    ttft_s: f64,
}

/// See the module.
pub(super) struct Cluster<'a> {
    config: &'a Config,
    profile: &'a Profile,
    costs: Costs,
    work: Workload,
    nodes: Vec<Node>,
    planner: Planner,
    future: Arc<Future>,
    index: Index,
    events: BinaryHeap<Reverse<Event>>,
    scheduled: u64,
    now_s: f64,
    outcomes: Vec<Outcome>,
    runs: Vec<Runs>,
    keys: Vec<u64>,
}

impl<'a> Cluster<'a> {
    pub(super) fn new(
        config: &'a Config,
        profile: &'a Profile,
        work: Workload,
        nodes: Vec<Node>,
        planner: Planner,
        future: Arc<Future>,
    ) -> Self {
        Self {
            config,
            profile,
            costs: profile.costs(),
            index: Index::new(nodes.len(), work.trace.unique_blocks),
            outcomes: vec![Outcome::default(); work.trace.requests.len()],
            work,
            nodes,
            planner,
            future,
            events: BinaryHeap::new(),
            scheduled: 0,
            now_s: 0.0,
            runs: Vec::new(),
            keys: Vec::new(),
        }
    }

    pub(super) fn run(mut self) -> Report {
        self.schedule(self.arrival_s(0), What::Arrival(0));
        while let Some(Reverse(event)) = self.events.pop() {
            assert!(event.at_s >= self.now_s, "an event in the past");
            self.now_s = event.at_s;
            match event.what {
                What::Arrival(request) => self.arrive(request),
                What::PrefillEnd(node) => self.end_prefill(node),
                What::DecodeEnd { node, blocks } => {
                    self.nodes[node].decoding -= 1;
                    self.nodes[node].active_blocks -= u64::from(blocks);
                    self.start(node);
                }
            }
        }
        self.report()
    }

    fn arrival_s(&self, request: usize) -> f64 {
        let first_s = self.work.trace.requests[0].arrival_s;
        (self.work.trace.requests[request].arrival_s - first_s) / self.config.speed
    }

    fn schedule(&mut self, at_s: f64, what: What) {
        self.scheduled += 1;
        self.events.push(Reverse(Event { at_s, number: self.scheduled, what }));
    }

    fn arrive(&mut self, number: usize) {
        if number + 1 < self.work.trace.requests.len() {
            self.schedule(self.arrival_s(number + 1), What::Arrival(number + 1));
        }
        for (node, state) in self.nodes.iter().enumerate() {
            if self.now_s - self.planner.reported_s(node) >= self.config.report_s {
                let row = Row { at_s: self.now_s, load: state.load(self.now_s) };
                self.planner.report(node, row);
            }
        }
        let request = &self.work.trace.requests[number];
        let mut cluster_run = self.index.runs(&request.blocks, &mut self.runs);
        if !self.config.peers {
            cluster_run = 0;
        }
        self.keys.clear();
        self.keys.extend(request.blocks.iter().map(|&block| key(block)));
        let query = Query { tokens: request.input_tokens, keys: &self.keys };
        let decision =
            self.planner.plan(number as u64, &query, &self.runs, cluster_run, self.now_s);
        if let Decision::Go(plan) = decision {
            self.dispatch(number, &plan);
        }
    }

    fn dispatch(&mut self, number: usize, plan: &Plan) {
        let request = &self.work.trace.requests[number];
        self.nodes[plan.replica].accept(Job::new(number, request, plan));
        self.outcomes[number].predicted_blocks = plan.reuse.prefix();
        self.start(plan.replica);
    }

    /// Start the next prompt of `node` if it is free.
    fn start(&mut self, node: usize) {
        let state = &mut self.nodes[node];
        if state.running.is_some() || state.decoding >= self.profile.max_decode {
            return;
        }
        let Some(job) = state.next_job() else {
            return;
        };
        let request = &self.work.trace.requests[job.request];
        let cluster_run = self.index.runs(&request.blocks, &mut self.runs);
        let mut reach = self.runs[node];
        if self.config.peers {
            reach.extend(Tier::Peer, cluster_run);
        }
        let reuse = self.costs.best_reuse(request.input_tokens, &reach);
        let waited_s = self.fetch(node, job.request, &reuse);
        let service_s = waited_s + reuse.total_s();
        let arrived_s = self.arrival_s(job.request);
        let state = &mut self.nodes[node];
        state.work_s += service_s;
        state.running = Some((job, self.now_s + service_s));
        let outcome = &mut self.outcomes[job.request];
        outcome.served = true;
        outcome.node = node;
        outcome.queue_s = self.now_s - arrived_s;
        outcome.reuse = Reuse { load_s: reuse.load_s + waited_s, ..reuse };
        outcome.ttft_s = self.now_s + service_s - arrived_s;
        self.schedule(self.now_s + service_s, What::PrefillEnd(node));
    }

    /// Occupy the links of the nodes that send blocks; returns the seconds their queues cost.
    fn fetch(&mut self, node: usize, request: usize, reuse: &Reuse) -> f64 {
        let fetched = reuse.blocks[Tier::Peer as usize] as usize;
        let end = reuse.prefix() as usize;
        let blocks = &self.work.trace.requests[request].blocks[end - fetched..end];
        let (mut source, mut ready_s) = (None, self.now_s);
        for &block in blocks {
            let holders = self.index.holders(block);
            if !holders.iter().any(|holder| Some(holder.node) == source) {
                let others = holders.iter().filter(|holder| holder.node != node as u32);
                source = others.map(|holder| holder.node).min_by(|&a, &b| {
                    let free = |node: u32| self.nodes[node as usize].egress_free_s;
                    free(a).total_cmp(&free(b)).then(a.cmp(&b))
                });
            }
            let Some(source) = source else {
                continue;
            };
            let sender = &mut self.nodes[source as usize];
            sender.egress_free_s =
                sender.egress_free_s.max(self.now_s) + self.costs.load_s(Tier::Peer, 1);
            ready_s = sender.egress_free_s.max(ready_s);
            sender.copied(block);
        }
        let alone_s = self.costs.load_s(Tier::Peer, fetched as u32);
        (ready_s - self.now_s - alone_s).max(0.0)
    }

    fn end_prefill(&mut self, node: usize) {
        let Some((job, _)) = self.nodes[node].running.take() else {
            return;
        };
        self.future.set_now(job.request);
        self.nodes[node].publish(node, &self.work, job, &mut self.index);
        self.nodes[node].decoding += 1;
        let tokens = self.work.trace.requests[job.request].output_tokens;
        let decode_s = f64::from(tokens) * self.profile.decode_s_per_token;
        let what = What::DecodeEnd { node, blocks: job.blocks };
        self.schedule(self.now_s + decode_s, what);
        self.start(node);
    }

    fn report(self) -> Report {
        let total: usize = self.work.trace.requests.iter().map(|r| r.blocks.len()).sum();
        let served = || self.outcomes.iter().filter(|outcome| outcome.served);
        let share = |tier: Tier| {
            let blocks: u64 = served().map(|o| u64::from(o.reuse.blocks[tier as usize])).sum();
            blocks as f64 / total as f64
        };
        let reused: u64 = served().map(|outcome| u64::from(outcome.reuse.prefix())).sum();
        let predicted: u64 = served().map(|outcome| u64::from(outcome.predicted_blocks)).sum();
        let work_s: f64 = self.nodes.iter().map(|node| node.work_s).sum();
        let most_s = self.nodes.iter().map(|node| node.work_s).fold(0.0, f64::max);
        Report {
            requests: self.outcomes.len(),
            rejected: self.outcomes.len() - served().count(),
            hit_rate: reused as f64 / total as f64,
            hit_rate_by_tier: TierShares {
                device: share(Tier::Device),
                dram: share(Tier::Dram),
                nvme: share(Tier::Nvme),
                peer: share(Tier::Peer),
            },
            predicted_over_reused: predicted as f64 / reused.max(1) as f64,
            imbalance: if work_s > 0.0 { most_s * self.nodes.len() as f64 / work_s } else { 1.0 },
            ttft_s: Summary::of(served().map(|outcome| outcome.ttft_s).collect()),
            queue_s: Summary::of(served().map(|outcome| outcome.queue_s).collect()),
            work_s,
            makespan_s: self.now_s,
            series: self.config.series.then(|| self.series()),
        }
    }

    fn series(&self) -> Series {
        let mut series = Series::default();
        for (number, outcome) in self.outcomes.iter().enumerate().filter(|(_, o)| o.served) {
            series.arrival_s.push(self.arrival_s(number));
            series.ttft_s.push(outcome.ttft_s);
            series.blocks.push(self.work.trace.requests[number].blocks.len() as u32);
            series.reused.push(outcome.reuse.prefix());
            series.node.push(outcome.node as u32);
            series.work_s.push(outcome.reuse.total_s());
        }
        series
    }
}
