//! Compiles one C++ unit for each instruction set, and digests what decides the kernels' bits.
//!
//! The digest covers sources, flags and the compiler's version. It is part of the numerics id:
//! kernels built from anything else never meet each other's KV.

use std::{env, fs, path::PathBuf, process::Command};

const COMMON: &[&str] =
    &["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"];

const AVX2: &[&str] = &["-mavx2", "-mfma", "-mf16c"];
const AVX512: &[&str] = &["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"];

const AVX512_BF16: &[&str] = &["-mavx512bf16"];

fn main() {
    let mut units: Vec<(&str, Vec<&str>)> = vec![("portable", vec![])];
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64") {
        units.push(("avx2", AVX2.to_vec()));
        units.push(("avx512", AVX512.to_vec()));
        // AMX needs no flag: its instructions are written as assembly.
        for unit in ["avx512_bf16", "amx"] {
            units.push((unit, [AVX512, AVX512_BF16].concat()));
        }
    }
    let mut digest = blake3::Hasher::new();
    for path in sources() {
        println!("cargo:rerun-if-changed={}", path.display());
        digest.update(&fs::read(&path).expect("a kernel source is readable"));
    }
    for (unit, flags) in units {
        let mut build = cc::Build::new();
        build.cpp(true).warnings(true).extra_warnings(true).file(format!("cpp/unit_{unit}.cc"));
        // GCC's own AVX-512 header trips this warning (its bug 105593).
        build.flag_if_supported("-Wno-maybe-uninitialized");
        build.flag_if_supported("-Wno-uninitialized");
        for flag in COMMON.iter().chain(&flags) {
            build.flag(flag);
            digest.update(flag.as_bytes());
        }
        digest.update(&compiler_version(&build.get_compiler()));
        build.compile(&format!("mk_{unit}"));
    }
    println!("cargo:rustc-env=MK_FINGERPRINT={}", &digest.finalize().to_hex()[..16]);
}

fn sources() -> Vec<PathBuf> {
    let entries = fs::read_dir("cpp").expect("the crate has a cpp directory");
    let mut paths: Vec<_> = entries.map(|e| e.expect("cpp is readable").path()).collect();
    paths.sort();
    paths
}

fn compiler_version(tool: &cc::Tool) -> Vec<u8> {
    let output = Command::new(tool.path()).arg("--version").output();
    output.map(|o| o.stdout).expect("the C++ compiler answers --version")
}
