//! The simulator on generated traces: determinism, conservation, golden figures.

use mooncake_policy::sim::trace::Trace;
use mooncake_policy::sim::{Config, Profile, Report, Shape, generate, simulate};

const PROFILE: &str = r#"{
    "name": "test", "fixed_s": 0.03, "token_s": 1.1e-4, "attn_s": 2.1e-9,
    "kv_bytes_per_token": 327680, "block_tokens": 512,
    "tiers": {
        "device": {"latency_s": 0, "bytes_per_s": null},
        "dram": {"latency_s": 0.0005, "bytes_per_s": 1e11},
        "nvme": {"latency_s": 0.002, "bytes_per_s": 2.4e10},
        "peer": {"latency_s": 0.001, "bytes_per_s": 8.7e10}
    },
    "decode_s_per_token": 0.03, "max_decode": 256
}"#;
const ROUTERS: [&str; 7] =
    ["ours", "round-robin", "pow2", "longest-prefix", "ray-prefix", "dynamo", "mooncake"];
const POLICIES: [&str; 5] = ["ours", "lru", "arc", "s3fifo", "belady"];

fn profile() -> Profile {
    serde_json::from_str(PROFILE).expect("the profile is valid")
}

fn trace(requests: usize) -> Trace {
    generate(&Shape { requests, ..Shape::default() }, 1)
}

fn run(trace: &Trace, config: &Config) -> Report {
    simulate(trace, &profile(), config).expect("the configuration is valid")
}

#[test]
fn a_run_repeats_and_a_trace_survives_its_text() {
    let trace = trace(600);
    let again = Trace::parse(&trace.to_text(), 512).expect("own text");
    assert_eq!(again.requests.len(), trace.requests.len());
    for router in ROUTERS {
        let config = Config { router: router.to_owned(), series: true, ..Config::default() };
        assert_eq!(run(&trace, &config), run(&trace, &config), "{router}");
    }
}

#[test]
fn every_request_is_served_once_and_time_adds_up() {
    let trace = trace(800);
    for router in ROUTERS {
        for (device_blocks, nvme_blocks, peers) in [(0, 0, true), (300, 4000, true), (0, 0, false)]
        {
            let config = Config {
                router: router.to_owned(),
                nodes: 3,
                device_blocks,
                dram_blocks: 1500,
                nvme_blocks,
                peers,
                series: true,
                ..Config::default()
            };
            let report = run(&trace, &config);
            let series = report.series.as_ref().expect("asked for");
            assert_eq!((report.rejected, series.ttft_s.len()), (0, 800), "{router}");
            let work_s: f64 = series.work_s.iter().sum();
            assert!((work_s - report.work_s).abs() < 1e-6 * work_s, "{router}");
            for (ttft_s, work_s) in series.ttft_s.iter().zip(&series.work_s) {
                assert!(*ttft_s >= work_s - 1e-9, "{router}: {ttft_s} < {work_s}");
            }
            let tiers = report.hit_rate_by_tier;
            let sum = tiers.device + tiers.dram + tiers.nvme + tiers.peer;
            assert!((sum - report.hit_rate).abs() < 1e-9, "{router}");
            assert!(peers || tiers.peer == 0.0, "{router}");
            assert!((nvme_blocks > 0) == (tiers.nvme > 0.0), "{router}: {tiers:?}");
            assert!((device_blocks > 0) == (tiers.device > 0.0), "{router}: {tiers:?}");
            assert!(report.imbalance >= 1.0 && report.imbalance <= 3.0 + 1e-9, "{router}");
        }
    }
}

#[test]
fn one_pool_equals_an_instant_replay() {
    // The plainest model of a prefix cache: a list by recency, tail first, checked against LRU.
    let trace = trace(700);
    let (capacity, mut reused, mut total) = (900, 0, 0);
    let mut recent: Vec<u32> = Vec::new();
    for request in &trace.requests {
        total += request.blocks.len();
        reused += request.blocks.iter().take_while(|block| recent.contains(block)).count();
        recent.retain(|block| !request.blocks.contains(block));
        // Tail first: the end of the prompt is older than its beginning.
        recent.extend(request.blocks.iter().rev());
        let excess = recent.len().saturating_sub(capacity);
        recent.drain(..excess);
    }
    let config = Config {
        nodes: 1,
        dram_blocks: capacity,
        policy: "lru".to_owned(),
        router: "round-robin".to_owned(),
        ..Config::default()
    };
    let report = run(&trace, &config);
    let expected = f64::from(reused as u32) / f64::from(total as u32);
    assert!((report.hit_rate - expected).abs() < 0.01, "{} against {expected}", report.hit_rate);
}

