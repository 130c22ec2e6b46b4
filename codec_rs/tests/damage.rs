//! Whatever a container's bytes are, decoding answers, and never with other bytes than were encoded.

mod common;

use common::{CODECS, DTYPES, decode_on, encode_on, isas, model_like};
use mooncake_codec::{Codec, CodecError, Header, Shape, checksum, header_len};
use proptest::prelude::*;

/// Write a correct checksum over a header, so that damage reaches what lies behind it.
fn reseal(container: &mut [u8], shape: &Shape) {
    let head = header_len(shape);
    container[32..40].fill(0);
    let sum = checksum(&container[..head]);
    container[32..40].copy_from_slice(&sum.to_le_bytes());
}

fn container(dtype: usize, codec: usize, tokens: u32) -> (Shape, Codec, Vec<u8>, Vec<u8>) {
    let shape = Shape { dtype: DTYPES[dtype], planes: 2, tokens, channels: 48 };
    let raw = model_like(&shape, 11);
    let coded = encode_on(isas()[0], CODECS[codec], &shape, &raw);
    (shape, CODECS[codec], raw, coded)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn damage_is_an_error_or_harmless(
        dtype in 0..DTYPES.len(), codec in 0..CODECS.len(), tokens in 1u32..70,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        sealed: bool, cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let (shape, codec, raw, mut coded) = container(dtype, codec, tokens);
        for (at, byte) in damage {
            let at = at.index(coded.len());
            coded[at] = byte;
        }
        if sealed {
            reseal(&mut coded, &shape);
        }
        if let Some(cut) = cut {
            coded.truncate(cut.index(coded.len()));
        }
        for isa in isas() {
            if let Ok(back) = decode_on(isa, &coded, raw.len()) {
                prop_assert!(back == raw, "{:?} {:?} gave other bytes", isa, codec);
            }
        }
    }

    #[test]
    fn planes_of_noise_are_errors(
        dtype in 1..DTYPES.len(), codec in 1..CODECS.len(), tokens in 1u32..70, keep in 0usize..200,
        noise in proptest::collection::vec(any::<u8>(), 0..4000), len in any::<u32>(),
    ) {
        let (shape, codec, raw, mut coded) = container(dtype, codec, tokens);
        let head = header_len(&shape);
        coded.truncate(head + keep.min(coded.len() - head));
        coded.extend(&noise);
        let room = coded.len() - head;
        let entries = [(head, len as usize % (room + 1)), (head + room, 0)];
        for (plane, (offset, len)) in entries.into_iter().enumerate() {
            let entry = &mut coded[64 + 24 * plane..][..24];
            entry[..8].copy_from_slice(&(offset as u64).to_le_bytes());
            entry[8..12].copy_from_slice(&(len as u32).to_le_bytes());
            entry[12] = codec as u8;
        }
        reseal(&mut coded, &shape);
        prop_assert!(Header::parse(&coded).is_ok());
        for isa in isas() {
            prop_assert!(decode_on(isa, &coded, raw.len()).is_err());
        }
    }
}

#[test]
fn a_wrong_plane_checksum_is_corruption() {
    for codec in 0..CODECS.len() {
        let (shape, _, raw, mut coded) = container(1, codec, 64);
        coded[64 + 16] ^= 1;
        reseal(&mut coded, &shape);
        assert_eq!(decode_on(isas()[0], &coded, raw.len()), Err(CodecError::Corrupt(0)));
    }
}

#[test]
fn the_callers_buffer_must_fit() {
    let (_, _, raw, coded) = container(1, 1, 16);
    for len in [raw.len() - 1, raw.len() + 1] {
        let error = decode_on(isas()[0], &coded, len);
        assert_eq!(error, Err(CodecError::WrongSize { have: len, want: raw.len() }));
    }
}
