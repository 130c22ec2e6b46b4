//! scratch
use mooncake_codec::*;
use std::time::Instant;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let mut raw = Vec::new();
    for f in args[2].split(',') {
        raw.extend(std::fs::read(f).expect("file"));
    }
    let codec = match args[1].as_str() {
        "fast" => Codec::Fast,
        "dense" => Codec::Dense,
        "zstd" => Codec::Zstd,
        _ => Codec::None,
    };
    if let Some(isa) = args.get(3) {
        limit_isa(match isa.as_str() {
            "scalar" => Isa::Scalar,
            "avx2" => Isa::Avx2,
            _ => Isa::Avx512,
        });
    }
    eprintln!("{:?}", Isa::current());
    let shape = Shape { dtype: Dtype::Bf16, planes: 60, tokens: 256, channels: 192 };
    let n = shape.raw_bytes().expect("s");
    let max = max_encoded_len(&shape).expect("m");
    let blocks = raw.len() / n;
    let lay =
        std::alloc::Layout::from_size_align(blocks * max.next_multiple_of(64), 64).expect("l");
    let mut coded =
        unsafe { Vec::from_raw_parts(std::alloc::alloc_zeroed(lay), lay.size(), lay.size()) };
    let mut back = unsafe {
        Vec::from_raw_parts(
            std::alloc::alloc_zeroed(
                std::alloc::Layout::from_size_align(raw.len(), 64).expect("l"),
            ),
            raw.len(),
            raw.len(),
        )
    };
    let mut lens = vec![0; blocks];
    let (mut e, mut d, mut m) =
        (vec![f64::MAX; blocks], vec![f64::MAX; blocks], vec![f64::MAX; blocks]);
    back.fill(1);
    coded.fill(1);
    for _ in 0..std::env::var("REPS").map_or(9, |v| v.parse().expect("n")) {
        for b in 0..blocks {
            let t = Instant::now();
            back[b * n..(b + 1) * n].copy_from_slice(&raw[b * n..(b + 1) * n]);
            m[b] = m[b].min(t.elapsed().as_secs_f64());
        }
        for b in 0..blocks {
            let t = Instant::now();
            let o = b * max.next_multiple_of(64);
            lens[b] =
                encode(codec, &shape, &raw[b * n..(b + 1) * n], &mut coded[o..o + max]).expect("e");
            e[b] = e[b].min(t.elapsed().as_secs_f64());
        }
        back.fill(0);
        for b in 0..blocks {
            let t = Instant::now();
            let o = b * max.next_multiple_of(64);
            decode_into(&coded[o..o + lens[b]], &mut back[b * n..(b + 1) * n]).expect("d");
            d[b] = d[b].min(t.elapsed().as_secs_f64());
        }
        assert!(back == raw);
    }
    let (e, d, m) = (e.iter().sum::<f64>(), d.iter().sum::<f64>(), m.iter().sum::<f64>());
    let gb = raw.len() as f64 / 1e9;
    let (mut k, mut v, mut ck, mut cv) = (0, 0, 0, 0);
    for b in 0..blocks {
        let h = Header::parse(&coded[b * max.next_multiple_of(64)..][..max]).expect("h");
        for (i, p) in h.planes.iter().enumerate() {
            if i % 2 == 0 {
                k += p.len;
                ck += 1
            } else {
                v += p.len;
                cv += 1
            }
        }
    }
    let pb = shape.plane_bytes().expect("p") as f64;
    // hot
    let mut hot = vec![];
    for _ in 0..std::env::var("HOT").map_or(100, |v| v.parse().expect("n")) {
        let t = Instant::now();
        for _ in 0..1 {
            decode_into(&coded[..lens[0]], &mut back[..n]).expect("d");
        }
        hot.push(t.elapsed().as_secs_f64());
    }
    hot.sort_by(f64::total_cmp);
    eprintln!(
        "ratio {:.4} (k {:.4} v {:.4}) enc {:.2} dec {:.2} memcpy {:.2} block-hot dec {:.2}",
        lens.iter().sum::<usize>() as f64 / raw.len() as f64,
        f64::from(k) / f64::from(ck) / pb,
        f64::from(v) / f64::from(cv) / pb,
        gb / e,
        gb / d,
        gb / m,
        n as f64 / 1e9 / hot[0]
    );
    std::mem::forget(coded);
    std::mem::forget(back);
}
