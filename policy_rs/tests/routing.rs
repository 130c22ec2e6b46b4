//! The cost model against brute force, and what the routers decide in small worked cases.

use mooncake_policy::route::{
    Costs, Decision, Load, Plan, Planner, Prefill, Query, RouterKind, Row, Runs, TIERS, Tier,
    TierCost,
};
use proptest::prelude::*;

const BLOCK: u32 = 512;
const ALL: [RouterKind; 7] = [
    RouterKind::Ours,
    RouterKind::RoundRobin,
    RouterKind::PowerOfTwo,
    RouterKind::LongestPrefix,
    RouterKind::RayPrefix,
    RouterKind::Dynamo,
    RouterKind::Mooncake,
];

fn costs() -> Costs {
    let tier = |latency_s, rate| TierCost { latency_s, bytes_per_s: Some(rate) };
    Costs {
        prefill: Prefill { fixed_s: 0.03, token_s: 1e-4, attn_s: 2e-9 },
        tiers: [
            TierCost { latency_s: 0.0, bytes_per_s: None },
            tier(0.0005, 1e11),
            tier(0.002, 2.4e10),
            tier(0.001, 8.7e10),
        ],
        kv_bytes_per_token: 327_680.0,
        block_tokens: BLOCK,
    }
}

fn planner(kind: RouterKind, slo_s: Option<f64>, queues: &[f64]) -> Planner {
    let mut planner = Planner::new(kind.build(&costs(), slo_s, 7), 0.0);
    for (replica, &queue_s) in queues.iter().enumerate() {
        let waiting = u32::from(queue_s > 0.0);
        let load = Load { queue_s, waiting, requests: waiting, accepting: true, ..Load::default() };
        planner.report(replica, Row { at_s: 0.0, load });
    }
    planner
}

fn go(decision: Decision) -> Plan {
    match decision {
        Decision::Go(plan) => plan,
        Decision::Reject { best_s } => panic!("rejected, best {best_s}"),
    }
}

