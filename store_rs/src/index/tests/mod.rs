//! What the index promises, example by example; `oracle` does the same for random histories.

mod oracle;

use super::*;
use crate::log::{EntryId, Log, MAX_SEGMENT};

const MIB: u64 = 1 << 20;

fn index(capacity: u64) -> Index {
    let limits = Limits {
        max_blocks: 1000,
        max_leases: 100,
        tenant_bytes: u64::MAX,
        tenant_disk_bytes: u64::MAX,
    };
    Index::new(capacity, limits, Eviction::Lru.build(1000))
}

/// A container of `len` bytes for a block of `raw`, with a header of 64.
fn stored(len: u64, raw: u64) -> Stored {
    let kind = Kind { dtype: 1, codec: 1, header: 64, raw: raw as u32 };
    Stored { len: len as u32, kind }
}

fn key(name: u8) -> Key {
    *blake3::hash(&[name]).as_bytes()
}

fn reserve(index: &mut Index, key: &Key, parent: Option<&Key>, bytes: u64, now: Tick) -> Reserve {
    index.reserve(&Wish { key, parent, bytes, tenant: "t", hint: Hint::NONE }, now)
}

/// Put a block of `bytes` in one go.
fn put(index: &mut Index, name: u8, parent: Option<u8>, bytes: u64, now: Tick) -> Reserve {
    let reserved = reserve(index, &key(name), parent.map(key).as_ref(), bytes, now);
    if let Reserve::Granted(extent, _) = reserved {
        index.publish(extent, stored(bytes, bytes - 1));
    }
    reserved
}

fn present(index: &mut Index, names: &[u8], now: Tick) -> Vec<u8> {
    names
        .iter()
        .copied()
        .filter(|&name| index.match_prefix(&[key(name)], Hint::NONE, now) == 1)
        .collect()
}

#[test]
fn a_match_is_the_longest_run_from_the_first() {
    let mut index = index(MIB);
    for (name, parent) in [(0, None), (1, Some(0)), (2, Some(1))] {
        assert!(matches!(put(&mut index, name, parent, 1000, 0), Reserve::Granted(..)));
    }
    let keys = [0, 1, 2, 3].map(key);
    assert_eq!(index.match_prefix(&keys, Hint::NONE, 1), 3);
    assert_eq!(index.evict(&keys[1..2]), 1);
    assert_eq!(index.match_prefix(&keys, Hint::NONE, 2), 1);
    put(&mut index, 1, Some(0), 1000, 3);
    assert_eq!(index.match_prefix(&keys, Hint::NONE, 4), 3, "a block put again finds its children");
}

#[test]
fn a_half_put_block_is_invisible_and_an_aborted_one_leaves_nothing() {
    let mut index = index(MIB);
    let free = index.snapshot().free;
    let Reserve::Granted(extent, _) = reserve(&mut index, &key(0), None, 1000, 0) else {
        panic!("room for one");
    };
    let session = index.open_session();
    assert_eq!(index.match_prefix(&[key(0)], Hint::NONE, 1), 0);
    assert_eq!(index.lease(session, &key(0), Hint::NONE, 1), None);
    assert_eq!(reserve(&mut index, &key(0), None, 1000, 1), Reserve::Pending);
    assert_eq!(index.evict(&[key(0)]), 0);
    index.abort(extent);
    let after = index.snapshot();
    assert_eq!((after.free, after.blocks, after.bytes), (free, 0, Bytes::default()));
}

#[test]
fn leaves_go_before_their_parents_and_the_oldest_first() {
    // Room for four blocks: chain 0 ← 1 ← 2, and 3 alone, used before the chain.
    let mut index = index(4 * 64 * 1024);
    put(&mut index, 3, None, 64 * 1024, 0);
    for (name, parent) in [(0, None), (1, Some(0)), (2, Some(1))] {
        put(&mut index, name, parent, 64 * 1024, 1);
    }
    index.match_prefix(&[key(3)], Hint::NONE, 5);
    put(&mut index, 4, None, 64 * 1024, 6);
    assert_eq!(present(&mut index, &[0, 1, 2, 3, 4], 7), [0, 1, 3, 4]);
    put(&mut index, 5, None, 64 * 1024, 8);
    put(&mut index, 6, None, 64 * 1024, 9);
    let stats = index.snapshot();
    assert_eq!((stats.counters.evicted_for_room, stats.blocks), (3, 4));
    assert!(
        index.match_prefix(&[key(0), key(1)], Hint::NONE, 10) <= 1,
        "1 is a leaf and goes before 0"
    );
}

