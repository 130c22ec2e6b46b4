//! Random histories of the index against an oracle that knows what must be true.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

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
        match reserve(&mut self.index, &key(name), parent.as_ref(), bytes, now) {
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
                if let Some(lease) = self.index.lease(session, &key(name), Hint::NONE, now) {
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
                assert_eq!(self.index.match_prefix(&[key(name)], Hint::NONE, now), 0);
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
