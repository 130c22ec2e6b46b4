//! The blocking client: match, lease, read, put, each with a deadline.
//!
//! Owns up to three sessions, so that a lookup never waits behind a copy or a disk: one for all
//! that is answered at once, from the first put on one with the put buffer, and, of a store with
//! tiers below DRAM, from the first lease on one that leases. Thread-safe. A failed session stays failed
//! (`Unavailable`); whoever wants to go on connects anew. A missing or corrupt block is never an
//! error, only a shorter answer.

mod connection;
mod deadline;
mod leading;
mod lease;
mod operate;
mod prefault;
mod put;
mod reading;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::arena::ArenaView;
use crate::cluster::{ClusterView, Load};
use crate::error::{Error, Result};
use crate::key::{KEY_BYTES, Key, NO_KEY};
use crate::wire::{Caller, LeaseEntry, MAX_ITEMS, MAX_TENANT, Origin, Reply, Request, StatsReply};
use connection::{Connection, unexpected};
pub use deadline::Deadline;
use leading::leading;
pub use lease::Lease;
pub use put::PutBlock;
use put::Writer;
pub use reading::Reading;

/// A read from slower tiers is answered in about so many parts.
const WINDOWS: usize = 16;

/// A connected client.
pub struct Client {
    reader: Arc<Connection>,
    /// Whether a lease may wait for a tier below DRAM.
    tiered: bool,
    loader: OnceLock<Arc<Connection>>,
    arena: Arc<ArenaView>,
    writer: Writer,
    path: PathBuf,
    epoch: u64,
    server_pid: u32,
}

impl Client {
    /// Connect to the store at `path`. A put buffer of up to `ingest_bytes` is asked for at the
    /// first put. With `prefault`, a background thread maps the arena's pages ahead of reads.
    pub fn connect(
        path: &Path,
        ingest_bytes: u64,
        prefault: bool,
        timeout: Duration,
    ) -> Result<Self> {
        let deadline = Deadline::after(timeout);
        let (reader, welcome) = Connection::open(path, 0, deadline)?;
        let fd = welcome.fds.into_iter().next();
        let fd = fd.ok_or_else(|| Error::protocol("the store passed no arena"))?;
        let arena = Arc::new(ArenaView::open(fd, welcome.arena_bytes)?);
        if prefault {
            prefault::start(&arena)?;
        }
        let writer = Writer::new(PathBuf::from(path), ingest_bytes, welcome.epoch);
        Ok(Self {
            reader: Arc::new(reader),
            tiered: welcome.tiers > 0,
            loader: OnceLock::new(),
            arena,
            writer,
            path: PathBuf::from(path),
            epoch: welcome.epoch,
            server_pid: welcome.pid,
        })
    }

    /// Differs at every start of a store.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The store's process.
    pub fn server_pid(&self) -> u32 {
        self.server_pid
    }

    /// Whether this process was forked from the one that connected.
    pub fn is_forked(&self) -> bool {
        self.reader.is_forked()
    }