#[test]
fn a_child_never_evicts_its_own_parent() {
    let mut index = index(2 * 64 * 1024);
    put(&mut index, 0, None, 64 * 1024, 0);
    put(&mut index, 1, None, 64 * 1024, 1);
    assert!(matches!(put(&mut index, 2, Some(0), 64 * 1024, 2), Reserve::Granted(..)));
    assert_eq!(index.match_prefix(&[key(0), key(2)], Hint::NONE, 3), 2);
}

#[test]
fn leased_bytes_outlive_eviction_until_the_last_release() {
    let mut index = index(64 * 1024);
    put(&mut index, 0, None, 64 * 1024, 0);
    let (a, b) = (index.open_session(), index.open_session());
    let first = index.lease(a, &key(0), Hint::NONE, 1).expect("present");
    let second = index.lease(b, &key(0), Hint::NONE, 1).expect("present");
    assert_eq!((first.offset, first.len), (second.offset, second.len));
    assert_eq!(put(&mut index, 1, None, 1000, 2), Reserve::Refused(Refusal::Full));
    assert_eq!(index.evict(&[key(0)]), 1);
    assert_eq!(index.match_prefix(&[key(0)], Hint::NONE, 3), 0);
    assert_eq!(put(&mut index, 1, None, 1000, 3), Reserve::Refused(Refusal::Full));
    assert!(index.release(a, first.token));
    assert!(!index.release(a, first.token), "once only");
    assert!(!index.release(a, second.token), "not of another session");
    assert_eq!(index.snapshot().bytes.leased, 64 * 1024);
    index.end_session(b);
    assert_eq!(index.snapshot().free, 64 * 1024);
    assert_eq!(index.snapshot().counters.invalid_releases, 2);
}

#[test]
fn a_violating_session_is_quarantined_until_it_ends() {
    let mut index = index(2 * 64 * 1024);
    put(&mut index, 0, None, 64 * 1024, 0);
    let (bad, good) = (index.open_session(), index.open_session());
    index.lease(bad, &key(0), Hint::NONE, 1).expect("present");
    let shared = index.lease(good, &key(0), Hint::NONE, 1).expect("present");
    assert_eq!(index.quarantine_session(bad), 1);
    assert_eq!(index.lease(bad, &key(0), Hint::NONE, 2), None);
    assert_eq!(index.snapshot().bytes.leased, 64 * 1024, "a good session still reads it");
    index.release(good, shared.token);
    let bytes = index.snapshot().bytes;
    assert_eq!((bytes.leased, bytes.quarantined), (0, 64 * 1024));
    put(&mut index, 1, None, 64 * 1024, 3);
    assert_eq!(put(&mut index, 2, None, 128 * 1024, 4), Reserve::Refused(Refusal::Full));
    index.end_session(bad);
    assert_eq!(index.snapshot().bytes.quarantined, 0);
    assert!(matches!(put(&mut index, 2, None, 128 * 1024, 5), Reserve::Granted(..)));
}

#[test]
fn a_corrupt_block_is_a_miss_and_can_be_put_again_while_it_is_read() {
    let mut index = index(MIB);
    put(&mut index, 0, None, 1000, 0);
    let session = index.open_session();
    let lease = index.lease(session, &key(0), Hint::NONE, 1).expect("present");
    assert!(index.report_corrupt(session, lease.token));
    assert_eq!(index.match_prefix(&[key(0)], Hint::NONE, 2), 0);
    assert!(matches!(put(&mut index, 0, None, 1000, 3), Reserve::Granted(..)));
    assert!(index.report_corrupt(session, lease.token), "of the old bytes: changes nothing");
    assert_eq!(index.match_prefix(&[key(0)], Hint::NONE, 4), 1);
    assert_eq!(index.snapshot().counters.corrupt_dropped, 1);
}

