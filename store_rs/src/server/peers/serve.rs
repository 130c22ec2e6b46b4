//! Serving peers: each connection has a thread, which sends blocks or the stream of changes.
//!
//! Blocks go as they lie in the arena, encoded, where the fabric can without a copy. So the store
//! leases them for its own sending until the peer has said that they arrived, or the connection ends:
//! a peer never holds a lease, and one that does not take its bytes, or is silent about it, is cut.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::feed::{Batch, Feed};
use super::{Connected, PATIENCE, Peers, Shared, lock};
use crate::cluster::{Load, OURS, PoolPart, Rate};
use crate::error::{Error, Result};
use crate::index::{Hint, Leased, SessionId};
use crate::key::Key;
use crate::peer::{
    Accepting, BlockHead, ENTRY_BYTES, FETCH_MAX, FETCHES_MAX, Link, Message, encode_entry,
    encode_message, send_message, write_all, write_all_of_block,
};
use crate::server::fetch::{self, Wanted};

/// Connections from peers at once: two of each.
const CONNECTIONS_MAX: usize = 2 * super::PEERS_MAX;
/// Blocks brought from disk at once for one connection.
const BROUGHT_MAX: usize = 16;
/// Bytes of a block that are sent with its head.
const FIRST: usize = 16 << 10;
/// Bytes paced at once.
const PACED: usize = 128 << 10;
/// How long a block of this node's own disk may take.
const DISK_WAIT: Duration = Duration::from_millis(500);
/// A silent stream says that it is alive.
const BEAT: Duration = Duration::from_millis(500);
/// A connection without a request ends; the peer connects again when it wants something.
const SILENCE: Duration = Duration::from_secs(600);
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Until the store stops.
pub(super) fn accept(peers: &Arc<Peers>, shared: &Arc<Shared>, listening: &dyn Accepting) {
    let open = Arc::new(AtomicUsize::new(0));
    while !peers.is_stopping() {
        match listening.accept() {
            Ok(link) if open.load(Ordering::Relaxed) < CONNECTIONS_MAX => {
                let guard = Counted::new(&open);
                // Without a thread the link is dropped, and the peer tries again.
                let _ = peers.spawn("store-peer", shared, move |peers, shared| {
                    let _guard = guard;
                    serve(&peers, &shared, link);
                });
            }
            Ok(_) => {}
            Err(_) => thread::sleep(ACCEPT_PAUSE),
        }
    }
}

struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn serve(peers: &Peers, shared: &Arc<Shared>, link: Box<dyn Link>) {
    // Dropped after the link: nothing is sent any more once leases end.
    let mut sent = VecDeque::new();
    let served = peers
        .welcome(shared, link)
        .and_then(|mut connected| converse(peers, shared, &mut connected, &mut sent));
    if served.is_err_and(|error| error.kind() == crate::error::ErrorKind::Protocol) {
        peers.counts.failures.fetch_add(1, Ordering::Relaxed);
    }
}

/// Until the peer hangs up; `sent` is what it has not taken yet.
fn converse<'a>(
    peers: &'a Peers,
    shared: &'a Arc<Shared>,
    to: &mut Connected<'_>,
    sent: &mut VecDeque<Sending<'a>>,
) -> Result<()> {
    loop {
        match to.frames.next(&mut *to.link)? {
            Message::Fetch { keys } => {
                if keys.len() > FETCH_MAX || sent.len() == FETCHES_MAX {
                    return Err(Error::protocol("a peer asked for too much at once"));
                }
                sent.push_back(Sending::new(peers, shared)?);
                let sending = &sent[sent.len() - 1];
                for keys in keys.chunks(BROUGHT_MAX) {
                    sending.send(&mut *to.link, keys)?;
                }
            }
            Message::Taken if sent.pop_front().is_some() => {}
            Message::Subscribe => return stream(peers, shared, to),
            other => return Err(Error::protocol(format!("a peer asked {other:?}"))),
        }
        // Between requests a peer may be silent, but what it asked for it must take.
        let silence = if sent.is_empty() { SILENCE } else { PATIENCE };
        let failed = |error| Error::io("set up a link", error);
        to.link.set_patience(silence, PATIENCE).map_err(failed)?;
    }
}

/// The leases of one request, ended however it ends.
struct Sending<'a> {
    peers: &'a Peers,
    shared: &'a Arc<Shared>,
    session: SessionId,
}

impl<'a> Sending<'a> {
    fn new(peers: &'a Peers, shared: &'a Arc<Shared>) -> Result<Self> {
        let session = shared.index()?.open_session();
        Ok(Self { peers, shared, session })
    }

