//! Index, allocator, log, writer and reader on a disk that fails, one deterministic history a seed.
//!
//! Whatever happens: a block reads back as exactly what was put, or is a miss; the accounts hold;
//! the cap holds; what was evicted does not come back. On a disk without faults, what was written
//! survives a death at any write.
//!
//! `MOONCAKE_SEED=n` replays one history, `MOONCAKE_SEEDS=n` runs that many.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fake::{Fake, Faults, Late, Rng};
use mooncake_codec::{Codec, Encoder};

use crate::arena::Arena;
use crate::block::{self, Layout};
use crate::disk::DiskOptions;
use crate::disk::health::Health;
use crate::disk::reader::{Job, Reader};
use crate::disk::recode::Form;
use crate::disk::recover::recover;
use crate::disk::writer::{Turn, Writer};
use crate::index::{Eviction, Hint, Index, Limits, Reserve, SessionId, Wish};
use crate::key::Key;
use crate::log::{Log, PAGE};
use crate::progress::Progress;
use crate::server::Shared;
use crate::server::fetch::Landing;
use crate::wire::BlockShape;

const SEEDS: u64 = 150;
const STEPS: u64 = 160;
pub(super) const SEGMENT: u64 = 16 * PAGE as u64;
pub(super) const SEGMENTS: usize = 5;
const ARENA: usize = 20 * PAGE;
const NAMES: u64 = 40;

struct World {
    seed: u64,
    rng: Rng,
    fake: Fake,
    shared: Arc<Shared>,
    writer: Writer,
    reader: Reader,
    health: Arc<Health>,
    session: SessionId,
    /// Evicted on request, cleared on disk, and not put since.
    gone: HashSet<u64>,
    evicted: HashSet<u64>,
    faultless: bool,
    /// A mark that was written stays: bytes neither rot nor go astray.
    marks_hold: bool,
    /// Most that is written a second; 0 is no limit.
    rate: u64,
}

/// Blocks come in chains of five.
pub(super) fn key(name: u64) -> Key {
    *blake3::hash(&name.to_le_bytes()).as_bytes()
}

fn parent(name: u64) -> Option<u64> {
    (!name.is_multiple_of(5)).then(|| name - 1)
}

fn shape(name: u64) -> BlockShape {
    let channels = 500 + (name * 977 % 11_000) as u32;
    BlockShape { dtype: 0, planes: 1, tokens: 1, channels }
}