#[test]
fn limits_hold() {
    let limits = Limits {
        max_blocks: 3,
        max_leases: 1,
        tenant_bytes: u64::MAX,
        tenant_disk_bytes: u64::MAX,
    };
    let mut index = Index::new(MIB, limits, Eviction::Lru.build(1000));
    for name in 0..5 {
        put(&mut index, name, None, 1000, name.into());
    }
    assert_eq!(present(&mut index, &[0, 1, 2, 3, 4], 9), [2, 3, 4]);
    let session = index.open_session();
    assert_eq!(index.lease_room(session), 1);
    index.lease(session, &key(2), Hint::NONE, 10).expect("present");
    assert_eq!(index.lease(session, &key(3), Hint::NONE, 10), None);
    assert_eq!(put(&mut index, 9, Some(8), 1000, 11), Reserve::Refused(Refusal::ParentAbsent));
    assert_eq!(put(&mut index, 9, None, 2 * MIB, 11), Reserve::Refused(Refusal::TooLarge));
    let tenants = index.snapshot().tenants;
    assert_eq!((tenants[0].name.as_str(), tenants[0].blocks), ("t", 3));
}

#[test]
fn a_block_stored_anew_gives_back_what_it_saves() {
    let mut index = index(MIB);
    put(&mut index, 0, None, 100_000, 0);
    put(&mut index, 1, Some(0), 100_000, 0);
    let session = index.open_session();
    let old = index.lease(session, &key(0), Hint::NONE, 1).expect("present");
    assert!(matches!(index.begin_replace(2, 9, &mut 0), Candidate::Nothing), "of that codec");
    assert!(matches!(index.begin_replace(1, 0, &mut 1), Candidate::Found(_)), "idle, unread");
    let mut cursor = 0;
    index.release(session, old.token);
    let old = index.lease(session, &key(0), Hint::NONE, 2).expect("present");
    assert!(matches!(index.begin_replace(1, 9, &mut cursor), Candidate::Nothing), "both are read");
    index.release(session, old.token);
    let Candidate::Found(found) = index.begin_replace(1, 9, &mut cursor) else { panic!("idle") };
    let reader = index.lease(session, &key(0), Hint::NONE, 3).expect("still there");
    assert_eq!((reader.offset, reader.len), (found.source, 100_000));
    let (target, dense) = (found.target, Kind { dtype: 1, codec: 2, header: 64, raw: 99_999 });
    assert!(index.finish_replace(found, Stored { len: 60_000, kind: dense }));
    let renewed = index.lease(session, &key(0), Hint::NONE, 4).expect("in its new form");
    assert_eq!((renewed.offset, renewed.len), (target, 60_000));
    let before = index.snapshot().free;
    index.release(session, reader.token);
    assert!(index.snapshot().free > before + 100_000 - 1, "the old form went with its last reader");
}

#[test]
fn sharing_is_counted_by_process() {
    let mut index = index(MIB);
    let sessions = [index.open_session(), index.open_session(), index.open_session()];
    for (session, process) in sessions.into_iter().zip([7, 7, 8]) {
        index.identify(session, process);
    }
    put(&mut index, 0, None, 1000, 0);
    index.put_by(sessions[0], &key(0));
    index.lease(sessions[1], &key(0), Hint::NONE, 1).expect("present");
    assert_eq!(index.snapshot().usage[0].shared_saved, 0, "one process");
    index.lease(sessions[2], &key(0), Hint::NONE, 1).expect("present");
    let Usage { blocks, logical, shared_saved, metadata, .. } = index.snapshot().usage[0];
    assert_eq!((blocks, logical, shared_saved, metadata), (1, 999, 999, 64));
}

