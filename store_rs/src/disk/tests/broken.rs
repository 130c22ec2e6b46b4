//! A disk that does not end its reads, and one that fails them: what that costs, and that it heals.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::fake::{Fake, Faults, Late};
use super::simulation::{SEGMENT, SEGMENTS, key, put, start};
use crate::disk::health::Health;
use crate::disk::io::{Queue, Read};
use crate::disk::reader::{Job, Reader};
use crate::disk::writer::Writer;
use crate::index::Hint;
use crate::log::PAGE;
use crate::server::Shared;
use crate::server::fetch::Landing;

/// Ends nothing while it hangs.
struct Hanging {
    late: Late,
    hangs: Arc<AtomicBool>,
}

impl Queue for Hanging {
    unsafe fn start(&mut self, read: Read) {
        // SAFETY: as the caller promises.
        unsafe { self.late.start(read) }
    }

    fn wait(&mut self, patience: Duration, ended: &mut Vec<(u64, io::Result<()>)>) {
        if !self.hangs.load(Ordering::Relaxed) {
            self.late.wait(patience, ended);
        }
    }
}

/// A store whose blocks of these names, none of them another's parent, are on disk only.
fn store(fake: &Fake, names: &[u64]) -> (Arc<Shared>, Writer, Arc<Health>) {
    let (shared, mut writer, _, health, _) = start(fake, 0);
    for name in names {
        assert!(put(&shared, *name));
    }
    assert_eq!(writer.drain(), names.len() as u64);
    assert_eq!(shared.index().expect("an index").cool(), names.len());
    (shared, writer, health)
}

fn disk() -> Fake {
    Fake::new(0, PAGE + SEGMENTS * SEGMENT as usize, Faults::default())
}

fn alert(health: &Health) -> u64 {
    let values = health.values();
    values.iter().find(|(name, _)| name == "nvme_alert").map_or(0, |(_, value)| *value)
}

fn job(shared: &Arc<Shared>, name: u64) -> Job {
    let since = shared.now();
    let promotion = shared.index().expect("an index").promote(&key(name), Hint::NONE, since);
    let promotion = promotion.expect("on disk");
    let landing = Landing::new(shared, promotion.extent, promotion.offset, promotion.place.len);
    let (place, file_offset) = (promotion.place, promotion.file_offset);
    Job { landing, key: key(name), place, file_offset }
}

fn matched(shared: &Shared, name: u64) -> usize {
    let now = shared.now();
    shared.index().expect("an index").match_prefix(&[key(name)], Hint::NONE, now)
}

#[test]
fn a_disk_that_hangs_is_off_until_it_answers() {
    let fake = disk();
    let (shared, mut writer, health) = store(&fake, &[0, 5]);
    let hangs = Arc::new(AtomicBool::new(true));
    let queue = Hanging { late: Late::new(&fake), hangs: Arc::clone(&hangs) };
    let mut reader = Reader::new(Box::new(queue), Arc::clone(&health));
    let weak: Weak<Shared> = Arc::downgrade(&shared);
    reader.start(job(&shared, 0));
    reader.poll(&weak, Duration::ZERO);
    reader.watch(&weak, Duration::from_secs(3600));
    assert_eq!(matched(&shared, 5), 1, "it may only be slow");
    reader.watch(&weak, Duration::ZERO);
    assert_eq!((matched(&shared, 0), matched(&shared, 5)), (0, 0));
    assert_eq!(alert(&health), 1);
    let reserved = || shared.index().expect("an index").snapshot().bytes.reserved;
    assert!(reserved() > 0, "the disk may still write there");
    hangs.store(false, Ordering::Relaxed);
    reader.poll(&weak, Duration::ZERO);
    assert_eq!((reserved(), matched(&shared, 0)), (0, 1), "late, but whole");
    writer.turn(shared.now() + 100_000_000);
    assert_eq!((alert(&health), matched(&shared, 5)), (0, 1));
}

#[test]
fn failed_reads_drop_their_blocks_and_switch_the_tier_off_until_the_disk_works() {
    let fake = disk();
    let (shared, mut writer, health) = store(&fake, &[0, 5, 10, 15]);
    fake.disk().faults.read_error = 1;
    let mut reader = Reader::new(Box::new(Late::new(&fake)), Arc::clone(&health));
    for (name, off) in [(0, 0), (5, 0), (10, 1)] {
        reader.start(job(&shared, name));
        reader.poll(&Arc::downgrade(&shared), Duration::ZERO);
        assert_eq!((matched(&shared, name), alert(&health)), (0, off));
    }
    assert_eq!(matched(&shared, 15), 0, "nobody asks a disk that is off");
    writer.turn(shared.now() + 100_000_000);
    assert_eq!(alert(&health), 1, "it still fails");
    fake.disk().faults = Faults::default();
    writer.turn(shared.now() + 200_000_000);
    assert_eq!(alert(&health), 0);
    let left: Vec<_> = [0, 5, 10, 15].map(|name| matched(&shared, name)).into();
    assert_eq!(left, [0, 0, 0, 1], "what could not be read is gone");
    assert_eq!(shared.index().expect("an index").snapshot().bytes.reserved, 0);
}
