//! Rate of `copy_checksum` beside memcpy, cycling through 512 MiB: `cargo run --release --example copy_rate`.
use std::time::Instant;

fn main() {
    const BLOCK: usize = 4 << 20;
    let source = vec![7u8; 512 << 20];
    let mut target = vec![1u8; 512 << 20];
    for _ in 0..5 {
        let (mut plain, mut fused) = (0.0f64, 0.0f64);
        for (from, to) in source.chunks_exact(BLOCK).zip(target.chunks_exact_mut(BLOCK)) {
            let start = Instant::now();
            to.copy_from_slice(from);
            plain += start.elapsed().as_secs_f64();
        }
        for (from, to) in source.chunks_exact(BLOCK).zip(target.chunks_exact_mut(BLOCK)) {
            let start = Instant::now();
            for (from, to) in from.chunks(96 << 10).zip(to.chunks_mut(96 << 10)) {
                // SAFETY: both chunks have the same length and do not overlap.
                std::hint::black_box(unsafe {
                    mooncake_codec::copy_checksum(from.as_ptr(), to.as_mut_ptr(), from.len())
                });
            }
            fused += start.elapsed().as_secs_f64();
        }
        let gb = source.len() as f64 / 1e9;
        eprintln!("memcpy {:.2} GB/s, copy_checksum {:.2} GB/s", gb / plain, gb / fused);
    }
}
