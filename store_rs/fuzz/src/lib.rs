//! Whatever bytes come, from a socket, a disk or another node: a message, or a refusal.
//!
//! One module per decoder, each with `run` for one input and `samples` of valid ones. Under
//! cargo-fuzz (`cargo +nightly fuzz run wire`, from `store_rs`) libFuzzer finds the inputs. Without
//! it the same binaries damage the samples at random, from a seed they print (`make fuzz`).

pub mod container;
pub mod record;
pub mod wire;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

const RUNS: u64 = 200_000;
const LONGEST: u64 = 4096;

/// The main program of one target.
#[macro_export]
macro_rules! target {
    ($name:ident) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!(|bytes: &[u8]| $crate::$name::run(bytes));

        #[cfg(not(fuzzing))]
        fn main() {
            $crate::short(stringify!($name), $crate::$name::run, &$crate::$name::samples());
        }
    };
}

/// Damaged samples and noise, `MOONCAKE_RUNS` of them from `MOONCAKE_SEED`.
pub fn short(name: &str, run: fn(&[u8]), samples: &[Vec<u8>]) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (seed, runs) =
        (number("MOONCAKE_SEED").unwrap_or(1), number("MOONCAKE_RUNS").unwrap_or(RUNS));
    for at in 0..runs {
        let bytes = damaged(seed.wrapping_add(at), samples);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&bytes))) {
            let seed = seed.wrapping_add(at);
            eprintln!("{name}: replay with MOONCAKE_SEED={seed} MOONCAKE_RUNS=1: {bytes:02x?}");
            resume_unwind(panic);
        }
    }
    eprintln!("{name}: {runs} inputs from seed {seed}");
}

fn damaged(seed: u64, samples: &[Vec<u8>]) -> Vec<u8> {
    let mut noise = blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof();
    let mut below = |bound: u64| {
        let mut word = [0; 8];
        noise.fill(&mut word);
        u64::from_le_bytes(word) % bound.max(1)
    };
    if below(4) == 0 {
        return (0..below(LONGEST)).map(|_| below(256) as u8).collect();
    }
    let mut bytes = samples[below(samples.len() as u64) as usize].clone();
    for _ in 0..below(6) {
        let at = below(bytes.len() as u64) as usize;
        match below(5) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, below(256) as u8),
            2 if !bytes.is_empty() => bytes[at] ^= 1 << below(8),
            3 if !bytes.is_empty() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][below(5) as usize],
            _ => {
                let from = at.saturating_sub(below(64) as usize);
                bytes.extend_from_within(from..at);
            }
        }
    }
    bytes
}
