//! `cargo +nightly fuzz run decode`, from `codec_rs`: any bytes are decoded or refused.
//!
//! The header's own checksum is made right first, so that the fuzzer reaches the planes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mooncake_codec::{Header, checksum, decode_into, verify};

/// Blocks beyond this only cost time.
const RAW_MAX: usize = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    let mut container = bytes.to_vec();
    if container.len() < 64 {
        return;
    }
    let planes = u32::from_le_bytes([container[8], container[9], container[10], container[11]]);
    let head = (64 + 24 * planes as usize).next_multiple_of(64);
    if head > container.len() {
        return;
    }
    container[..6].copy_from_slice(b"MKVB\x01\x00");
    container[32..40].fill(0);
    let sum = checksum(&container[..head]);
    container[32..40].copy_from_slice(&sum.to_le_bytes());
    let Ok(header) = Header::parse(&container) else { return };
    let Some(raw) = header.shape.raw_bytes().filter(|raw| *raw <= RAW_MAX) else { return };
    let mut out = vec![0; raw];
    assert_eq!(decode_into(&container, &mut out).is_ok(), verify(&container).is_ok());
});
