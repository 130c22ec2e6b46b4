#![allow(clippy::print_stdout, missing_docs)]
use mooncake_policy::evict::*;
use mooncake_policy::sim::trace::Trace;
use std::collections::HashMap;

fn run(tr: &Trace, kind: PolicyKind, cap: usize, hints: Option<f64>) -> f64 {
    let mut p = kind.build(cap);
    // future
    let mut last: Vec<usize> = vec![0; tr.unique_blocks];
    for (i, r) in tr.requests.iter().enumerate() { for &b in &r.blocks { last[b as usize] = i; } }
    let mut rng: u64 = 12345;
    let mut rnd = || { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; (rng >> 11) as f64 / (1u64 << 53) as f64 };
    let mut at: HashMap<u32, u32> = HashMap::new();
    let mut of: Vec<u32> = vec![];
    let (mut hit, mut tot) = (0usize, 0usize);
    for (i, r) in tr.requests.iter().enumerate() {
        let n = r.blocks.len();
        let hint = hints.map_or(Hint::NONE, |a| {
            // is the last full block used again
            let full = (r.input_tokens / tr.block_tokens) as usize;
            let b = r.blocks[full.max(1) - 1];
            let again = last[b as usize] > i;
            let right = rnd() < a;
            Hint::new(if again == right { 1.0 } else { -1.0 })
        });
        tot += n;
        let m = r.blocks.iter().take_while(|b| at.contains_key(b)).count();
        hit += m;
        let mut parent = None;
        for (k, &b) in r.blocks.iter().enumerate() {
            let touch = Touch { hint, partial: k == n - 1 && r.input_tokens % tr.block_tokens != 0 };
            if let Some(&id) = at.get(&b) {
                p.touch(id, touch);
                if let Some(q) = parent { p.unpin(q); }
                p.pin(id);
                parent = Some(id);
            } else {
                let mut full = false;
                while p.len() >= cap {
                    let Some(v) = p.victim() else { full = true; break };
                    let vb = of[v as usize];
                    at.remove(&vb);
                    p.remove(v, vb as u64, true);
                }
                if full { break; }
                let id = p.insert(b as u64, parent, touch);
                if of.len() <= id as usize { of.resize(id as usize + 1, 0); }
                of[id as usize] = b;
                at.insert(b, id);
                if let Some(q) = parent { p.unpin(q); }
                p.pin(id);
                parent = Some(id);
            }
        }
        if let Some(q) = parent { p.unpin(q); }
    }
    hit as f64 / tot as f64
}

fn main() {
    let text = std::fs::read_to_string("/work/shared/data/conversation_trace.jsonl").unwrap();
    let whole = Trace::parse(&text, 512).unwrap();
    for (name, a, b) in [("whole", 0., 1.), ("first", 0., 0.5), ("second", 0.5, 1.)] {
        let tr = whole.slice(a, b);
        println!("{name}");
        for (pn, k) in [("lru", PolicyKind::Lru), ("arc", PolicyKind::Arc), ("s3", PolicyKind::S3Fifo), ("ours", PolicyKind::Ours)] {
            print!("{pn:8}");
            for cap in [2000, 5000, 10000, 20000, 40000] { print!(" {:.4}", run(&tr, k, cap, None)); }
            println!();
        }
        print!("ours+h  ");
        for cap in [2000, 5000, 10000, 20000, 40000] { print!(" {:.4}", run(&tr, PolicyKind::Ours, cap, Some(0.8))); }
        println!();
    }
}
