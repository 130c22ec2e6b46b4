//! Promotions: reads many blocks at once, straight into the extents reserved for them.
//!
//! A session hands over landings and waits for them elsewhere, so a disk that stalls costs it its
//! deadline and no more. The reader owns each landing until the read has ended: a device may write
//! to that memory at any time before. Each block is checked against its record's checksum before it
//! is published; one that fails is dropped from the index. While no read ends for long, the tier is
//! off, so that later requests do not wait for the disk, too.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::health::Health;
use super::io::{Queue, Read};
use crate::block;
use crate::key::Key;
use crate::log::{PAGE, Place, pages};
use crate::server::Shared;
use crate::server::fetch::Landing;

/// Bytes asked of the disk at once: enough to keep it busy, and few enough that blocks come one
/// after another, so that the first is checked and copied while the others are read.
const FLYING_MAX: usize = 16 << 20;
/// How long new jobs may wait while reads are in flight.
const TURN: Duration = Duration::from_micros(500);
/// A disk that ends no read for so long hangs.
const HANGS: Duration = Duration::from_secs(2);
/// How long a stop waits for reads in flight.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the reader is told.
pub(super) enum Order {
    Read(Job),
    /// End, once what is in flight has.
    Stop,
}

/// One block to read.
pub(super) struct Job {
    pub(super) landing: Landing,
    pub(super) key: Key,
    pub(super) place: Place,
    pub(super) file_offset: u64,
}

pub(super) struct Reader {
    queue: Box<dyn Queue>,
    health: Arc<Health>,
    /// With the time of their orders.
    waiting: VecDeque<(Job, Instant)>,
    flying: HashMap<u64, (Job, Instant)>,
    flying_bytes: usize,
    next_id: u64,
    /// When the disk last ended a read, or was idle.
    moved: Instant,
}

impl Reader {
    pub(super) fn new(queue: Box<dyn Queue>, health: Arc<Health>) -> Self {
        let (waiting, flying) = (VecDeque::new(), HashMap::new());
        let moved = Instant::now();
        Self { queue, health, waiting, flying, flying_bytes: 0, next_id: 0, moved }
    }

    /// Serve orders until told to stop, or nobody can give more.
    pub(super) fn run(mut self, orders: &Receiver<Order>, shared: &Weak<Shared>) {
        loop {
            if self.flying.is_empty() {
                match orders.recv() {
                    Ok(Order::Read(job)) => self.start(job),
                    Ok(Order::Stop) | Err(_) => return,
                }
            }
            while let Ok(order) = orders.try_recv() {
                match order {
                    Order::Read(job) => self.start(job),
                    Order::Stop => return self.finish(shared),
                }
            }
            self.poll(shared, TURN);
            self.watch(shared, HANGS);
        }
    }

    /// Switch the tier off if no read ended for `patience`. What the disk has keeps its memory until
    /// it ends; what it does not have yet is a miss at once.
    pub(super) fn watch(&mut self, shared: &Weak<Shared>, patience: Duration) {
        if self.flying.is_empty() || self.moved.elapsed() < patience {
            return;
        }
        self.moved = Instant::now();
        self.health.hangs();
        let Some(shared) = shared.upgrade() else { return };
        let Ok(mut index) = shared.index() else { return };
        index.set_serving(false);
        for (job, _) in &self.waiting {
            index.checked(&job.key, &job.place, true);
        }
        drop(index);
        self.waiting.clear();
    }

    /// Wait for what is in flight, and give up the rest.
    fn finish(mut self, shared: &Weak<Shared>) {
        self.waiting.clear();
        let since = Instant::now();
        while !self.flying.is_empty() {
            if since.elapsed() > PATIENCE {
                // The disk hangs, and may still write to the extents: they stay reserved for ever.
                std::mem::forget(self);
                return;
            }
            self.poll(shared, TURN);
        }
    }

    /// Read one block when its turn has come.
    pub(super) fn start(&mut self, job: Job) {
        if self.flying.is_empty() {
            self.moved = Instant::now();
        }
        self.waiting.push_back((job, Instant::now()));
        self.begin();
    }

    /// Begin reads as far as the disk may have them.
    fn begin(&mut self) {
        while let Some((job, since)) = self.waiting.pop_front() {
            let len = bytes_of(&job);
            if !self.flying.is_empty() && self.flying_bytes + len > FLYING_MAX {
                self.waiting.push_front((job, since));
                break;
            }
            let (id, offset, target) = (self.next_id, job.file_offset, job.landing.at());
            self.flying.insert(id, (job, since));
            self.flying_bytes += len;
            self.next_id += 1;
            // SAFETY: the extent has whole pages and is reserved for this landing, which stays in
            // `flying` until the read has ended.
            unsafe { self.queue.start(Read { id, offset, target, len }) };
        }
    }

    /// Publish what has ended. The disk gets its next reads before that.
    pub(super) fn poll(&mut self, shared: &Weak<Shared>, patience: Duration) {
        let mut ended = Vec::new();
        self.queue.wait(patience, &mut ended);
        if !ended.is_empty() {
            self.moved = Instant::now();
        }
        let mut landed = Vec::new();
        for (id, outcome) in ended {
            if let Some((job, begun)) = self.flying.remove(&id) {
                self.flying_bytes -= bytes_of(&job);
                landed.push((job, outcome, begun.elapsed()));
            }
        }
        self.begin();
        self.queue.submit();
        for (job, outcome, took) in landed {
            self.end(shared, job, outcome, took);
        }
    }

    fn end(&self, shared: &Weak<Shared>, job: Job, outcome: io::Result<()>, took: Duration) {
        let Job { landing, key, place, .. } = job;
        let off = match &outcome {
            Ok(()) => {
                self.health.read(place.len.into(), took);
                false
            }
            Err(_) => self.health.read_failed(),
        };
        // SAFETY: the read has ended, and the extent is this landing's alone until it is published.
        let container = unsafe { std::slice::from_raw_parts(landing.at(), place.len as usize) };
        let good = outcome.is_ok() && block::sum(container) == place.sum;
        let raw = block::raw_bytes(container).ok().filter(|_| good);
        if let Some(raw) = raw {
            // Fails only with the index broken, and then nothing is served.
            drop(landing.publish(raw as u32));
            return Self::tell(shared, &key, &place, true, off);
        }
        // The entry goes before the landing does: whoever waits for the landing must not be told
        // again that the disk has the block.
        Self::tell(shared, &key, &place, false, off);
        drop(landing);
    }

    /// Let the index know how the read of a block went, and whether the disk is off now.
    fn tell(shared: &Weak<Shared>, key: &Key, place: &Place, good: bool, off: bool) {
        let Some(shared) = shared.upgrade() else { return };
        let Ok(mut index) = shared.index() else { return };
        index.read_ended(key, place, good);
        if off {
            index.set_serving(false);
        }
    }
}

/// Bytes that the disk moves for a block.
fn bytes_of(job: &Job) -> usize {
    pages(job.place.len) as usize * PAGE
}
