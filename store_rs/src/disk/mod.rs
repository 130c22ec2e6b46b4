//! The disk tier: blocks that DRAM has no room for, kept across restarts.
//!
//! Owns the directory and its file, a thread that writes (demotions, room, probes) and one that
//! reads (promotions). What is where is the index's and its log's business; this module moves the
//! bytes. Any failure of the disk makes blocks misses, never errors: the tier switches itself off,
//! says so in its counters, and on again when the disk works.
//!
//! `directory` whose it is · `recover` what a restart finds · `writer`, `room`, `stage`, `rate`,
//! `recode` down · `reader` up · `io` transfers · `health` on or off

mod buffer;
mod directory;
mod health;
mod io;
mod rate;
mod reader;
mod recode;
mod recover;
mod room;
mod stage;
#[cfg(test)]
mod tests;
mod writer;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::block;
use crate::error::{Error, Result};
use crate::index::Index;
use crate::key::Key;
use crate::log::{Log, PAGE};
use crate::progress::Progress;
use crate::server::fetch::{Landing, Tier, Wanted};
use crate::server::{CodecChoice, Shared};
use directory::Directory;
use health::Health;
use io::{Io, Pool, Queue, Uring};
use reader::{Job, Order, Reader};
use recode::Form;
use recover::Recovered;
use writer::{Turn, Writer};

/// Pause of a writer that has nothing to do.
const IDLE: Duration = Duration::from_millis(20);
/// Promotions planned under one lock.
const BATCH: usize = 32;

/// Memory the writer stages and codes blocks in, of a store of `dram_bytes`.
pub(crate) fn writer_memory_bytes(options: &DiskOptions, dram_bytes: u64) -> u64 {
    let coding = options.codec.map_or(0, |_| recoder_bytes(dram_bytes) as u64);
    stage::Stage::memory_bytes() + coding
}

/// Largest container that is coded anew for the disk.
fn recoder_bytes(dram_bytes: u64) -> usize {
    (dram_bytes / 64).clamp(1 << 20, 64 << 20) as usize
}

/// Settings of the disk tier.
#[derive(Debug, Clone)]
pub struct DiskOptions {
    /// Its directory, created if absent, used by one store at a time.
    pub path: PathBuf,
    /// Hard cap of what the directory may take on disk.
    pub bytes: u64,
    /// Most bytes written a second; 0 is no limit.
    pub write_bytes_per_s: u64,
    /// Read with threads even where io_uring works.
    pub no_uring: bool,
    /// How blocks are stored; None writes them as they are in memory.
    pub codec: Option<CodecChoice>,
}

/// The tier, as the server holds it.
pub(crate) struct Disk {
    io: Arc<dyn Io>,
    health: Arc<Health>,
    form: Arc<Form>,
    orders: Sender<Order>,
    commands: Sender<Command>,
    /// What the threads take over when they start.
    idle: Mutex<Option<Idle>>,
    options: DiskOptions,
    max_segments: usize,
    recovered: Recovered,
    direct: bool,
    uring: bool,
    // Last: the directory stays ours until everything above is gone.
    _directory: Option<Directory>,
}

struct Idle {
    queue: Box<dyn Queue>,
    orders: Receiver<Order>,
    commands: Receiver<Command>,
}

/// What the writer is asked for.
enum Command {
    Drain(Sender<u64>),
    Stop,
}

/// The tier's threads; they end with `stop`.
pub(crate) struct Threads {
    disk: Arc<Disk>,
    threads: Vec<JoinHandle<()>>,
}