#[test]
fn only_what_was_read_is_worth_writing_unless_memory_runs_short() {
    let mut index = index(16 * 64 * 1024);
    index.set_log(Log::new(4, MAX_SEGMENT));
    for name in 0..3 {
        put(&mut index, name, None, 64 * 1024, 0);
    }
    assert!(index.next_demotions(u64::MAX, false).is_empty(), "nothing was read");
    assert_eq!(index.match_prefix(&[key(0)], Hint::NONE, 1), 1);
    assert!(index.next_demotions(u64::MAX, false).is_empty(), "a match reads nothing");
    let session = index.open_session();
    let leased = index.lease(session, &key(1), Hint::NONE, 2).expect("present");
    index.release(session, leased.token);
    let chosen = index.next_demotions(u64::MAX, false);
    assert_eq!(chosen.iter().map(|one| one.key).collect::<Vec<_>>(), [key(1)]);
    index.demoted(&chosen[0], None);
    assert!(index.next_demotions(u64::MAX, false).is_empty(), "once");
    let cold = index.next_demotions(u64::MAX, true);
    assert_eq!(cold.len(), 3, "what would be evicted next");
    cold.iter().for_each(|one| index.demoted(one, None));
}

#[test]
fn a_soft_pin_ends_at_its_time_or_when_nothing_else_can_go() {
    let mut index = index(2 * 64 * 1024);
    put(&mut index, 0, None, 64 * 1024, 0);
    assert_eq!(index.pin(&[key(0)], Some(100)), 1);
    put(&mut index, 1, None, 64 * 1024, 1);
    put(&mut index, 2, None, 64 * 1024, 99);
    assert_eq!(index.match_prefix(&[key(1)], Hint::NONE, 99), 0, "the older one is pinned");
    put(&mut index, 3, None, 64 * 1024, 100);
    assert_eq!(index.snapshot().pinned, 0);
    assert_eq!(present(&mut index, &[0, 1, 2, 3], 100), [2, 3]);
    assert_eq!(index.pin(&[key(2), key(3)], Some(1000)), 2);
    assert!(matches!(put(&mut index, 4, None, 64 * 1024, 101), Reserve::Granted(..)));
}

#[test]
fn the_index_fits_its_budget_per_block_in_both_tiers() {
    const BLOCKS: u32 = 480_000;
    let limits = Limits {
        max_blocks: 500_000,
        max_leases: 10,
        tenant_bytes: u64::MAX,
        tenant_disk_bytes: u64::MAX,
    };
    let mut index = Index::new(1 << 30, limits, Eviction::Ours.build(500_000));
    index.set_log(Log::new(16, MAX_SEGMENT));
    for number in 0..BLOCKS {
        let key = *blake3::hash(&number.to_le_bytes()).as_bytes();
        let Reserve::Granted(extent, _) = reserve(&mut index, &key, None, 1200, number.into())
        else {
            panic!("room for all");
        };
        index.publish(extent, stored(1200, 1024));
    }
    let mut from = Some(0);
    while let Some(at) = from {
        let (chosen, next) = index.next_drained(at, 1 << 20);
        for demotion in &chosen {
            let entry = append(&mut index, demotion.len);
            index.demoted(demotion, Some(entry));
        }
        from = next;
    }
    let snapshot = index.snapshot();
    assert_eq!((snapshot.blocks, snapshot.disk.blocks), (BLOCKS.into(), BLOCKS.into()));
    // The journal's ring is of a fixed size: it shows less the more blocks there are.
    let per_block = snapshot.index_bytes / u64::from(BLOCKS);
    assert!(per_block <= 128, "{per_block} bytes per block");
}

/// A place in the open segment, or in the next.
fn append(index: &mut Index, len: u32) -> EntryId {
    let log = index.log_mut().expect("a log");
    if let Some((entry, ..)) = log.append(len, 0) {
        return entry;
    }
    log.seal();
    let (segment, _) = log.candidate(false).expect("room for all");
    log.begin(segment);
    log.append(len, 0).expect("an empty segment").0
}
