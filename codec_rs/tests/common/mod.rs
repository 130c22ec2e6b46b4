//! Blocks to code, and one call that codes them on a chosen instruction set.

use std::sync::{Mutex, PoisonError};

use mooncake_codec::{
    Codec, CodecError, Dtype, Isa, Shape, decode_into, encode, limit_isa, max_encoded_len,
};

pub(crate) const DTYPES: [Dtype; 6] =
    [Dtype::Opaque, Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::F8E4M3, Dtype::F8E5M2];
pub(crate) const CODECS: [Codec; 4] = [Codec::None, Codec::Fast, Codec::Dense, Codec::Zstd];

/// The limit is the process's: one test at a time changes it.
static LIMIT: Mutex<()> = Mutex::new(());

/// Instruction sets of this machine, the oracle first.
pub(crate) fn isas() -> Vec<Isa> {
    let all = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512];
    all.into_iter().filter(|isa| isa.available()).collect()
}

pub(crate) fn encode_on(isa: Isa, codec: Codec, shape: &Shape, raw: &[u8]) -> Vec<u8> {
    let _one = LIMIT.lock().unwrap_or_else(PoisonError::into_inner);
    limit_isa(isa);
    let mut out = vec![0xAA; max_encoded_len(shape).expect("a valid shape")];
    let len = encode(codec, shape, raw, &mut out).expect("a valid block encodes");
    out.truncate(len);
    out
}

pub(crate) fn decode_on(isa: Isa, container: &[u8], len: usize) -> Result<Vec<u8>, CodecError> {
    let _one = LIMIT.lock().unwrap_or_else(PoisonError::into_inner);
    limit_isa(isa);
    let mut out = vec![0x55; len];
    decode_into(container, &mut out).map(|_| out)
}

/// A sequence of pseudo-random words (splitmix64).
pub(crate) fn words(seed: u64) -> impl Iterator<Item = u64> {
    (1u64..).map(move |i| {
        let mut z = seed.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    })
}

/// Elements as a model makes them: each channel has its scale, its mean and slowly turning signs.
pub(crate) fn model_like(shape: &Shape, seed: u64) -> Vec<u8> {
    let mut noise = words(seed);
    let mut unit = move || (noise.next().unwrap_or(0) >> 11) as f32 / (1u64 << 53) as f32;
    let channels: Vec<(f32, f32, f32)> =
        (0..shape.channels).map(|_| (0.1 + 4.0 * unit(), 6.0 * unit(), 3.0 * unit())).collect();
    let mut raw = Vec::new();
    for _ in 0..shape.planes {
        for token in 0..shape.tokens {
            for (scale, mean, speed) in &channels {
                let bell: f32 = (0..4).map(|_| unit() - 0.5).sum();
                let value = mean * (speed * token as f32).cos() + scale * bell;
                push(&mut raw, shape.dtype, value);
            }
        }
    }
    raw
}

/// Append a value in a dtype; truncation is fine for a test.
fn push(raw: &mut Vec<u8>, dtype: Dtype, value: f32) {
    let bits = value.to_bits();
    let sign = bits >> 31;
    let exponent = (bits >> 23 & 0xFF) as i32 - 127;
    let narrow = |bias: i32, mantissa: u32| {
        let biased = (exponent + bias).clamp(0, 2 * bias) as u32;
        biased << mantissa | (bits & 0x7F_FFFF) >> (23 - mantissa)
    };
    match dtype {
        Dtype::F32 => raw.extend(bits.to_le_bytes()),
        Dtype::Bf16 => raw.extend(((bits >> 16) as u16).to_le_bytes()),
        Dtype::F16 => raw.extend(((sign << 15 | narrow(15, 10)) as u16).to_le_bytes()),
        Dtype::F8E4M3 => raw.push((sign << 7 | narrow(7, 3)) as u8),
        Dtype::F8E5M2 | Dtype::Opaque => raw.push((sign << 7 | narrow(15, 2)) as u8),
    }
}
