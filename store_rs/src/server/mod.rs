//! The store's server: one control thread that accepts and watches, one thread per session.
//!
//! Owns the socket, the arena and the index behind one lock, which is held for index work only,
//! never while bytes are copied. A session is trusted as far as its process runs under our uid; it
//! is bounded in leases, frames and put buffer, and can break nothing but itself: a malformed frame
//! ends that session. What it held comes back when it hangs up (clients shut their socket down only
//! after their last lease) or when the kernel says that its process is dead.
//!
//! A broken index invariant poisons the lock; the server then refuses every call, and whoever
//! supervises it starts a new one.

mod control;
pub(crate) mod fetch;
mod operate;
mod options;
mod peers;
mod put;
mod session;
mod socket;
mod transcode;
mod tune;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::arena::{Arena, COUNT_PAGE};
use crate::disk::{Disk, Threads};
use crate::error::{Error, Result};
use crate::index::{Index, SessionId, Tick};
use crate::memory;
use crate::peer::{Tcp, Transport};
use crate::wire::StatsReply;
pub use options::{CodecChoice, Options};
use peers::{PeerTier, Peers};
use socket::Listener;
use tune::DramCodec;
pub(crate) use tune::codec_rate;

/// What the control thread knows of a session.
pub(crate) struct Peer {
    pub(crate) socket: UnixStream,
    /// Readable once the process is dead; None on kernels without `SO_PEERPIDFD`.
    pub(crate) pidfd: Option<OwnedFd>,
}

/// State shared by all threads of one server.
pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) arena: Arena,
    pub(crate) codec: DramCodec,
    pub(crate) epoch: u64,
    pub(crate) stopping: AtomicBool,
    /// A stop lets sessions answer what has arrived.
    pub(crate) draining: AtomicBool,
    /// Becomes readable when the server stops, and stays so.
    pub(crate) stop_event: OwnedFd,
    /// Below DRAM, the fastest first.
    pub(crate) tiers: Vec<Box<dyn fetch::Tier>>,
    pub(crate) disk: Option<Arc<Disk>>,
    index: Mutex<Index>,
    published: Condvar,
    ingest_left: Mutex<u64>,
    clients: Mutex<HashMap<SessionId, Arc<Peer>>>,
    pub(crate) peers: Arc<Peers>,
    started: Instant,
    #[cfg(test)]
    steps: Option<std::sync::atomic::AtomicU64>,
}

/// A running store. Stops when dropped.
pub struct Server {
    shared: Arc<Shared>,
    control: Option<JoinHandle<()>>,
    transcoder: Option<JoinHandle<()>>,
    disk: Option<Threads>,
    owner: u32,
    peer_address: Option<String>,
}

impl Server {
    /// Take the socket, reserve memory, and serve.
    ///
    /// Fails with a configuration error that names the field if another store serves the socket or
    /// the memory cannot be had.
    pub fn start(options: Options) -> Result<Self> {
        Self::start_above(options, Vec::new())
    }

    /// The same, over the node's own tiers below DRAM.
    fn start_above(options: Options, tiers: Vec<Box<dyn fetch::Tier>>) -> Result<Self> {
        let transport = Box::new(Tcp::new(&options.peer)?);
        Self::start_over(options, tiers, transport)
    }

    /// The same, with peers reached over `transport`.
    pub(crate) fn start_over(
        options: Options,
        mut tiers: Vec<Box<dyn fetch::Tier>>,
        transport: Box<dyn Transport>,
    ) -> Result<Self> {
        let budget = options.budget()?;
        let peers = Arc::new(Peers::new(options.peer.clone(), budget.cluster, transport)?);
        if options.peer.listen.is_some() {
            tiers.push(Box::new(PeerTier(Arc::clone(&peers))));
        }
        let listener = Listener::bind(&options.socket)?;
        memory::check_fits("dram_bytes", options.dram_bytes)?;
        let codec = DramCodec::choose(options.codec)?;
        let progress = Arc::clone(&options.progress);
        let arena = Arena::create_telling(budget.arena as usize, &progress)?;
        let policy = options.eviction.build(budget.limits.max_blocks);
        let index = Mutex::new(Index::new(arena.size(), budget.limits, policy));
        let disk = match options.nvme.clone() {
            Some(nvme) => Some(Disk::open(nvme, &index, &progress)?),
            None => None,
        };
        if let Some(disk) = &disk {
            tiers.insert(0, Box::new(Arc::clone(disk)));
        }
        let shared = Shared::new(options, codec, arena, index, budget.ingest, tiers, disk, peers)?;
        let shared = Arc::new(shared);
        let control = Some(control::spawn(Arc::clone(&shared), listener)?);
        let owner = std::process::id();
        // From here on the server's drop undoes everything.
        let (transcoder, disk, peer_address) = (None, None, None);
        let mut server = Self { shared, control, transcoder, disk, owner, peer_address };
        let shared = &server.shared;
        server.disk = shared.disk.as_ref().map(|disk| disk.start(shared)).transpose()?;
        server.transcoder = transcode::spawn(&server.shared)?;
        server.peer_address = server.shared.peers.start(&server.shared)?;
        Ok(server)
    }

