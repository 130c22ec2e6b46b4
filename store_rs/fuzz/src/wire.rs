//! Frames: requests, replies, and what stores say to each other.

use _store::index::Hint;
use _store::wire::{BlockShape, Caller, HEADER_BYTES, LeaseEntry, Origin, Reply, Request, split};

/// A stream is cut into frames, and every payload is every kind of message or none.
pub fn run(bytes: &[u8]) {
    let mut rest = bytes;
    while let Ok(Some((header, payload))) = split(rest) {
        decode(header.op, payload);
        rest = &rest[HEADER_BYTES + payload.len()..];
    }
    if let Some((op, payload)) = bytes.split_first() {
        decode(*op, payload);
    }
}

fn decode(op: u8, payload: &[u8]) {
    if let Ok(request) = Request::decode(op, payload) {
        let mut again = Vec::new();
        request.encode(7, &mut again);
        let (header, payload) = split(&again).expect("ours").expect("whole");
        assert_eq!(Request::decode(header.op, payload).expect("ours"), request);
    }
    let _ = Reply::decode(op, payload);
    let _ = _store::peer::is_message(op, payload);
}

/// A request of each shape, and replies.
pub fn samples() -> Vec<Vec<u8>> {
    let keys = [[1; 32], [2; 32]];
    let hint = Hint { priority: 3, session_end: true, expected_reuse_s: 9 };
    let caller = Caller { tenant: "acme", hint };
    let shape = BlockShape { dtype: 1, planes: 2, tokens: 3, channels: 4 };
    let requests = [
        Request::Hello { ingest_bytes: 5 },
        Request::Match { caller, keys: &keys },
        Request::Lease { caller, keys: &keys, prefix: true, wait_ms: 80, enough: 1 },
        Request::Release { tokens: &[[7; 8]] },
        Request::Put { caller, shape, items: &[[5; 72]] },
        Request::Evict { keys: &keys },
        Request::Pin { seconds: 60, keys: &keys },
        Request::Drain { limit_ms: 7 },
    ];
    let entry = LeaseEntry { token: 1, offset: 2, len: 3, origin: Origin::Peer }.encode();
    let replies = [
        Reply::Welcome { epoch: 1, pid: 2, arena_bytes: 3, ingest_bytes: 4, tiers: 2 },
        Reply::Leases(&[entry]),
        Reply::PutDone(&[0, 1]),
        Reply::Listed { next: 5, items: &[[3; 64]] },
    ];
    let mut samples = vec![Vec::new(); requests.len() + replies.len()];
    for (request, out) in requests.iter().zip(&mut samples) {
        request.encode(1, out);
    }
    for (reply, out) in replies.iter().zip(&mut samples[requests.len()..]) {
        reply.encode(1, out);
    }
    samples
}
