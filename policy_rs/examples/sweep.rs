#![allow(clippy::print_stdout, missing_docs)]
use mooncake_policy::sim::*;
use mooncake_policy::sim::trace::Trace;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let text = std::fs::read_to_string("/work/shared/data/conversation_trace.jsonl").unwrap();
    let tr = Trace::parse(&text, 512).unwrap();
    let profile: Profile = serde_json::from_str(&std::fs::read_to_string("/work/shared/data/profile_a800x8-llama70b.json").unwrap()).unwrap();
    let list = |s: &str| s.split(',').map(|x| x.to_owned()).collect::<Vec<_>>();
    let slice = if a.len() > 5 { let v: Vec<f64> = a[5].split(':').map(|x| x.parse().unwrap()).collect(); (v[0], v[1]) } else { (0.0, 1.0) };
    for n in list(&a[1]) { for sp in list(&a[2]) { for r in list(&a[3]) { for p in list(&a[4]) {
        let c = Config { nodes: n.parse().unwrap(), speed: sp.parse().unwrap(), router: r.clone(), policy: p.clone(), slice,
            peers: std::env::var("NOPEERS").is_err(), dram_blocks: std::env::var("DRAM").map_or(5860, |v| v.parse().unwrap()),
            nvme_blocks: std::env::var("NVME").map_or(0, |v| v.parse().unwrap()),
            ..Config::default() };
        let t = std::time::Instant::now();
        let o = simulate(&tr, &profile, &c).unwrap();
        println!("{n:>4} x{sp:<5} {r:15} {p:7} hit {:.4} (peer {:.4} nvme {:.4}) pr {:.3} imb {:.3} ttft {:8.3} p50 {:8.3} p99 {:8.3} q {:8.3} work {:.0}  wall {:.2}",
            o.hit_rate, o.hit_rate_by_tier.peer, o.hit_rate_by_tier.nvme, o.predicted_over_reused, o.imbalance, o.ttft_s.mean, o.ttft_s.p50, o.ttft_s.p99, o.queue_s.mean, o.work_s, t.elapsed().as_secs_f64());
    }}}}
}