    /// Differs at every start.
    pub fn epoch(&self) -> u64 {
        self.shared.epoch
    }

    /// Counters and gauges.
    pub fn stats(&self) -> Result<StatsReply> {
        self.shared.stats()
    }

    /// Where other stores reach this one, if it listens.
    pub fn peer_address(&self) -> Option<&str> {
        self.peer_address.as_deref()
    }

    /// These are the peers from now on, by address. This store's own address is ignored.
    pub fn set_peers(&self, addresses: &[String]) -> Result<()> {
        self.shared.peers.set(&self.shared, addresses)
    }

    /// What an operator should know about how this store runs here.
    pub fn warnings(&self) -> Vec<String> {
        self.shared.disk.as_ref().map_or_else(Vec::new, |disk| disk.warnings())
    }

    /// Write to disk what is in DRAM only, where there is room; how many blocks went.
    pub fn drain(&self, limit: Duration) -> Result<u64> {
        self.shared.drain(limit)
    }

    /// Whether sessions are served: false after a stop or a broken invariant.
    pub fn is_running(&self) -> bool {
        let alive = self.control.as_ref().is_some_and(|thread| !thread.is_finished());
        alive && !self.shared.index.is_poisoned()
    }

    /// Stop accepting, end every session, wait for their threads.
    ///
    /// With `drain`, requests that have arrived are still answered, within a grace period; without,
    /// sockets are cut at once. Clients keep what they have mapped until they let go of it. In a
    /// forked child, where none of the threads exist, this does nothing.
    pub fn stop(&mut self, drain: bool) {
        let Some(control) = self.control.take() else { return };
        if std::process::id() != self.owner {
            return;
        }
        self.shared.peers.stop();
        self.shared.draining.store(drain, Ordering::Release);
        self.shared.stopping.store(true, Ordering::Release);
        // Writing 1 to an eventfd we own cannot fail or block.
        let _ = rustix::io::write(&self.shared.stop_event, &1u64.to_ne_bytes());
        // The control thread ends all sessions. Had it panicked, the hang-up would still be due.
        if control.join().is_err() {
            self.shared.hang_up_all(std::net::Shutdown::Both);
        }
        if let Some(transcoder) = self.transcoder.take() {
            // Had it panicked, the index would be poisoned and say so.
            let _ = transcoder.join();
        }
        if let Some(disk) = self.disk.take() {
            disk.stop();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop(false);
    }
}

impl Shared {
    #[allow(clippy::too_many_arguments)]
    fn new(
        options: Options,
        codec: DramCodec,
        arena: Arena,
        index: Mutex<Index>,
        ingest: u64,
        tiers: Vec<Box<dyn fetch::Tier>>,
        disk: Option<Arc<Disk>>,
        peers: Arc<Peers>,
    ) -> Result<Self> {
        let stop_event = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| Error::io("create an eventfd", error))?;
        Ok(Self {
            options,
            arena,
            codec,
            epoch: new_epoch()?,
            stopping: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            stop_event,
            tiers,
            disk,
            index,
            published: Condvar::new(),
            ingest_left: Mutex::new(ingest),
            clients: Mutex::new(HashMap::new()),
            peers,
            started: Instant::now(),
            #[cfg(test)]
            steps: None,
        })
    }

    /// Without sessions and threads; time goes on by a millisecond with each look at it.
    #[cfg(test)]
    pub(crate) fn simulated(arena: Arena, index: Index) -> Arc<Self> {
        let options = Options::new("/nowhere", arena.size());
        let codec = DramCodec::choose(options.codec).expect("no codec");
        let transport = Box::new(Tcp::new(&options.peer).expect("no settings"));
        let peers = Peers::new(options.peer.clone(), 0, transport).expect("no settings");
        let peers = Arc::new(peers);
        let index = Mutex::new(index);
        let shared = Self::new(options, codec, arena, index, 0, Vec::new(), None, peers);
        let mut shared = shared.expect("an eventfd");
        shared.steps = Some(std::sync::atomic::AtomicU64::new(1));
        Arc::new(shared)
    }

