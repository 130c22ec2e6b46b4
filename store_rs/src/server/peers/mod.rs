//! Other nodes' stores: what they hold is known here, and what is wanted comes from there.
//!
//! Owns the threads that talk to peers. For each peer two: one follows its changes into the cluster
//! index, one fetches blocks. For each connection from a peer one, which serves it. A peer that is
//! slow, hung or dead holds up its own threads only; a block that it does not deliver in time is a
//! miss. Peers prove themselves before anything else is read; a peer that breaks the protocol or
//! sends wrong bytes is cut, and tried again later.

mod feed;
mod fetcher;
mod follow;
mod receive;
mod serve;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::fetch::{Tier, Wanted};
use super::{Shared, lock};
use crate::cluster::{self, Cluster, Load};
use crate::error::{Error, Result};
use crate::index::{self, Entry};
use crate::key::Key;
use crate::latency::Latency;
use crate::peer::{
    Cutter, FrameReader, Link, Message, Pacer, PeerSettings, Secret, Transport, greet_client,
    greet_server, send_message,
};
use crate::wire::Origin;
use fetcher::{Fetcher, Progress};

/// Peers at once.
const PEERS_MAX: usize = crate::cluster::NODES_MAX;
/// How long a peer may take to connect, to prove itself, or to say its next byte.
const PATIENCE: Duration = Duration::from_secs(3);

/// See the module.
pub(crate) struct Peers {
    settings: PeerSettings,
    cluster: Mutex<Cluster>,
    transport: Box<dyn Transport>,
    secret: Secret,
    pacer: Pacer,
    remotes: Mutex<HashMap<String, Arc<Remote>>>,
    /// Connected peers by their row of the cluster index.
    by_row: Mutex<HashMap<u16, Arc<Remote>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Ends everything that waits on the network.
    cutters: Mutex<HashMap<u64, Cutter>>,
    next_cutter: AtomicU64,
    /// The change each follower of this store is sent next, by its connection.
    sent: Mutex<HashMap<u64, u64>>,
    stopped: Mutex<bool>,
    stopping: Condvar,
    counts: Counts,
}

/// One peer, by its address.
pub(super) struct Remote {
    address: String,
    fetcher: Fetcher,
    dismissed: AtomicBool,
    /// When it last said something.
    heard_us: AtomicU64,
}

/// Events since the start.
#[derive(Default)]
struct Counts {
    fetched_blocks: AtomicU64,
    fetched_bytes: AtomicU64,
    sent_blocks: AtomicU64,
    sent_bytes: AtomicU64,
    absent_blocks: AtomicU64,
    corrupt_blocks: AtomicU64,
    failures: AtomicU64,
    resyncs: AtomicU64,
    /// Of blocks that landed, from the request to the last byte.
    fetch_time: Latency,
}

impl Peers {
    /// Nobody is met before `start`. The cluster index takes `cluster_bytes` at most.
    pub(crate) fn new(
        settings: PeerSettings,
        cluster_bytes: u64,
        transport: Box<dyn Transport>,
    ) -> Result<Self> {
        let cluster = Mutex::new(Cluster::new(&settings.node, cluster_bytes)?);
        Ok(Self {
            cluster,
            secret: Secret::new(settings.token.as_deref()),
            pacer: Pacer::new(settings.max_bytes_per_s),
            settings,
            transport,
            remotes: Mutex::default(),
            by_row: Mutex::default(),
            threads: Mutex::default(),
            cutters: Mutex::default(),
            next_cutter: AtomicU64::new(feed::OWN + 1),
            sent: Mutex::default(),
            stopped: Mutex::new(false),
            stopping: Condvar::new(),
            counts: Counts::default(),
        })
    }