    /// How many of `keys`, from the first, are present.
    pub fn match_prefix<'a>(
        &self,
        keys: &[Key],
        caller: impl Into<Caller<'a>>,
        deadline: Deadline,
    ) -> Result<usize> {
        let caller = checked(caller)?;
        let mut matched = 0;
        for keys in keys.chunks(MAX_ITEMS) {
            let request = Request::Match { caller, keys };
            let run = self.reader.call(&request, deadline, count)?;
            matched += run;
            if run < keys.len() {
                break;
            }
        }
        Ok(matched)
    }

    /// Lease every present block of `keys`; None stands for an absent one.
    pub fn lease<'a>(
        &self,
        keys: &[Key],
        caller: impl Into<Caller<'a>>,
        deadline: Deadline,
    ) -> Result<Vec<Option<Lease>>> {
        let caller = checked(caller)?;
        let mut leases = Vec::with_capacity(keys.len());
        for keys in keys.chunks(MAX_ITEMS) {
            leases.extend(self.lease_some(keys, caller, None, deadline)?);
        }
        Ok(leases)
    }

    /// Copy the leading present blocks into `buffers`, each verified, on up to `threads` threads;
    /// how many were.
    ///
    /// Stops at the first that is absent, corrupt or not of its buffer's size, or when the deadline
    /// passes while copying.
    pub fn read_into<'a>(
        &self,
        keys: &[Key],
        buffers: &mut [&mut [u8]],
        threads: usize,
        caller: impl Into<Caller<'a>>,
        deadline: Deadline,
    ) -> Result<usize> {
        self.read_noting(keys, buffers, threads, caller, deadline, |_| ())
    }

    /// The same; `note` is told where each block that was copied had been.
    pub fn read_noting<'a>(
        &self,
        keys: &[Key],
        buffers: &mut [&mut [u8]],
        threads: usize,
        caller: impl Into<Caller<'a>>,
        deadline: Deadline,
        note: impl FnMut(Origin),
    ) -> Result<usize> {
        let (caller, mut note) = (checked(caller)?, note);
        assert_eq!(keys.len(), buffers.len(), "one buffer per key");
        let mut read = 0;
        while read < keys.len() {
            let window = &keys[read..keys.len().min(read + MAX_ITEMS)];
            // From a slower tier, copy the first blocks while the others still come.
            let enough = if self.tiered { window.len().div_ceil(WINDOWS) } else { window.len() };
            let leases = self.lease_some(window, caller, Some(enough), deadline)?;
            let leases: Vec<Lease> = leases.into_iter().flatten().collect();
            let (leased, whole) = (leases.len(), leases.len() == window.len());
            let copied = copy_leading(&leases, &mut buffers[read..], threads, deadline);
            leases[..copied].iter().map(Lease::origin).for_each(&mut note);
            Lease::end_all(leases);
            read += copied;
            if copied == 0 || copied < leased || !(whole || self.tiered) {
                break;
            }
        }
        Ok(read)
    }

    /// Store blocks; what became of each.
    pub fn put<'a>(
        &self,
        blocks: &[PutBlock<'_>],
        shape: crate::wire::BlockShape,
        caller: impl Into<Caller<'a>>,
        deadline: Deadline,
    ) -> Result<Vec<crate::wire::PutStatus>> {
        let caller = checked(caller)?;
        if self.is_forked() {
            return Err(Error::unavailable("connected before a fork; connect again in the child"));
        }
        self.writer.put(blocks, shape, caller, deadline)
    }

    /// Drop blocks; how many were present.
    pub fn evict(&self, keys: &[Key], deadline: Deadline) -> Result<usize> {
        let chunks = keys.chunks(MAX_ITEMS);
        chunks.map(|keys| self.reader.call(&Request::Evict { keys }, deadline, count)).sum()
    }

    /// Every block the store holds in DRAM, with its parent; not a snapshot, as it comes in pieces.
    pub fn blocks(&self, deadline: Deadline) -> Result<Vec<(Key, Option<Key>)>> {
        let mut found = Vec::new();
        let mut from = 0;
        loop {
            let request = Request::List { from };
            from = self.reader.call(&request, deadline, |reply| {
                let Reply::Listed { next, items } = reply else { return Err(unexpected(&reply)) };
                found.extend(items.iter().map(link));
                Ok(next)
            })?;
            if from == 0 {
                return Ok(found);
            }
        }
    }

    /// Counters of the store.
    pub fn stats(&self, deadline: Deadline) -> Result<StatsReply> {
        self.reader.call(&Request::Stats, deadline, |reply| match reply {
            Reply::Stats(stats) => Ok(stats),
            other => Err(unexpected(&other)),
        })
    }

    /// The cluster index, mapped. Ask again once it has moved.
    pub fn cluster(&self, deadline: Deadline) -> Result<ClusterView> {
        let size = |reply: Reply<'_>| match reply {
            Reply::Cluster(bytes) => Ok(bytes),
            other => Err(unexpected(&other)),
        };
        let (bytes, fd) = self.reader.call_for_fd(&Request::Cluster, deadline, size)?;
        ClusterView::open(fd, bytes)
    }

    /// Tell the store how busy a replica of this node is.
    pub fn report(&self, load: &Load) -> Result<()> {
        self.reader.send(&Request::Load(&load.encode()))
    }

    /// Tell the store what came into a replica's pool and what went; `anew` voids what was told
    /// before. A replica that has not reported its load is ignored.
    pub fn report_pool(
        &self,
        replica: &str,
        anew: bool,
        added: &[Key],
        removed: &[Key],
    ) -> Result<()> {
        const KEYS: usize = MAX_ITEMS / 2;
        let parts = added.len().max(removed.len()).div_ceil(KEYS).max(1);
        let part = |keys: &[Key], at: usize| {
            let start = keys.len().min(at * KEYS);
            start..keys.len().min(start + KEYS)
        };
        for at in 0..parts {
            let (added, removed) = (&added[part(added, at)], &removed[part(removed, at)]);
            self.reader.send(&Request::Pool { replica, anew: anew && at == 0, added, removed })?;
        }
        Ok(())
    }

    /// Returns if the store answers.
    pub fn ping(&self, deadline: Deadline) -> Result<()> {
        self.reader.call(&Request::Ping, deadline, |reply| match reply {
            Reply::Pong => Ok(()),
            other => Err(unexpected(&other)),
        })
    }

    /// The session that leases.
    fn loader(&self, deadline: Deadline) -> Result<&Arc<Connection>> {
        if !self.tiered || self.is_forked() {
            return Ok(&self.reader);
        }
        if let Some(loader) = self.loader.get() {
            return Ok(loader);
        }
        let (loader, welcome) = Connection::open(&self.path, 0, deadline)?;
        if welcome.epoch != self.epoch {
            return Err(Error::unavailable("the store was restarted; connect again"));
        }
        // Of two threads that come here at once, one keeps its session and the other ends its own.
        Ok(self.loader.get_or_init(|| Arc::new(loader)))
    }

    /// Lease `keys`; with `prefix` the leading ones, as soon as so many of them have come.
    fn lease_some(
        &self,
        keys: &[Key],
        caller: Caller<'_>,
        prefix: Option<usize>,
        deadline: Deadline,
    ) -> Result<Vec<Option<Lease>>> {
        let loader = self.loader(deadline)?;
        let (wait_ms, enough) = (deadline.share_ms()?, prefix.unwrap_or(keys.len()) as u32);
        let prefix = prefix.is_some();
        let request = Request::Lease { caller, keys, prefix, wait_ms, enough };
        loader.call(&request, deadline, |reply| {
            let Reply::Leases(entries) = reply else { return Err(unexpected(&reply)) };
            let fits = entries.len() == keys.len() || (prefix && entries.len() < keys.len());
            let entries = entries.iter().map(LeaseEntry::decode);
            if !fits || !entries.clone().all(|entry| self.arena.contains(entry.offset, entry.len)) {
                return Err(Error::protocol("the store leased bytes outside its arena"));
            }
            let lease = |entry: LeaseEntry| {
                let (connection, arena) = (Arc::clone(loader), Arc::clone(&self.arena));
                (entry.len > 0).then(|| Lease::new(connection, arena, entry))
            };
            Ok(entries.map(lease).collect())
        })
    }
}

