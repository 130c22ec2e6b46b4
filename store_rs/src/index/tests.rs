use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

fn index(capacity: u64) -> Index {
    let limits = Limits {
        max_blocks: 1000,
        max_leases: 100,
        tenant_bytes: u64::MAX,
        tenant_disk_bytes: u64::MAX,
    };
    Index::new(capacity, limits, Box::new(Lru::default()))
}

/// A container of `len` bytes for a block of `raw`, with a header of 64.
fn stored(len: u64, raw: u64) -> Stored {
    let kind = Kind { dtype: 1, codec: 1, header: 64, raw: raw as u32 };
    Stored { len: len as u32, kind }
}

fn key(name: u8) -> Key {
    *blake3::hash(&[name]).as_bytes()
}

/// Put a block of `bytes` in one go.
fn put(index: &mut Index, name: u8, parent: Option<u8>, bytes: u64, now: Tick) -> Reserve {
    let reserved = index.reserve(&key(name), parent.map(key).as_ref(), bytes, "t", now);
    if let Reserve::Granted(extent, _) = reserved {
        index.publish(extent, stored(bytes, bytes - 1));
    }
    reserved
}

fn present(index: &mut Index, names: &[u8], now: Tick) -> Vec<u8> {
    names.iter().copied().filter(|&name| index.match_prefix(&[key(name)], now) == 1).collect()
}

#[test]
fn a_match_is_the_longest_run_from_the_first() {
    let mut index = index(MIB);
    for (name, parent) in [(0, None), (1, Some(0)), (2, Some(1))] {
        assert!(matches!(put(&mut index, name, parent, 1000, 0), Reserve::Granted(..)));
    }
    let keys = [0, 1, 2, 3].map(key);
    assert_eq!(index.match_prefix(&keys, 1), 3);
    assert_eq!(index.evict(&keys[1..2]), 1);
    assert_eq!(index.match_prefix(&keys, 2), 1);
    put(&mut index, 1, Some(0), 1000, 3);
    assert_eq!(index.match_prefix(&keys, 4), 3, "a block put again finds its children");
}

#[test]
fn a_half_put_block_is_invisible_and_an_aborted_one_leaves_nothing() {
    let mut index = index(MIB);
    let free = index.snapshot().free;
    let Reserve::Granted(extent, _) = index.reserve(&key(0), None, 1000, "t", 0) else {
        panic!("room for one");
    };
    let session = index.open_session();
    assert_eq!(index.match_prefix(&[key(0)], 1), 0);
    assert_eq!(index.lease(session, &key(0), 1), None);
    assert_eq!(index.reserve(&key(0), None, 1000, "t", 1), Reserve::Pending);
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
    index.match_prefix(&[key(3)], 5);
    put(&mut index, 4, None, 64 * 1024, 6);
    assert_eq!(present(&mut index, &[0, 1, 2, 3, 4], 7), [0, 1, 3, 4]);
    put(&mut index, 5, None, 64 * 1024, 8);
    put(&mut index, 6, None, 64 * 1024, 9);
    let stats = index.snapshot();
    assert_eq!((stats.counters.evicted_for_room, stats.blocks), (3, 4));
    assert!(index.match_prefix(&[key(0), key(1)], 10) <= 1, "1 is a leaf and goes before 0");
}

#[test]
fn a_child_never_evicts_its_own_parent() {
    let mut index = index(2 * 64 * 1024);
    put(&mut index, 0, None, 64 * 1024, 0);
    put(&mut index, 1, None, 64 * 1024, 1);
    assert!(matches!(put(&mut index, 2, Some(0), 64 * 1024, 2), Reserve::Granted(..)));
    assert_eq!(index.match_prefix(&[key(0), key(2)], 3), 2);
}

