use super::*;
use crate::index::{Hint, Usage};
use proptest::prelude::*;

fn round_trip(request: Request<'_>) {
    let mut bytes = Vec::new();
    request.encode(42, &mut bytes);
    let (header, payload) = split(&bytes).expect("valid").expect("whole");
    assert_eq!((header.seq, header.len + HEADER_BYTES), (42, bytes.len()));
    assert_eq!(Request::decode(header.op, payload).expect("decodes"), request);
    for cut in 0..bytes.len() {
        assert_eq!(split(&bytes[..cut]).expect("still valid"), None);
    }
    if let Some(short) = payload.len().checked_sub(1) {
        assert!(Request::decode(header.op, &payload[..short]).is_err());
    }
    let longer: Vec<u8> = payload.iter().copied().chain([0]).collect();
    assert!(Request::decode(header.op, &longer).is_err());
}

#[test]
fn every_request_survives_the_wire() {
    let keys = [[1; 32], [2; 32]];
    let shape = BlockShape { dtype: 1, planes: 60, tokens: 256, channels: 192 };
    let item = PutItem { key: [3; 32], parent: Some([4; 32]), offset: 1 << 40 };
    let root = PutItem { parent: None, ..item };
    assert_eq!(PutItem::decode(&item.encode()), item);
    assert_eq!(PutItem::decode(&root.encode()), root);
    let hint = Hint { priority: -100, session_end: true, expected_reuse_s: 77 };
    let caller = Caller { tenant: "acme", hint };
    round_trip(Request::Hello { ingest_bytes: 5 });
    round_trip(Request::Match { caller, keys: &keys });
    let (prefix, wait_ms, enough) = (true, 80, 1);
    round_trip(Request::Lease { caller: "".into(), keys: &keys, prefix, wait_ms, enough });
    round_trip(Request::Release { tokens: &[[7; 8]] });
    round_trip(Request::Corrupt { token: 9 });
    round_trip(Request::List { from: 7 });
    round_trip(Request::Put { caller, shape, items: &[item.encode(), root.encode()] });
    round_trip(Request::Evict { keys: &keys[..1] });
    round_trip(Request::Stats);
    round_trip(Request::Ping);
    round_trip(Request::Drain { limit_ms: 7 });
    round_trip(Request::Rows { from: 8 });
    round_trip(Request::Verify { from: 9 });
    round_trip(Request::Pin { seconds: 60, keys: &keys });
    round_trip(Request::Cool);
    round_trip(Request::Pool { replica: "r", anew: true, added: &keys, removed: &keys[..1] });
}

#[test]
fn every_reply_survives_the_wire() {
    for origin in [Origin::Dram, Origin::Nvme, Origin::Peer] {
        let entry = LeaseEntry { token: u64::MAX, offset: 256, len: 77, origin };
        assert_eq!(LeaseEntry::decode(&entry.encode()), entry);
    }
    let entry = LeaseEntry::ABSENT;
    let stats = StatsReply {
        values: vec![("blocks".into(), 3)],
        tenants: vec![("acme".into(), 4096, 1)],
        texts: vec![("codec".into(), "fast".into())],
        usage: vec![("dram".into(), Usage { dtype: 1, physical: 7, ..Usage::default() })],
    };
    let row = ListRow {
        key: [9; 32],
        dram_bytes: 1,
        disk_bytes: 2,
        leases: 3,
        tenant: 4,
        idle_us: 5,
        pinned: true,
    };
    assert_eq!(ListRow::decode(&row.encode()), row);
    for reply in [
        Reply::Welcome { epoch: 1, pid: 2, arena_bytes: 3, ingest_bytes: 4, tiers: 2 },
        Reply::Count(9),
        Reply::Listed { next: 5, items: &[[3; 64]] },
        Reply::Leases(&[entry.encode()]),
        Reply::PutDone(&[0, 1, 2]),
        Reply::Stats(stats),
        Reply::Pong,
        Reply::Listing { next: 3, rows: &[row.encode()] },
        Reply::Verified { next: 4, done: Verified { checked: 1, corrupt: 2, bytes: 3 } },
        Reply::Failed(Error::refused("no; ask for less")),
        Reply::Failed(Error::protocol("what?")),
    ] {
        let mut bytes = Vec::new();
        reply.encode(1, &mut bytes);
        let (header, payload) = split(&bytes).expect("valid").expect("whole");
        assert_eq!(Reply::decode(header.op, payload).expect("decodes"), reply);
    }
}

#[test]
fn versions_tell_each_other_apart() {
    let mut bytes = Vec::new();
    Request::Ping.encode(0, &mut bytes);
    bytes[4] = VERSION + 1;
    let error = split(&bytes).expect_err("another version");
    assert!(error.message().contains(&format!("wire version {}", VERSION + 1)), "{error}");
}

#[test]
fn an_oversized_length_is_refused_before_it_arrives() {
    let mut bytes = Vec::new();
    Request::Ping.encode(0, &mut bytes);
    bytes[..4].copy_from_slice(&(MAX_PAYLOAD as u32 + 1).to_le_bytes());
    assert!(split(&bytes).is_err());
}

#[test]
fn long_names_are_cut_at_a_character() {
    let mut out = Vec::new();
    put_text(&mut out, &"é".repeat(200));
    assert_eq!(Cursor::new(&out).text().expect("valid").chars().count(), 127);
}

proptest! {
    #[test]
    fn decoders_are_total(op: u8, bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = split(&bytes);
        let _ = Request::decode(op, &bytes);
        let _ = Reply::decode(op, &bytes);
    }
}