fn content(name: u64) -> Vec<u8> {
    let mut bytes = vec![0; shape(name).channels as usize];
    blake3::Hasher::new().update(&name.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

pub(super) fn container(name: u64) -> Vec<u8> {
    let layout = Layout::new(shape(name), Codec::None).expect("a shape");
    let raw = content(name);
    let mut container = vec![0; layout.container_bytes()];
    // SAFETY: `raw` has the size that the layout names.
    unsafe { layout.write(&mut Encoder::new(), raw.as_ptr(), |_| Ok(()), &mut container) }
        .expect("all there")
        .expect("fits");
    container
}

/// All but the rate is the fake disk's.
fn options(rate: u64) -> DiskOptions {
    let path = std::path::PathBuf::new();
    DiskOptions { path, bytes: 0, write_bytes_per_s: rate, no_uring: true, codec: None }
}

/// A store over the disk as it is: what a start does.
pub(super) fn start(
    fake: &Fake,
    rate: u64,
) -> (Arc<Shared>, Writer, Reader, Arc<Health>, SessionId) {
    let arena = Arena::create(ARENA).expect("memory");
    let limits = Limits {
        max_blocks: 60,
        max_leases: 100,
        tenant_bytes: u64::MAX,
        tenant_disk_bytes: u64::MAX,
    };
    let mut index = Index::new(arena.size(), limits, Eviction::Lru.build(100));
    let mut log = Log::new(SEGMENTS, SEGMENT);
    let allocated = fake.disk().allocated.saturating_sub(PAGE as u64);
    log.restore_segments((allocated / SEGMENT) as usize);
    index.set_log(log);
    let index = Mutex::new(index);
    recover(fake, &index, &Progress::default()).expect("an index");
    let mut index = index.into_inner().expect("an index");
    let session = index.open_session();
    let shared = Shared::simulated(arena, index);
    let health: Arc<Health> = Arc::default();
    let io: Arc<dyn crate::disk::io::Io> = Arc::new(fake.clone());
    let (form, options) = (Arc::new(Form::new(None)), options(rate));
    let writer =
        Writer::new(Arc::clone(&shared), io, Arc::clone(&health), form, &options, SEGMENTS);
    let reader = Reader::new(Box::new(Late::new(fake)), Arc::clone(&health));
    (shared, writer, reader, health, session)
}

/// Put a block; whether it is stored anew.
pub(super) fn put(shared: &Shared, name: u64) -> bool {
    let container = container(name);
    let (own, above) = (key(name), parent(name).map(key));
    let (bytes, now) = (container.len() as u64, shared.now());
    let (key, parent) = (&own, above.as_ref());
    let wish = Wish { key, parent, bytes, tenant: "t", hint: Hint::NONE };
    let mut index = shared.index().expect("the accounts hold");
    let Reserve::Granted(extent, offset) = index.reserve(&wish, now) else { return false };
    let target = shared.arena.at(offset, container.len());
    // SAFETY: the extent was reserved for these bytes.
    unsafe { target.copy_from(container.as_ptr(), container.len()) };
    index.publish(extent, block::describe(&container).expect("a container"));
    true
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let faultless = rng.one_in(3);
        let mut odds = |usual: u64| if faultless || rng.one_in(2) { 0 } else { usual };
        let faults = Faults {
            read_error: odds(12),
            write_error: odds(25),
            no_space: odds(4),
            rot: odds(10),
            misdirected: odds(30),
        };
        let bytes = PAGE + SEGMENTS * SEGMENT as usize;
        let fake = Fake::new(seed, bytes, faults);
        let rate = if rng.one_in(3) { SEGMENT / 4 } else { 0 };
        let (shared, writer, reader, health, session) = start(&fake, rate);
        Self {
            seed,
            rng,
            fake,
            shared,
            writer,
            reader,
            health,
            session,
            gone: HashSet::new(),
            evicted: HashSet::new(),
            faultless,
            marks_hold: faults.rot + faults.misdirected + faults.read_error == 0,
            rate,
        }
    }

    fn step(&mut self) {
        let name = self.rng.below(NAMES);
        match self.rng.below(16) {
            0..5 => self.put(name),
            5..8 => self.read(name),
            8..11 => self.turn(),
            11 => self.evict(name),
            12 => {
                self.poll();
            }
            13 => {
                self.writer.drain();
            }
            14 if self.rng.one_in(4) => self.die(),
            _ => {
                let left = self.rng.below(6);
                let dies = self.rng.one_in(6);
                self.fake.disk().dies_after = dies.then_some(left);
            }
        }
        if self.fake.disk().dead {
            self.die();
        }
    }

    fn put(&mut self, name: u64) {
        if put(&self.shared, name) {
            self.gone.remove(&name);
            self.evicted.remove(&name);
        }
    }

    fn read(&mut self, name: u64) {
        let now = self.shared.now();
        let promotion = self.index().promote(&key(name), Hint::NONE, now);
        if let Some(promotion) = promotion {
            let (extent, offset) = (promotion.extent, promotion.offset);
            let landing = Landing::new(&self.shared, extent, offset, promotion.place.len);
            let (place, file_offset) = (promotion.place, promotion.file_offset);
            self.reader.start(Job { landing, key: key(name), place, file_offset });
            if self.rng.one_in(2) {
                return;
            }
            self.poll();
        }
        let now = self.shared.now();
        let leased = self.index().lease(self.session, &key(name), Hint::NONE, now);
        let Some(leased) = leased else { return };
        assert!(!self.gone.contains(&name), "seed {}: an evicted block is back", self.seed);
        let at = self.shared.arena.at(leased.offset, leased.len as usize);
        // SAFETY: leased until the release below.
        let stored = unsafe { std::slice::from_raw_parts(at, leased.len as usize) };
        let mut out = vec![0; shape(name).channels as usize];
        let outcome = block::read_into(stored, &mut out);
        assert!(outcome.is_ok() && out == content(name), "seed {}: wrong bytes", self.seed);
        assert!(self.index().release(self.session, leased.token));
    }

    fn evict(&mut self, name: u64) {
        self.index().evict(&[key(name)]);
        let now = self.shared.now();
        assert_eq!(
            self.index().match_prefix(&[key(name)], Hint::NONE, now),
            0,
            "seed {}",
            self.seed
        );
        self.evicted.insert(name);
    }

    fn turn(&mut self) {
        let now = self.shared.now() + self.rng.below(3_000_000);
        let before = self.health.is_off();
        let errors = self.health.write_errors.load(std::sync::atomic::Ordering::Relaxed);
        let (left, (live, demoted)) = (self.writer.rate.left(now), self.written());
        self.writer.turn(now);
        let (live, demoted) = (self.written().0.saturating_sub(live), self.written().1 - demoted);
        // Blocks take whole pages.
        let within = live <= left.saturating_add(demoted * PAGE as u64);
        assert!(within, "seed {}: {live} bytes written, {left} allowed", self.seed);
        let after = self.health.write_errors.load(std::sync::atomic::Ordering::Relaxed);
        if !before && errors == after && self.marks_hold {
            // The turn has marked on disk what was evicted before it.
            self.gone.extend(self.evicted.drain());
        }
    }

    fn poll(&mut self) {
        let weak = Arc::downgrade(&self.shared);
        self.reader.poll(&weak, Duration::ZERO);
    }

    /// The process is killed, perhaps in the middle of a write, and a new one starts.
    fn die(&mut self) {
        let before: Vec<u64> =
            (0..NAMES).filter(|&name| self.index().is_on_disk(&key(name))).collect();
        self.fake.disk().dead = false;
        self.fake.disk().dies_after = None;
        // What was evicted, and not marked yet, may be back.
        self.evicted.clear();
        // The old process's memory and reads in flight are gone with it.
        let (shared, writer, reader, health, session) = start(&self.fake, self.rate);
        std::mem::forget(std::mem::replace(&mut self.reader, reader));
        (self.shared, self.writer, self.health, self.session) = (shared, writer, health, session);
        if self.faultless {
            for name in before {
                let there = self.index().is_on_disk(&key(name));
                assert!(there, "seed {}: {name} was on disk and is not found", self.seed);
            }
        }
    }

    fn check(&self) {
        let index = self.index();
        let snapshot = index.snapshot();
        let disk = snapshot.disk;
        assert!(disk.live <= disk.allocated, "seed {}", self.seed);
        assert!(disk.allocated <= SEGMENTS as u64 * SEGMENT, "seed {}: above the cap", self.seed);
    }

    /// Bytes of the blocks on disk, and how many were ever written.
    fn written(&self) -> (u64, u64) {
        let snapshot = self.index().snapshot();
        (snapshot.disk.live, snapshot.counters.demoted)
    }

    fn index(&self) -> std::sync::MutexGuard<'_, Index> {
        self.shared.index().expect("the accounts hold")
    }
}

fn run(seed: u64) {
    let mut world = World::new(seed);
    for _ in 0..STEPS {
        world.step();
        world.check();
    }
    // Everything in flight ends, and then nothing is held.
    for _ in 0..1000 {
        world.poll();
    }
    let bytes = world.index().snapshot().bytes;
    assert_eq!((bytes.reserved, bytes.leased), (0, 0), "seed {seed}: something is still held");
    // A disk that works again serves again.
    world.fake.disk().faults = Faults::default();
    world.fake.disk().dies_after = None;
    let late = world.shared.now() + 100_000_000;
    for round in 0..200 {
        if world.writer.turn(late + round * 2_000_000) == Turn::Idle && !world.health.is_off() {
            break;
        }
    }
    assert!(!world.health.is_off(), "seed {seed}: the tier did not heal");
}

#[test]
fn no_history_gives_wrong_bytes_or_loses_count() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("MOONCAKE_SEED") {
        return run(seed);
    }
    for seed in 0..number("MOONCAKE_SEEDS").unwrap_or(SEEDS) {
        if let Err(panic) = std::panic::catch_unwind(|| run(seed)) {
            eprintln!("seed {seed} failed; replay it with: make fault SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