#[test]
fn leased_bytes_outlive_eviction_until_the_last_release() {
    let mut index = index(64 * 1024);
    put(&mut index, 0, None, 64 * 1024, 0);
    let (a, b) = (index.open_session(), index.open_session());
    let first = index.lease(a, &key(0), 1).expect("present");
    let second = index.lease(b, &key(0), 1).expect("present");
    assert_eq!((first.offset, first.len), (second.offset, second.len));
    assert_eq!(put(&mut index, 1, None, 1000, 2), Reserve::Refused(Refusal::Full));
    assert_eq!(index.evict(&[key(0)]), 1);
    assert_eq!(index.match_prefix(&[key(0)], 3), 0);
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
    index.lease(bad, &key(0), 1).expect("present");
    let shared = index.lease(good, &key(0), 1).expect("present");
    assert_eq!(index.quarantine_session(bad), 1);
    assert_eq!(index.lease(bad, &key(0), 2), None);
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
    let lease = index.lease(session, &key(0), 1).expect("present");
    assert!(index.report_corrupt(session, lease.token));
    assert_eq!(index.match_prefix(&[key(0)], 2), 0);
    assert!(matches!(put(&mut index, 0, None, 1000, 3), Reserve::Granted(..)));
    assert!(index.report_corrupt(session, lease.token), "of the old bytes: changes nothing");
    assert_eq!(index.match_prefix(&[key(0)], 4), 1);
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
    let mut index = Index::new(MIB, limits, Box::new(Lru::default()));
    for name in 0..5 {
        put(&mut index, name, None, 1000, name.into());
    }
    assert_eq!(present(&mut index, &[0, 1, 2, 3, 4], 9), [2, 3, 4]);
    let session = index.open_session();
    assert_eq!(index.lease_room(session), 1);
    index.lease(session, &key(2), 10).expect("present");
    assert_eq!(index.lease(session, &key(3), 10), None);
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
    let old = index.lease(session, &key(0), 1).expect("present");
    assert!(matches!(index.begin_replace(2, 9, &mut 0), Candidate::Nothing), "of that codec");
    assert!(matches!(index.begin_replace(1, 0, &mut 1), Candidate::Found(_)), "idle, unread");
    let mut cursor = 0;
    index.release(session, old.token);
    let old = index.lease(session, &key(0), 2).expect("present");
    assert!(matches!(index.begin_replace(1, 9, &mut cursor), Candidate::Nothing), "both are read");
    index.release(session, old.token);
    let Candidate::Found(found) = index.begin_replace(1, 9, &mut cursor) else { panic!("idle") };
    let reader = index.lease(session, &key(0), 3).expect("still there");
    assert_eq!((reader.offset, reader.len), (found.source, 100_000));
    let (target, dense) = (found.target, Kind { dtype: 1, codec: 2, header: 64, raw: 99_999 });
    assert!(index.finish_replace(found, Stored { len: 60_000, kind: dense }));
    let renewed = index.lease(session, &key(0), 4).expect("in its new form");
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
    index.lease(sessions[1], &key(0), 1).expect("present");
    assert_eq!(index.snapshot().usage[0].shared_saved, 0, "one process");
    index.lease(sessions[2], &key(0), 1).expect("present");
    let Usage { blocks, logical, shared_saved, metadata, .. } = index.snapshot().usage[0];
    assert_eq!((blocks, logical, shared_saved, metadata), (1, 999, 999, 64));
}

#[test]
fn the_index_fits_its_budget_per_block() {
    let limits = Limits {
        max_blocks: 500_000,
        max_leases: 10,
        tenant_bytes: u64::MAX,
        tenant_disk_bytes: u64::MAX,
    };
    let mut index = Index::new(1 << 30, limits, Box::new(Lru::default()));
    for number in 0..480_000u32 {
        let key = *blake3::hash(&number.to_le_bytes()).as_bytes();
        let Reserve::Granted(extent, _) = index.reserve(&key, None, 1200, "", number.into()) else {
            panic!("room for all");
        };
        index.publish(extent, stored(1200, 1024));
    }
    // The journal's ring is of a fixed size: it shows less the more blocks there are.
    let per_block = index.snapshot().index_bytes / 480_000;
    assert!(per_block <= 128, "{per_block} bytes per block");
}