#[test]
fn no_policy_beats_belady_and_all_reach_it_with_enough_room() {
    let trace = trace(1500);
    let hits = |policy: &str, dram_blocks| {
        let policy = policy.to_owned();
        run(&trace, &Config { nodes: 1, dram_blocks, policy, ..Config::default() }).hit_rate
    };
    for blocks in [500, 2000, 6000] {
        let best = hits("belady", blocks);
        for policy in POLICIES {
            assert!(hits(policy, blocks) <= best + 1e-9, "{policy} at {blocks}");
        }
    }
    let all = hits("belady", trace.unique_blocks);
    for policy in POLICIES {
        assert!((hits(policy, trace.unique_blocks) - all).abs() < 1e-9, "{policy}");
    }
}

#[test]
fn ours_is_no_worse_than_lru_on_a_trace_without_structure_and_gains_from_hints() {
    let trace = trace(6000);
    let hits = |policy: &str, dram_blocks, hint_accuracy| {
        let policy = policy.to_owned();
        let config = Config { nodes: 1, dram_blocks, policy, hint_accuracy, ..Config::default() };
        run(&trace, &config).hit_rate
    };
    for blocks in [1000, 5000, 10_000, 20_000] {
        let (ours, lru) = (hits("ours", blocks, None), hits("lru", blocks, None));
        assert!(ours >= lru - 0.002, "{blocks}: {ours} against {lru}");
        let hinted = hits("ours", blocks, Some(0.8));
        assert!(hinted > ours + 0.01, "{blocks}: {hinted} with hints, {ours} without");
    }
}

#[test]
fn near_saturation_ours_has_the_best_latency() {
    let trace = trace(3000);
    let ttft = |router: &str| {
        let router = router.to_owned();
        let config =
            Config { router, nodes: 4, dram_blocks: 3000, speed: 0.9, ..Config::default() };
        run(&trace, &config).ttft_s
    };
    let ours = ttft("ours");
    for router in &ROUTERS[1..] {
        let other = ttft(router);
        assert!(ours.mean <= 1.02 * other.mean, "{router}: {other:?}, ours {ours:?}");
        assert!(ours.p99 <= 1.05 * other.p99, "{router}: {other:?}, ours {ours:?}");
    }
}

#[test]
fn refusals_count_as_failed_and_keep_the_rest_fast() {
    let trace = trace(1000);
    let config = Config { nodes: 1, slo_s: Some(30.0), ..Config::default() };
    let report = run(&trace, &config);
    assert!(report.rejected > 100, "one node cannot serve this: {}", report.rejected);
    assert!(report.ttft_s.p99 <= 30.0 + 1e-6, "{:?}", report.ttft_s);
}

#[test]
fn a_thousand_nodes_work() {
    let trace = trace(400);
    let config = Config { nodes: 1000, speed: 100.0, ..Config::default() };
    assert_eq!(run(&trace, &config).rejected, 0);
}

#[test]
fn mistakes_are_named() {
    let trace = trace(10);
    let fails = |config: Config| simulate(&trace, &profile(), &config).expect_err("is invalid");
    assert!(fails(Config { nodes: 0, ..Config::default() }).contains("nodes is 0"));
    assert!(fails(Config { speed: 0.0, ..Config::default() }).contains("speed is 0"));
    let unknown = Config { policy: "mru".to_owned(), ..Config::default() };
    assert!(fails(unknown).contains("use ours, lru"));
    let router = Config { router: "best".to_owned(), ..Config::default() };
    assert!(fails(router).contains("use ours, round-robin"));
    assert!(fails(Config { slice: (0.5, 0.5), ..Config::default() }).contains("slice"));
    let line = r#"{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}"#;
    let error = Trace::parse(line, 512).expect_err("two blocks are needed");
    assert!(error.contains("line 1") && error.contains("block size"), "{error}");
}