impl Disk {
    /// Take the directory and put what it holds into `index`.
    pub(crate) fn open(
        options: DiskOptions,
        index: &Mutex<Index>,
        progress: &Progress,
    ) -> Result<Arc<Self>> {
        let directory = Directory::open(&options.path, options.bytes)?;
        let file = Arc::clone(&directory.file);
        let io: Arc<dyn Io> = file.clone();
        let ring = if options.no_uring { None } else { Uring::new(&file).ok() };
        let uring = ring.is_some();
        let queue: Box<dyn Queue> = match ring {
            Some(ring) => Box::new(ring),
            None => Box::new(
                Pool::new(&io).map_err(|error| Error::io("start threads for the disk", error))?,
            ),
        };
        let direct = file.is_direct();
        let mut log = Log::new(directory.max_segments, directory.segment_bytes);
        log.restore_segments(directory.segments);
        index.lock().unwrap_or_else(PoisonError::into_inner).set_log(log);
        let max_segments = directory.max_segments;
        let mut disk = Self::over(io, queue, options, max_segments, index, progress)?;
        (disk.direct, disk.uring, disk._directory) = (direct, uring, Some(directory));
        Ok(Arc::new(disk))
    }

    /// The tier over any transfers; the index has its log.
    fn over(
        io: Arc<dyn Io>,
        queue: Box<dyn Queue>,
        options: DiskOptions,
        max_segments: usize,
        index: &Mutex<Index>,
        progress: &Progress,
    ) -> Result<Self> {
        let recovered = recover::recover(&*io, index, progress)?;
        let (orders, waiting_orders) = channel();
        let (commands, waiting_commands) = channel();
        let idle = Idle { queue, orders: waiting_orders, commands: waiting_commands };
        Ok(Self {
            io,
            health: Arc::default(),
            form: Arc::new(Form::new(options.codec)),
            orders,
            commands,
            idle: Mutex::new(Some(idle)),
            options,
            max_segments,
            recovered,
            direct: false,
            uring: false,
            _directory: None,
        })
    }

    /// Start the threads.
    pub(crate) fn start(self: &Arc<Self>, shared: &Arc<Shared>) -> Result<Threads> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Idle { queue, orders, commands } =
            idle.ok_or_else(|| Error::unavailable("the disk tier runs already"))?;
        let reader = Reader::new(queue, Arc::clone(&self.health));
        let weak = Arc::downgrade(shared);
        let writer = self.writer(shared);
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            let thread = thread::Builder::new().name(name.to_owned()).spawn(body);
            thread.map_err(|error| Error::io("start a thread for the disk", error))
        };
        let threads = vec![
            spawn("store-disk-up", Box::new(move || reader.run(&orders, &weak)))?,
            spawn("store-disk-down", Box::new(move || run_writer(writer, &commands)))?,
        ];
        Ok(Threads { disk: Arc::clone(self), threads })
    }

    fn writer(&self, shared: &Arc<Shared>) -> Writer {
        Writer::new(
            Arc::clone(shared),
            Arc::clone(&self.io),
            Arc::clone(&self.health),
            Arc::clone(&self.form),
            &self.options,
            self.max_segments,
        )
    }

    /// Write what is in DRAM only, where there is room; how many blocks went within `limit`.
    pub(crate) fn drain(&self, limit: Duration) -> Result<u64> {
        let (done, report) = channel();
        let gone = |_| Error::unavailable("the disk tier has stopped");
        self.commands.send(Command::Drain(done)).map_err(gone)?;
        report.recv_timeout(limit).map_err(|_| {
            Error::timeout("the drain goes on, but did not end in time; wait longer for it")
        })
    }

    /// Check a block's bytes on disk, and drop them if they are wrong: their length and whether they
    /// were right. None if it is not there.
    pub(crate) fn verify(&self, shared: &Shared, key: &Key) -> Result<Option<(u32, bool)>> {
        let Some((place, offset)) = shared.index()?.pin_on_disk(key) else { return Ok(None) };
        let mut buffer = buffer::Buffer::new((place.len as usize).next_multiple_of(PAGE));
        let good = self.io.read_at(offset, &mut buffer).is_ok()
            && block::sum(&buffer[..place.len as usize]) == place.sum;
        shared.index()?.checked(key, &place, good);
        Ok(Some((place.len, good)))
    }

    /// Counters and gauges of the tier itself; of none, zeros.
    pub(crate) fn values(this: Option<&Self>) -> Vec<(String, u64)> {
        let none = Health::default();
        let mut values = this.map_or(&none, |disk| &disk.health).values();
        let bytes = this.map_or(0, |disk| disk.options.bytes);
        let recoded = this.map_or(0, |disk| disk.form.recoded());
        let (direct, uring) = this.map_or((false, false), |disk| (disk.direct, disk.uring));
        let recovered = this.map_or_else(Recovered::default, |disk| disk.recovered);
        let own = [
            ("nvme_bytes", bytes),
            ("nvme_recoded", recoded),
            ("nvme_direct_io", u64::from(direct)),
            ("nvme_io_uring", u64::from(uring)),
            ("nvme_recovered_blocks", recovered.blocks),
            ("nvme_recovery_ignored", recovered.ignored),
            ("nvme_recovery_read_bytes", recovered.read_bytes),
            ("nvme_recovery_failed_segments", recovered.failed),
        ];
        values.extend(own.map(|(name, value)| (name.to_owned(), value)));
        values
    }

    /// How blocks are stored, and why.
    pub(crate) fn codec_why(&self) -> String {
        self.form.why()
    }

    /// What an operator should know about how the tier runs here.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let path = self.options.path.display();
        let mut warnings = Vec::new();
        if !self.direct {
            warnings.push(format!(
                "nvme.path: {path} has no direct I/O, so blocks also go through the page cache; use \
                 a local file system such as ext4 or xfs"
            ));
        }
        if !self.uring && !self.options.no_uring {
            warnings.push(
                "the kernel or a seccomp filter refuses io_uring; blocks are read by threads instead"
                    .to_owned(),
            );
        }
        if self.recovered.failed > 0 {
            warnings.push(format!(
                "nvme.path: {} segments in {path} could not be read and count as empty; check the \
                 disk",
                self.recovered.failed
            ));
        }
        warnings
    }
}

