//! The log's directory: any slot is a record or nothing, and a log takes back what is in place or
//! refuses it.

use _store::log::{Found, Log, PAGE, RECORD_BYTES, Record};

/// The record's check is made right first, so that its fields are reached.
pub fn run(bytes: &[u8]) {
    let mut log = Log::new(4, 64 * PAGE as u64);
    log.restore_segments(4);
    for slot in bytes.as_chunks::<RECORD_BYTES>().0 {
        let _ = Record::decode(slot);
        let mut slot = *slot;
        slot[..8].copy_from_slice(b"MKVR\x01\0\0\0");
        let check = blake3::hash(&slot[..RECORD_BYTES - 8]);
        slot[RECORD_BYTES - 8..].copy_from_slice(&check.as_bytes()[..8]);
        let Found::Record(record) = Record::decode(&slot) else { panic!("a right check") };
        if let Some(entry) = log.restore(&record) {
            let place = log.place(entry);
            let end = log.offset(&place) + u64::from(place.len);
            assert!(end <= log.segment_offset(place.segment + 1));
        }
    }
    assert!(log.live_bytes() <= log.allocated_bytes());
}

/// Records of one segment in order.
pub fn samples() -> Vec<Vec<u8>> {
    let record = |slot: u32| {
        let (key, page) = ([slot as u8; 32], 2 * slot);
        let (generation, segment, len, sum) = (7, 1, 5000, 9);
        Record { key, parent: None, tenant: 1, generation, segment, slot, page, len, sum }.encode()
    };
    (1..5).map(|count| (0..count).flat_map(record).collect()).collect()
}