    /// The index, unless an invariant broke.
    pub(crate) fn index(&self) -> Result<MutexGuard<'_, Index>> {
        self.index.lock().map_err(|_| broken())
    }

    /// Wait until some put is published or given up, for `limit` at most.
    pub(crate) fn wait_published_for<'a>(
        &self,
        index: MutexGuard<'a, Index>,
        limit: Duration,
    ) -> Result<MutexGuard<'a, Index>> {
        Ok(self.published.wait_timeout(index, limit).map_err(|_| broken())?.0)
    }

    /// Wake those who wait for a put.
    pub(crate) fn notify_published(&self) {
        self.published.notify_all();
    }

    /// Time for the index.
    pub(crate) fn now(&self) -> Tick {
        #[cfg(test)]
        if let Some(steps) = &self.steps {
            return steps.fetch_add(1000, Ordering::Relaxed);
        }
        self.started.elapsed().as_micros() as Tick
    }

    /// Take up to `wanted` bytes of ingest memory: at most half of what is left, so that later
    /// clients get some.
    pub(crate) fn take_ingest(&self, wanted: u64) -> u64 {
        let mut left = lock(&self.ingest_left);
        let granted = wanted.min(self.options.ingest_bytes_max).min(*left / 2) & !0xffff;
        *left -= ingest_memory(granted);
        granted
    }

    /// Give it back.
    pub(crate) fn return_ingest(&self, granted: u64) {
        *lock(&self.ingest_left) += ingest_memory(granted);
    }

    pub(crate) fn clients(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<Peer>>> {
        lock(&self.clients)
    }

    /// As [`Server::drain`]; a store without a disk has nothing to do.
    pub(crate) fn drain(&self, limit: Duration) -> Result<u64> {
        self.disk.as_ref().map_or(Ok(0), |disk| disk.drain(limit))
    }

    pub(crate) fn stats(&self) -> Result<StatsReply> {
        let index = self.index()?;
        let (now, snapshot, next_change) = (self.now(), index.snapshot(), index.next_change());
        drop(index);
        let oldest = snapshot.oldest_lease.map_or(0, |since| now.saturating_sub(since));
        let ingest_free = *lock(&self.ingest_left);
        let own = [
            ("uptime_s", self.started.elapsed().as_secs()),
            ("dram_bytes", self.options.dram_bytes),
            ("ingest_free_bytes", ingest_free),
            ("lease_oldest_us", oldest),
            ("os_arena_bytes", self.arena.resident_bytes()?),
            ("os_private_bytes", memory::private_bytes()),
        ];
        let own = own.into_iter().chain(self.peers.values(next_change));
        let mut values = snapshot.values();
        values.extend(own.map(|(name, value)| (name.to_owned(), value)));
        values.extend(self.peers.fetch_time().values("peer_fetch"));
        values.extend(Disk::values(self.disk.as_deref()));
        let tenants = snapshot.tenants.into_iter().map(|row| (row.name, row.bytes, row.blocks));
        let disk_why = self.disk.as_ref().map_or_else(String::new, |disk| disk.codec_why());
        let texts = [
            ("codec", self.codec.name()),
            ("codec_why", &self.codec.why),
            ("nvme_codec_why", &disk_why),
            ("eviction", self.options.eviction.name()),
        ];
        Ok(StatsReply {
            values,
            tenants: tenants.collect(),
            texts: texts.map(|(name, text)| (name.to_owned(), text.to_owned())).to_vec(),
            usage: snapshot.usage.iter().map(|row| ("dram".to_owned(), *row)).collect(),
        })
    }

    pub(crate) fn hang_up_all(&self, how: std::net::Shutdown) {
        for peer in self.clients().values() {
            // A peer that hung up first is not an error.
            let _ = peer.socket.shutdown(how);
        }
    }
}

/// What a put buffer takes: its bytes and the page of their count.
fn ingest_memory(granted: u64) -> u64 {
    if granted > 0 { granted + COUNT_PAGE as u64 } else { 0 }
}

/// Lock plain data; its holders cannot panic halfway through a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn broken() -> Error {
    Error::unavailable("the store found its accounting broken and stopped serving; restart it")
}

fn new_epoch() -> Result<u64> {
    use std::io::Read;
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| Error::io("read /dev/urandom", error))?;
    Ok(u64::from_le_bytes(bytes) | 1)
}