fn keys(blocks: u64) -> Vec<u64> {
    (1..=blocks).map(|key| key.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

proptest! {
    #[test]
    fn the_best_prefix_beats_every_other(
        blocks in 1..200u32, runs in [0..200u32, 0..200, 0..200, 0..200], slow in 1e8..1e11f64,
    ) {
        let mut costs = costs();
        costs.tiers[Tier::Nvme as usize].bytes_per_s = Some(slow);
        let tokens = blocks * BLOCK - 100;
        let cut = runs.map(|run| run.min(blocks));
        let mut reach = Runs::local(cut[0], cut[1], cut[2]);
        reach.extend(Tier::Peer, cut[3]);
        let best = costs.best_reuse(tokens, &reach);
        for prefix in 0..=reach.up_to(Tier::Peer) {
            let mut load_s = 0.0;
            let mut from = 0;
            for tier in TIERS {
                let to = reach.up_to(tier).min(prefix).max(from);
                load_s += costs.load_s(tier, to - from);
                from = to;
            }
            let cached = (prefix * BLOCK).min(tokens - 1);
            let total_s = load_s + costs.prefill.seconds(tokens - cached, cached);
            prop_assert!(best.total_s() <= total_s + 1e-9, "{prefix} blocks cost {total_s}");
        }
        prop_assert!(best.prefix() <= reach.up_to(Tier::Peer));
    }

    #[test]
    fn every_rule_names_an_accepting_replica(
        queues in proptest::collection::vec(0.0..9.0f64, 1..9),
        closed in any::<u8>(),
        seed in 0..99u64,
    ) {
        let keys = keys(20);
        let query = Query { tokens: 20 * BLOCK, keys: &keys };
        for kind in ALL {
            let mut planner = Planner::new(kind.build(&costs(), None, seed), 0.0);
            for (replica, &queue_s) in queues.iter().enumerate() {
                let accepting = closed >> (replica % 8) & 1 == 0;
                let load = Load { queue_s, accepting, ..Load::default() };
                planner.report(replica, Row { at_s: 0.0, load });
            }
            for request in 0..20 {
                match planner.plan(request, &query, &[], 0, 0.0) {
                    Decision::Go(plan) => {
                        prop_assert!(closed >> (plan.replica % 8) & 1 == 0, "{kind:?}");
                        prop_assert!(plan.replica < queues.len());
                    }
                    Decision::Reject { .. } => {
                        let all_closed = (0..queues.len()).all(|at| closed >> (at % 8) & 1 == 1);
                        prop_assert!(all_closed, "{kind:?} gave up on an open replica");
                    }
                }
            }
        }
    }
}

#[test]
fn a_prefix_draws_a_request_and_a_queue_repels_it() {
    let keys = keys(40);
    let query = Query { tokens: 40 * BLOCK, keys: &keys };
    let cached = [Runs::NONE, Runs::local(0, 38, 38)];
    let plan = go(planner(RouterKind::Ours, None, &[0.0, 0.0]).plan(1, &query, &cached, 0, 0.0));
    assert_eq!(plan.replica, 1);
    assert_eq!(plan.reuse.blocks, [0, 38, 0, 0]);
    let plan = go(planner(RouterKind::Ours, None, &[0.0, 900.0]).plan(1, &query, &cached, 0, 0.0));
    assert_eq!((plan.replica, plan.reuse.prefix()), (0, 0));
    // With the store shared, the idle replica fetches what the busy one holds.
    let plan = go(planner(RouterKind::Ours, None, &[0.0, 900.0]).plan(1, &query, &cached, 38, 0.0));
    assert_eq!((plan.replica, plan.reuse.blocks), (0, [0, 0, 0, 38]));
}

#[test]
fn a_burst_spreads_although_no_load_row_arrives() {
    let mut planner = planner(RouterKind::Ours, None, &[0.0; 4]);
    let mut counts = [0; 4];
    for request in 0..40u64 {
        let keys = [request + 1, request + 1000];
        let query = Query { tokens: 2 * BLOCK, keys: &keys };
        counts[go(planner.plan(request, &query, &[], 0, 0.0)).replica] += 1;
    }
    assert_eq!(counts, [10; 4]);
}

#[test]
fn blocks_in_the_making_count_and_then_expire() {
    let mut planner = planner(RouterKind::Ours, None, &[0.0; 8]);
    let keys = keys(60);
    let query = Query { tokens: 60 * BLOCK, keys: &keys };
    let first = go(planner.plan(1, &query, &[], 0, 0.0));
    assert_eq!(first.reuse.prefix(), 0);
    let second = go(planner.plan(2, &query, &[], 0, 0.001));
    // Waiting for the one that computes it, or computing it again: whichever is sooner.
    let again_s = first.reuse.total_s();
    assert!(second.ttft_s() <= again_s);
    let late_s = 1000.0;
    let late = go(planner.plan(3, &query, &[], 0, late_s));
    assert_eq!(late.reuse.prefix(), 0, "the index never confirmed the blocks");
}

#[test]
fn reservations_end_with_a_newer_row_or_a_cancellation() {
    let keys = keys(10);
    let query = Query { tokens: 10 * BLOCK, keys: &keys };
    let mut planner = planner(RouterKind::RoundRobin, None, &[0.0]);
    let alone_s = go(planner.plan(1, &query, &[], 0, 1.0)).reuse.total_s();
    let behind = go(planner.plan(2, &query, &[], 0, 1.0));
    assert!((behind.queue_s - alone_s).abs() < 1e-9);
    planner.cancel(1);
    let behind = go(planner.plan(3, &query, &[], 0, 1.0));
    assert!((behind.queue_s - alone_s).abs() < 1e-9, "only request 2 is ahead");
    let load = Load { queue_s: 5.0, accepting: true, ..Load::default() };
    planner.report(0, Row { at_s: 2.0, load });
    let behind = go(planner.plan(4, &query, &[], 0, 4.0));
    assert!((behind.queue_s - 3.0).abs() < 1e-9, "a queue of 5 s has drained for 2 s");
    planner.report(0, Row { at_s: 1.5, load: Load::default() });
    assert!((planner.reported_s(0) - 2.0).abs() < 1e-9, "older rows are ignored");
}

#[test]
fn over_the_objective_is_refused_with_the_best_on_offer() {
    let keys = keys(10);
    let query = Query { tokens: 10 * BLOCK, keys: &keys };
    for kind in [RouterKind::Ours, RouterKind::Mooncake] {
        let mut planner = planner(kind, Some(5.0), &[30.0, 40.0]);
        let Decision::Reject { best_s } = planner.plan(1, &query, &[], 0, 0.0) else {
            panic!("{kind:?} accepted");
        };
        assert!((30.0..32.0).contains(&best_s), "{kind:?}: {best_s}");
    }
}

#[test]
fn near_saturation_the_cache_weighs_more_than_a_short_wait() {
    let cached = [Runs::NONE, Runs::local(0, 38, 38)];
    let chosen = |busy: bool| {
        let mut planner = planner(RouterKind::Ours, None, &[0.0, 0.0]);
        let mut now_s = 0.0;
        for request in 0..400 {
            // Fresh prompts of 40 blocks, at a rate that leaves the replicas idle or busy.
            now_s += if busy { 1.3 } else { 60.0 };
            let keys = [request + (1 << 20)];
            let query = Query { tokens: 40 * BLOCK, keys: &keys };
            go(planner.plan(request, &query, &[], 0, now_s));
            for replica in 0..2 {
                let load = Load { queue_s: 3.0, waiting: 2, accepting: true, ..Load::default() };
                planner.report(replica, Row { at_s: now_s, load });
            }
        }
        // Replica 1 holds the prefix but is free two seconds later.
        for (replica, queue_s) in [(0, 3.0), (1, 5.5)] {
            let load = Load { queue_s, waiting: 2, accepting: true, ..Load::default() };
            planner.report(replica, Row { at_s: now_s, load });
        }
        let keys = keys(40);
        let query = Query { tokens: 40 * BLOCK, keys: &keys };
        go(planner.plan(1 << 30, &query, &cached, 0, now_s)).replica
    };
    assert_eq!(chosen(true), 1);
}