/// What the proptest does to the index.
#[derive(Debug, Clone)]
enum Op {
    Put(u8, u64),
    Reserve(u8, u64),
    Finish(bool),
    Lease(u8, u8),
    Release(u8),
    Evict(u8),
    Corrupt(u8),
    Quarantine(u8),
    End(u8),
    Replace,
    Replaced(u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let name = 0u8..24;
    let bytes = 1u64..90_000;
    let op = prop_oneof![
        6 => (name.clone(), bytes.clone()).prop_map(|(name, bytes)| Op::Put(name, bytes)),
        2 => (name.clone(), bytes).prop_map(|(name, bytes)| Op::Reserve(name, bytes)),
        2 => any::<bool>().prop_map(Op::Finish),
        5 => (0u8..3, name.clone()).prop_map(|(session, name)| Op::Lease(session, name)),
        4 => any::<u8>().prop_map(Op::Release),
        1 => name.prop_map(Op::Evict),
        1 => any::<u8>().prop_map(Op::Corrupt),
        1 => (0u8..3).prop_map(Op::Quarantine),
        1 => (0u8..3).prop_map(Op::End),
        2 => Just(Op::Replace),
        2 => (1u64..90_000).prop_map(Op::Replaced),
    ];
    prop::collection::vec(op, 1..300)
}

/// The oracle: what must be true of leased bytes and visible keys, kept apart from the index.
struct World {
    index: Index,
    sessions: [SessionId; 3],
    reserved: Vec<(Key, ExtentId)>,
    leases: Vec<(SessionId, Leased, Key)>,
    replacing: Vec<Replacement>,
    cursor: usize,
    stored: HashMap<Key, u32>,
}

impl World {
    fn new() -> Self {
        let mut index = index(4 * 64 * 1024);
        let sessions = [index.open_session(), index.open_session(), index.open_session()];
        for (process, session) in (0..).zip(sessions) {
            index.identify(session, process / 2);
        }
        let (reserved, leases, stored) = (Vec::new(), Vec::new(), HashMap::new());
        Self { index, sessions, reserved, leases, replacing: Vec::new(), cursor: 0, stored }
    }

    /// A block's parent is the name below it, except for every sixth, which is a root.
    fn reserve(&mut self, name: u8, bytes: u64, now: Tick) {
        let parent = (!name.is_multiple_of(6)).then(|| key(name - 1));
        match self.index.reserve(&key(name), parent.as_ref(), bytes, "t", now) {
            Reserve::Granted(extent, offset) => {
                for (_, lease, _) in &self.leases {
                    let end = lease.offset + u64::from(lease.len);
                    assert!(offset >= end || offset + bytes <= lease.offset, "leased bytes reused");
                }
                self.reserved.push((key(name), extent));
                self.stored.insert(key(name), bytes as u32);
            }
            Reserve::Present => assert!(self.stored.contains_key(&key(name))),
            Reserve::Pending => assert!(self.reserved.iter().any(|(other, _)| *other == key(name))),
            Reserve::Refused(_) | Reserve::Busy => {}
        }
    }

    fn finish(&mut self, publish: bool) {
        let Some((key, extent)) = self.reserved.pop() else { return };
        if publish {
            let len = u64::from(self.stored[&key]);
            self.index.publish(extent, stored(len, len + 100));
        } else {
            self.index.abort(extent);
        }
    }

    fn replace(&mut self, now: Tick) {
        if let Candidate::Found(found) = self.index.begin_replace(1, now, &mut self.cursor) {
            let end = found.target + u64::from(found.len);
            for (_, lease, _) in &self.leases {
                let clear =
                    lease.offset >= end || lease.offset + u64::from(lease.len) <= found.target;
                assert!(clear, "leased bytes reused");
            }
            self.replacing.push(found);
        }
    }

    fn replaced(&mut self, len: u64) {
        let Some(replacement) = self.replacing.pop() else { return };
        let (len, raw) = (len.min(replacement.len.into()), u64::from(replacement.len) + 100);
        match len % 3 {
            0 => self.index.drop_corrupt(replacement),
            _ => drop(self.index.finish_replace(replacement, stored(len, raw))),
        }
    }

