//! `cargo +nightly fuzz run record`, from `store_rs`: any slot of a directory is a record or
//! nothing, and a log takes back what is in place or refuses it.
//!
//! The record's check is made right first, so that the fuzzer reaches the fields.
#![no_main]

use _store::log::{Found, Log, PAGE, RECORD_BYTES, Record};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut log = Log::new(4, 64 * PAGE as u64);
    log.restore_segments(4);
    for chunk in bytes.chunks_exact(RECORD_BYTES) {
        let mut slot = [0; RECORD_BYTES];
        slot.copy_from_slice(chunk);
        let _ = Record::decode(&slot);
        slot[..8].copy_from_slice(b"MKVR\x01\0\0\0");
        let check = blake3::hash(&slot[..RECORD_BYTES - 8]);
        slot[RECORD_BYTES - 8..].copy_from_slice(&check.as_bytes()[..8]);
        let Found::Record(record) = Record::decode(&slot) else { panic!("a right check") };
        if let Some(entry) = log.restore(&record) {
            let place = log.place(entry);
            assert!(log.offset(&place) + u64::from(place.len) <= log.segment_offset(place.segment + 1));
        }
    }
    assert!(log.live_bytes() <= log.allocated_bytes());
});