impl Tier for Arc<Disk> {
    /// The index itself says which blocks are on disk.
    fn holds(&self, _keys: &[Key]) -> usize {
        0
    }

    fn fetch(&self, shared: &Arc<Shared>, wanted: &Wanted<'_>) {
        let mut keys = wanted.keys;
        while !keys.is_empty() {
            let batch = &keys[..keys.len().min(BATCH)];
            let Ok(mut index) = shared.index() else { return };
            let promote = |key: &Key| Some((*key, index.promote(key, wanted.hint, wanted.since)?));
            let planned: Vec<_> = batch.iter().filter_map(promote).collect();
            // What is being written to disk cannot make room: wait for it.
            let left = wanted.deadline.saturating_duration_since(Instant::now());
            let again = planned.is_empty() && index.is_demoting() && !left.is_zero();
            if again && batch.iter().any(|key| index.is_below(key)) {
                drop(shared.wait_published_for(index, left.min(IDLE)));
                continue;
            }
            drop(index);
            keys = &keys[batch.len()..];
            for (key, promotion) in planned {
                let landing =
                    Landing::new(shared, promotion.extent, promotion.offset, promotion.place.len);
                let (place, file_offset) = (promotion.place, promotion.file_offset);
                // Without a reader the landing is dropped, and the block is a miss.
                let _ = self.orders.send(Order::Read(Job { landing, key, place, file_offset }));
            }
        }
    }
}

impl Threads {
    /// Stop writing, let reads in flight end, and wait for both.
    pub(crate) fn stop(self) {
        // A thread that has ended already needs no telling.
        let _ = self.disk.commands.send(Command::Stop);
        let _ = self.disk.orders.send(Order::Stop);
        for thread in self.threads {
            // One that panicked has poisoned the index, which reports it.
            let _ = thread.join();
        }
    }
}

fn run_writer(mut writer: Writer, commands: &Receiver<Command>) {
    let mut pause = IDLE;
    loop {
        match commands.recv_timeout(pause) {
            Ok(Command::Drain(done)) => {
                // Whoever asked may have given up.
                let _ = done.send(writer.drain());
            }
            Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {}
        }
        pause = match writer.turn(writer.now()) {
            Turn::Busy => Duration::ZERO,
            Turn::Idle => IDLE,
        };
    }
}