    /// The node's cluster index.
    pub(crate) fn cluster(&self) -> MutexGuard<'_, Cluster> {
        lock(&self.cluster)
    }

    /// Start to serve peers, if this store listens: the address they connect to.
    pub(crate) fn start(self: &Arc<Self>, shared: &Arc<Shared>) -> Result<Option<String>> {
        self.spawn("store-journal", shared, |peers, shared| feed::follow_own(&peers, &shared))?;
        let Some(listening) = self.transport.listen()? else { return Ok(None) };
        let address = listening.address();
        let cutter = listening.cutter().map_err(|error| Error::io("keep a listener", error))?;
        self.keep_cutter(cutter);
        self.spawn("store-peers", shared, move |peers, shared| {
            serve::accept(&peers, &shared, &*listening);
        })?;
        Ok(Some(address))
    }

    /// These are the peers from now on, by address; others are let go.
    pub(crate) fn set(self: &Arc<Self>, shared: &Arc<Shared>, addresses: &[String]) -> Result<()> {
        if self.settings.listen.is_none() {
            return Err(Error::config(
                "store.peer.listen",
                "a store without it has no peers; set it",
            ));
        }
        if addresses.len() > PEERS_MAX {
            return Err(Error::refused(format!("at most {PEERS_MAX} peers")));
        }
        let mut remotes = lock(&self.remotes);
        remotes.retain(|address, remote| {
            let stays = addresses.contains(address);
            if !stays {
                remote.dismissed.store(true, Ordering::Release);
                remote.fetcher.close();
            }
            stays
        });
        for address in addresses {
            if remotes.contains_key(address) {
                continue;
            }
            let remote = Arc::new(Remote {
                address: address.clone(),
                fetcher: Fetcher::default(),
                dismissed: AtomicBool::new(false),
                heard_us: AtomicU64::new(monotonic_us()),
            });
            remotes.insert(address.clone(), Arc::clone(&remote));
            let follower = Arc::clone(&remote);
            self.spawn("store-follow", shared, move |peers, shared| {
                follow::run(&peers, &shared, &follower);
            })?;
            self.spawn("store-fetch", shared, move |peers, shared| {
                fetcher::run(&peers, &shared, &remote);
            })?;
        }
        Ok(())
    }

    /// Cut every connection and wait for the threads.
    pub(crate) fn stop(&self) {
        *lock(&self.stopped) = true;
        self.stopping.notify_all();
        for remote in lock(&self.remotes).values() {
            remote.fetcher.close();
        }
        for cutter in lock(&self.cutters).values() {
            cutter.cut();
        }
        let threads: Vec<_> = lock(&self.threads).drain(..).collect();
        for thread in threads {
            // A thread that panicked has poisoned the index, which reports it.
            let _ = thread.join();
        }
    }

    /// A replica of this node says how busy it is.
    pub(crate) fn report(&self, load: Load) {
        self.cluster().report(cluster::OURS, load, monotonic_us());
    }

    /// Figures for the store's statistics; its next change has the number `next_change`.
    pub(crate) fn values(&self, next_change: u64) -> Vec<(&'static str, u64)> {
        let Counts {
            fetched_blocks,
            fetched_bytes,
            sent_blocks,
            sent_bytes,
            absent_blocks,
            corrupt_blocks,
            failures,
            resyncs,
            fetch_time: _,
        } = &self.counts;
        let counters = [
            ("peer_fetched_blocks", fetched_blocks),
            ("peer_fetched_bytes", fetched_bytes),
            ("peer_sent_blocks", sent_blocks),
            ("peer_sent_bytes", sent_bytes),
            ("peer_absent_blocks", absent_blocks),
            ("peer_corrupt_blocks", corrupt_blocks),
            ("peer_failures", failures),
            ("peer_resyncs", resyncs),
        ];
        let read = |(name, count): (_, &AtomicU64)| (name, count.load(Ordering::Relaxed));
        let mut values: Vec<_> = counters.map(read).to_vec();
        values.extend(self.cluster().values());
        let behind = lock(&self.sent).values().map(|&sent| next_change.saturating_sub(sent)).max();
        values.push(("index_lag_changes", behind.unwrap_or(0)));
        let (now, followed) = (monotonic_us(), lock(&self.by_row));
        let silent =
            |remote: &Arc<Remote>| now.saturating_sub(remote.heard_us.load(Ordering::Relaxed));
        values.push(("peer_silent_us", followed.values().map(silent).max().unwrap_or(0)));
        values.push(("peers_connected", followed.len() as u64));
        values
    }

    /// How long blocks took that came from peers.
    pub(crate) fn fetch_time(&self) -> &Latency {
        &self.counts.fetch_time
    }

    fn spawn(
        self: &Arc<Self>,
        name: &str,
        shared: &Arc<Shared>,
        body: impl FnOnce(Arc<Self>, Arc<Shared>) + Send + 'static,
    ) -> Result<()> {
        let (peers, shared) = (Arc::clone(self), Arc::clone(shared));
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || body(peers, shared))
            .map_err(|error| Error::io("start a thread", error))?;
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    fn is_stopping(&self) -> bool {
        *lock(&self.stopped)
    }

    /// Sleep, unless the store stops meanwhile.
    fn pause(&self, pause: Duration) {
        let stopped = lock(&self.stopped);
        if !*stopped {
            drop(self.stopping.wait_timeout(stopped, pause));
        }
    }

    fn keep_cutter(&self, cutter: Cutter) -> u64 {
        let id = self.next_cutter.fetch_add(1, Ordering::Relaxed);
        lock(&self.cutters).insert(id, cutter);
        if self.is_stopping() {
            lock(&self.cutters).values().for_each(Cutter::cut);
        }
        id
    }

    /// A proven connection to a peer, and the peer's name and epoch.
    fn dial<'a>(&'a self, shared: &Shared, address: &str) -> Result<(Connected<'a>, String, u64)> {
        let link = self.transport.connect(address, Instant::now() + PATIENCE)?;
        let mut connected = self.connected(link)?;
        greet_server(&mut *connected.link, &self.secret)?;
        let (name, epoch) = self.exchange_names(shared, &mut connected)?;
        Ok((connected, name, epoch))
    }

    /// The other side of `dial`.
    fn welcome<'a>(&'a self, shared: &Shared, link: Box<dyn Link>) -> Result<Connected<'a>> {
        let mut connected = self.connected(link)?;
        greet_client(&mut *connected.link, &self.secret)?;
        self.exchange_names(shared, &mut connected)?;
        Ok(connected)
    }

    fn connected(&self, mut link: Box<dyn Link>) -> Result<Connected<'_>> {
        let failed = |error| Error::io("set up a link", error);
        link.set_patience(PATIENCE, PATIENCE).map_err(failed)?;
        let cutter = self.keep_cutter(link.cutter().map_err(failed)?);
        Ok(Connected { link, frames: FrameReader::default(), peers: self, cutter })
    }

    fn exchange_names(&self, shared: &Shared, to: &mut Connected<'_>) -> Result<(String, u64)> {
        let hello = Message::Hello { node: &self.settings.node, epoch: shared.epoch };
        send_message(&mut *to.link, &hello)?;
        match to.frames.next(&mut *to.link)? {
            Message::Hello { node, epoch } => Ok((node.to_owned(), epoch)),
            other => Err(Error::protocol(format!("a peer began with {other:?}"))),
        }
    }
}