/// Copy leases into buffers until one is corrupt or of another size, or time is up; how many went.
fn copy_leading(
    leases: &[Lease],
    buffers: &mut [&mut [u8]],
    threads: usize,
    deadline: Deadline,
) -> usize {
    let copy = |(lease, buffer): (&Lease, &mut &mut [u8])| {
        let fits = lease.raw_bytes() == Ok(buffer.len());
        fits && !deadline.passed() && lease.read_into(buffer).is_ok()
    };
    leading(leases.iter().zip(buffers), vec![copy; threads.clamp(1, leases.len().max(1))])
}

fn count(reply: Reply<'_>) -> Result<usize> {
    match reply {
        Reply::Count(count) => Ok(count as usize),
        other => Err(unexpected(&other)),
    }
}

/// A listed block's key and its parent's.
fn link(bytes: &[u8; 2 * KEY_BYTES]) -> (Key, Option<Key>) {
    let (mut key, mut parent) = (NO_KEY, NO_KEY);
    key.copy_from_slice(&bytes[..KEY_BYTES]);
    parent.copy_from_slice(&bytes[KEY_BYTES..]);
    (key, (parent != NO_KEY).then_some(parent))
}

fn checked<'a>(caller: impl Into<Caller<'a>>) -> Result<Caller<'a>> {
    let caller = caller.into();
    if caller.tenant.len() <= MAX_TENANT {
        return Ok(caller);
    }
    Err(Error::refused(format!("a tenant id has at most {MAX_TENANT} bytes")))
}