    fn send(&self, link: &mut dyn Link, keys: &[Key]) -> Result<()> {
        let blocks = self.lease(keys)?;
        let failed = |error| Error::io("send a block to a peer", error);
        let mut frame = Vec::with_capacity(128);
        for (head, leased) in &blocks {
            frame.clear();
            encode_message(&Message::Block(*head), &mut frame);
            let bytes = leased.as_ref().map_or(&[][..], |leased| self.bytes(leased));
            let (first, rest) = bytes.split_at(bytes.len().min(FIRST));
            self.peers.pacer.wait(frame.len() + first.len());
            write_all(link, &mut [IoSlice::new(&frame), IoSlice::new(first)]).map_err(failed)?;
            for part in rest.chunks(if self.peers.pacer.is_on() { PACED } else { usize::MAX }) {
                self.peers.pacer.wait(part.len());
                write_all_of_block(link, part).map_err(failed)?;
            }
            self.peers.counts.sent_blocks.fetch_add(u64::from(head.len > 0), Ordering::Relaxed);
            self.peers.counts.sent_bytes.fetch_add(head.len.into(), Ordering::Relaxed);
        }
        Ok(())
    }

    fn lease(&self, keys: &[Key]) -> Result<Vec<(BlockHead, Option<Leased>)>> {
        let deadline = Instant::now() + DISK_WAIT;
        let (since, enough) = (self.shared.now(), keys.len());
        let wanted =
            Wanted { tenant: "", hint: Hint::NONE, keys, prefix: false, since, enough, deadline };
        fetch::bring_from_node(self.shared, &wanted)?;
        let now = self.shared.now();
        let mut index = self.shared.index()?;
        let lease = |key: &Key| {
            let leased = index.lend(self.session, key, now);
            let parent = index.parent_of(key);
            (BlockHead { key: *key, parent, len: leased.map_or(0, |leased| leased.len) }, leased)
        };
        Ok(keys.iter().map(lease).collect())
    }

    fn bytes(&self, leased: &Leased) -> &[u8] {
        let (len, at) = (leased.len as usize, leased.offset);
        // SAFETY: leased until `self` ends the session, and not written meanwhile; inside the arena.
        unsafe { std::slice::from_raw_parts(self.shared.arena.at(at, len), len) }
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        if let Ok(mut index) = self.shared.index() {
            index.end_session(self.session);
        }
    }
}

/// Everything this store holds, then every change; and of its node's replicas the loads and pools.
fn stream(peers: &Peers, shared: &Shared, to: &mut Connected<'_>) -> Result<()> {
    let (mut feed, mut entries, mut rows) = (Feed::default(), Vec::new(), Vec::new());
    let (mut replicas, mut last) = (Replicas::default(), Instant::now());
    while !peers.is_stopping() {
        let index = feed.wait(shared)?;
        let batch = feed.take(&index, &mut entries);
        drop(index);
        rows.clear();
        rows.extend(entries.iter().map(encode_entry));
        let rows: &[[u8; ENTRY_BYTES]] = &rows;
        let message = match batch {
            Batch::Restart(next) => Some(Message::Snapshot { next }),
            Batch::Held => Some(Message::Held(rows)),
            Batch::Changes(first) => {
                (!rows.is_empty()).then_some(Message::Changes { first, entries: rows })
            }
        };
        let beat = (last.elapsed() > BEAT).then_some(Message::Beat);
        for message in [message, beat].into_iter().flatten() {
            send_message(&mut *to.link, &message)?;
            last = Instant::now();
        }
        if replicas.send(peers, &mut *to.link)? {
            last = Instant::now();
        }
        lock(&peers.sent).insert(to.cutter, feed.position());
    }
    Ok(())
}

/// What a follower has heard of this node's replicas, and of what fetching costs here.
#[derive(Default)]
struct Replicas {
    reported_us: u64,
    pools: Option<u64>,
    rate: Rate,
}

impl Replicas {
    /// Send what is new: loads first, because a pool without one is not known. Whether there was
    /// anything.
    fn send(&mut self, peers: &Peers, link: &mut dyn Link) -> Result<bool> {
        let (loads, parts, rate) = {
            let cluster = peers.cluster();
            let (loads, newest_us) = cluster.loads(OURS, self.reported_us);
            let (parts, next) = cluster.pools_since(self.pools);
            (self.reported_us, self.pools) = (newest_us, Some(next));
            (loads, parts, cluster.fetch_rate(OURS))
        };
        let loads: Vec<_> = loads.iter().map(Load::encode).collect();
        if !loads.is_empty() {
            send_message(link, &Message::Loads(&loads))?;
        }
        for PoolPart { replica, anew, entries } in &parts {
            let entries: Vec<_> = entries.iter().map(encode_entry).collect();
            send_message(link, &Message::Pool { replica, anew: *anew, entries: &entries })?;
        }
        let is_new = rate != self.rate;
        if is_new {
            send_message(link, &Message::Rate(rate.bytes_per_s, rate.latency_s))?;
            self.rate = rate;
        }
        Ok(is_new || !loads.is_empty() || !parts.is_empty())
    }
}
