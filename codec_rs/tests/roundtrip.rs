//! Every codec gives back every bit, the same on every instruction set.

mod common;

use common::{CODECS, DTYPES, decode_on, encode_on, isas, model_like, words};
use mooncake_codec::{Codec, Dtype, Header, Shape, max_encoded_len, verify};
use proptest::prelude::*;

/// Encode and decode on every instruction set, against the oracle's bytes; the container.
fn check(codec: Codec, shape: &Shape, raw: &[u8]) -> Vec<u8> {
    let isas = isas();
    let want = encode_on(isas[0], codec, shape, raw);
    for isa in isas {
        assert_eq!(encode_on(isa, codec, shape, raw), want, "{isa:?} encodes other bytes");
        let back = decode_on(isa, &want, raw.len());
        assert!(back.as_deref() == Ok(raw), "{isa:?} decodes {codec:?} {shape:?} wrongly");
    }
    assert_eq!(verify(&want), Ok(()));
    want
}

fn shapes() -> impl Strategy<Value = Shape> {
    let dtype = proptest::sample::select(&DTYPES[..]);
    (dtype, 1u32..=2, 1u32..=70, 1u32..=130).prop_map(|(dtype, planes, tokens, channels)| Shape {
        dtype,
        planes,
        tokens,
        channels,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_bytes(shape in shapes(), codec in proptest::sample::select(&CODECS[..]), seed: u64) {
        let len = shape.raw_bytes().expect("a valid shape");
        let raw: Vec<u8> = words(seed).flat_map(u64::to_le_bytes).take(len).collect();
        let container = check(codec, &shape, &raw);
        prop_assert!(container.len() <= max_encoded_len(&shape).expect("a valid shape"));
    }

    #[test]
    fn values_of_a_model(shape in shapes(), codec in proptest::sample::select(&CODECS[..]),
                         seed: u64) {
        check(codec, &shape, &model_like(&shape, seed));
    }

    #[test]
    fn few_values(shape in shapes(), codec in proptest::sample::select(&CODECS[..]),
                  values in proptest::collection::vec(any::<u32>(), 1..4), seed: u64) {
        let size = shape.dtype.size();
        let len = shape.raw_bytes().expect("a valid shape");
        let picks = words(seed).map(|word| values[word as usize % values.len()].to_le_bytes());
        let raw: Vec<u8> = picks.flat_map(|bytes| bytes.into_iter().take(size)).take(len).collect();
        check(codec, &shape, &raw);
    }
}

#[test]
fn blocks_of_a_model_are_coded_and_gain() {
    let sizes = [(Dtype::Bf16, 0.75, 0.70), (Dtype::F32, 0.87, 0.85), (Dtype::F16, 0.95, 0.90)];
    for (dtype, fast, dense) in sizes {
        let shape = Shape { dtype, planes: 4, tokens: 256, channels: 192 };
        let raw = model_like(&shape, 7);
        for (codec, most) in [(Codec::Fast, fast), (Codec::Dense, dense)] {
            let container = check(codec, &shape, &raw);
            let header = Header::parse(&container).expect("parses");
            assert!(header.planes.iter().all(|plane| plane.codec == codec), "{dtype:?} {codec:?}");
            let ratio = container.len() as f64 / raw.len() as f64;
            assert!(ratio <= most, "{dtype:?} {codec:?} stores {ratio:.3}");
        }
    }
}

#[test]
fn special_values_survive_among_ordinary_ones() {
    let shape = Shape { dtype: Dtype::Bf16, planes: 1, tokens: 64, channels: 96 };
    // Zeros, subnormals, infinities, quiet and signalling NaNs with payloads.
    let special: [u16; 10] =
        [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF];
    let mut raw = model_like(&shape, 3);
    for (at, value) in special.into_iter().enumerate() {
        raw[at * 1100..at * 1100 + 2].copy_from_slice(&value.to_le_bytes());
    }
    for codec in CODECS {
        check(codec, &shape, &raw);
    }
}

#[test]
fn zeros_shrink_and_one_symbol_needs_no_bits() {
    let shape = Shape { dtype: Dtype::Bf16, planes: 1, tokens: 256, channels: 192 };
    let raw = vec![0; shape.raw_bytes().expect("a valid shape")];
    let container = check(Codec::Dense, &shape, &raw);
    assert!(container.len() < raw.len() / 2, "{} bytes", container.len());
}

#[test]
fn the_last_symbol_of_the_table_is_coded() {
    let shape = Shape { dtype: Dtype::Bf16, planes: 1, tokens: 64, channels: 64 };
    // Among zeros, the least normal number and -1: their exponents are as far apart as can be.
    let mut raw = vec![0; shape.raw_bytes().expect("a valid shape")];
    for (at, value) in raw.as_chunks_mut().0.iter_mut().enumerate().step_by(9) {
        *value = [0x0080u16, 0xBF80][at % 2].to_le_bytes();
    }
    let container = check(Codec::Dense, &shape, &raw);
    assert_eq!(Header::parse(&container).expect("parses").planes[0].codec, Codec::Dense);
}

#[test]
fn random_bytes_grow_by_the_header_alone() {
    let shape = Shape { dtype: Dtype::Bf16, planes: 60, tokens: 16, channels: 192 };
    let len = shape.raw_bytes().expect("a valid shape");
    let raw: Vec<u8> = words(1).flat_map(u64::to_le_bytes).take(len).collect();
    for codec in CODECS {
        let container = check(codec, &shape, &raw);
        assert!(Header::parse(&container).expect("parses").is_raw());
        assert!(container.len() as f64 <= len as f64 * 1.01);
    }
}

#[test]
fn planes_choose_their_codec_one_by_one() {
    let one = Shape { dtype: Dtype::Bf16, planes: 1, tokens: 64, channels: 64 };
    let shape = Shape { planes: 4, ..one };
    let noise: Vec<u8> =
        words(5).flat_map(u64::to_le_bytes).take(one.plane_bytes().expect("valid")).collect();
    let values = model_like(&one, 5);
    let raw = [values.clone(), noise.clone(), noise, values].concat();
    let container = check(Codec::Dense, &shape, &raw);
    let header = Header::parse(&container).expect("parses");
    let codecs: Vec<Codec> = header.planes.iter().map(|plane| plane.codec).collect();
    assert_eq!(codecs, [Codec::Dense, Codec::None, Codec::None, Codec::Dense]);
    assert!(header.planes.iter().step_by(3).all(|plane| plane.offset % 64 == 0));
}