    fn run(&mut self, op: &Op, now: Tick) {
        let pick = |length: usize, at: u8| usize::from(at) % length.max(1);
        match *op {
            Op::Put(name, bytes) => {
                let before = self.reserved.len();
                self.reserve(name, bytes, now);
                if self.reserved.len() > before {
                    self.finish(true);
                }
            }
            Op::Reserve(name, bytes) => self.reserve(name, bytes, now),
            Op::Finish(publish) => self.finish(publish),
            Op::Lease(session, name) => {
                let session = self.sessions[usize::from(session)];
                if let Some(lease) = self.index.lease(session, &key(name), now) {
                    assert!(!self.reserved.iter().any(|(other, _)| *other == key(name)));
                    assert!(lease.len <= self.stored[&key(name)], "only a replacement is shorter");
                    self.leases.push((session, lease, key(name)));
                }
            }
            Op::Release(at) if !self.leases.is_empty() => {
                let (session, lease, _) = self.leases.remove(pick(self.leases.len(), at));
                assert!(self.index.release(session, lease.token));
                assert!(!self.index.release(session, lease.token));
            }
            Op::Corrupt(at) if !self.leases.is_empty() => {
                let (session, lease, _) = &self.leases[pick(self.leases.len(), at)];
                assert!(self.index.report_corrupt(*session, lease.token));
            }
            Op::Release(_) | Op::Corrupt(_) => {}
            Op::Evict(name) => {
                let evicted = self.index.evict(&[key(name)]);
                assert_eq!(self.index.match_prefix(&[key(name)], now), 0);
                assert!(evicted <= 1);
            }
            Op::Replace => self.replace(now),
            Op::Replaced(len) => self.replaced(len),
            Op::Quarantine(session) => {
                self.index.quarantine_session(self.sessions[usize::from(session)]);
            }
            Op::End(session) => {
                let ended = self.sessions[usize::from(session)];
                self.index.end_session(ended);
                self.leases.retain(|(session, ..)| *session != ended);
                self.sessions[usize::from(session)] = self.index.open_session();
            }
        }
    }

    fn check(&self) {
        self.index.alloc.check();
        let snapshot = self.index.snapshot();
        assert_eq!(snapshot.leases, self.leases.len() as u64);
        let leased: HashSet<u64> = self.leases.iter().map(|(_, lease, _)| lease.offset).collect();
        let held = snapshot.bytes.leased + snapshot.bytes.quarantined;
        assert_eq!(leased.is_empty() && self.replacing.is_empty(), held == 0);
        let mut all = Usage::default();
        snapshot.usage.iter().for_each(|row| all.absorb(row));
        assert_eq!(all.physical + snapshot.bytes.reserved, snapshot.bytes.total());
        let saved = all.codec_saved as i64 - all.metadata as i64 - all.rounding as i64;
        assert_eq!(all.logical as i64 - saved, all.physical as i64);
        assert_eq!(all.logical, snapshot.logical);
        let live = self.index.nodes.len() - self.index.spare.len();
        assert_eq!(live, self.index.table.len());
        for at in 0..self.index.nodes.len() as NodeId {
            if self.index.spare.contains(&at) {
                continue;
            }
            let children = self.index.nodes.iter().enumerate();
            let children = children.filter(|(id, node)| {
                node.parent == at && !self.index.spare.contains(&(*id as NodeId))
            });
            assert_eq!(children.clone().count(), self.index.nodes[at as usize].children as usize);
            let warm = children.filter(|(_, node)| node.body != NONE);
            assert_eq!(warm.count(), self.index.nodes[at as usize].warm as usize);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_work_agrees_with_the_oracle(ops in ops()) {
        let mut world = World::new();
        for (now, op) in ops.iter().enumerate() {
            world.run(op, now as Tick);
            world.check();
        }
        while !world.reserved.is_empty() {
            world.finish(false);
        }
        for session in world.sessions {
            world.index.end_session(session);
        }
        world.leases.clear();
        for replacement in std::mem::take(&mut world.replacing) {
            world.index.abandon_replace(replacement);
        }
        let names: Vec<Key> = (0..24).map(key).collect();
        world.index.evict(&names);
        world.check();
        let end = world.index.snapshot();
        prop_assert_eq!((end.free, end.blocks, end.logical), (end.capacity, 0, 0));
        prop_assert_eq!(world.index.table.len(), 0);
    }
}