/// A link that `Peers::stop` can cut.
struct Connected<'a> {
    link: Box<dyn Link>,
    frames: FrameReader,
    peers: &'a Peers,
    cutter: u64,
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        lock(&self.peers.cutters).remove(&self.cutter);
        lock(&self.peers.sent).remove(&self.cutter);
    }
}

/// The peers as a tier below this node's own.
pub(crate) struct PeerTier(pub(crate) Arc<Peers>);

impl Tier for PeerTier {
    fn holds(&self, keys: &[Key]) -> usize {
        if lock(&self.0.by_row).is_empty() {
            return 0;
        }
        let cluster = self.0.cluster();
        keys.iter().take_while(|key| cluster.source(key).is_some()).count()
    }

    fn fetch(&self, _shared: &Arc<Shared>, wanted: &Wanted<'_>) {
        let sources: Vec<Option<u16>> = {
            let cluster = self.0.cluster();
            wanted.keys.iter().map(|key| cluster.source(key)).collect()
        };
        let progress = Arc::new(Progress::new(wanted.deadline));
        let mut at = 0;
        while at < wanted.keys.len() {
            let run = sources[at..].iter().take_while(|source| **source == sources[at]).count();
            let keys = &wanted.keys[at..at + run];
            let row = sources[at];
            at += run;
            match row.and_then(|row| lock(&self.0.by_row).get(&row).cloned()) {
                Some(remote) => remote.fetcher.ask(keys, wanted, &progress),
                None if wanted.prefix => break,
                None => {}
            }
        }
        progress.wait();
    }

    fn origin(&self) -> Origin {
        Origin::Peer
    }
}

impl Shared {
    /// A replica of this node says what came into its pool and what went.
    pub(super) fn report_pool(&self, replica: &str, anew: bool, added: &[Key], removed: &[Key]) {
        let gone = removed.iter().map(|key| Entry::new(key, index::Tier::Gone));
        let came = added.iter().map(|key| Entry::new(key, index::Tier::Pool));
        let changed: Vec<_> = gone.chain(came).collect();
        let now_s = self.now() / 1_000_000;
        // A table that cannot grow keeps what it has: the rest is not predicted.
        let _ = self.peers.cluster().report_pool(cluster::OURS, replica, anew, &changed, now_s);
    }
}

/// `CLOCK_MONOTONIC` in µs, which all processes of this machine share.
fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}
