//! Fetching from one peer: a queue of wanted keys, and a thread that has them sent.
//!
//! Requests are pipelined, and blocks received one after another straight into their extents, so
//! what a peer can occupy here is one extent. A key that is on its way already is not asked for
//! again; whoever wants it waits for the first. Whatever fails, everybody who waits is told.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::receive::{self, Received};
use super::{Connected, Peers, Remote, Shared};
use crate::error::{Error, Result};
use crate::key::Key;
use crate::peer::{BlockHead, FETCH_MAX, FETCHES_MAX, Message, send_message};
use crate::server::fetch::{Landing, Wanted};
use crate::server::lock;

/// Keys that may wait for one peer; more are misses.
const QUEUE_MAX: usize = 8192;
/// A connection without work is closed.
const IDLE: Duration = Duration::from_secs(60);
/// How long a peer that failed or sent wrong bytes is not asked.
const PENALTY: Duration = Duration::from_secs(1);
const PENALTY_CORRUPT: Duration = Duration::from_secs(30);

/// How many keys of one lease are still to be heard of.
pub(super) struct Progress {
    left: Mutex<usize>,
    changed: Condvar,
    /// When the lease is answered, whatever is still missing.
    deadline: Instant,
}

impl Progress {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { left: Mutex::default(), changed: Condvar::new(), deadline }
    }

    fn add(&self) {
        *lock(&self.left) += 1;
    }

    fn done(&self) {
        *lock(&self.left) -= 1;
        self.changed.notify_all();
    }

    /// Wait until every key has landed, is landing, or will not come.
    pub(super) fn wait(&self) {
        let mut left = lock(&self.left);
        while *left > 0 {
            let wait = self.deadline.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                return;
            }
            left = match self.changed.wait_timeout(left, wait) {
                Ok((left, _)) => left,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

struct Request {
    keys: Vec<Key>,
    tenant: String,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<Request>,
    /// Who waits for a key that is queued or under way.
    waiting: HashMap<Key, Vec<Arc<Progress>>>,
    /// Until when nothing is taken, after a failure.
    closed_until: Option<Instant>,
    closing: bool,
}

/// The queue of one peer.
#[derive(Default)]
pub(super) struct Fetcher {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Fetcher {
    /// Ask for `keys` on behalf of a lease; `progress` hears of each of them that is asked for.
    pub(super) fn ask(&self, keys: &[Key], wanted: &Wanted<'_>, progress: &Arc<Progress>) {
        let mut queue = lock(&self.queue);
        if queue.closed_until.is_some_and(|until| Instant::now() < until) {
            return;
        }
        let mut fresh = Vec::new();
        for key in keys {
            if queue.waiting.len() == QUEUE_MAX {
                break;
            }
            let waiting = queue.waiting.entry(*key).or_default();
            if waiting.is_empty() {
                fresh.push(*key);
            }
            waiting.push(Arc::clone(progress));
            progress.add();
        }
        for keys in fresh.chunks(FETCH_MAX) {
            let (keys, tenant) = (keys.to_vec(), wanted.tenant.to_owned());
            queue.requests.push_back(Request { keys, tenant });
        }
        drop(queue);
        self.changed.notify_one();
    }

    /// Wait for nothing any more.
    pub(super) fn close(&self) {
        lock(&self.queue).closing = true;
        self.changed.notify_all();
    }

    /// The fate of `key` is known: it has landed, is landing, or does not come.
    fn settle(&self, key: &Key) {
        let waiting = lock(&self.queue).waiting.remove(key);
        for progress in waiting.into_iter().flatten() {
            progress.done();
        }
    }

    /// Tell everybody, and take nothing for a while.
    fn fail_all(&self, penalty: Duration) {
        let waiting = {
            let mut queue = lock(&self.queue);
            queue.requests.clear();
            queue.closed_until = Some(Instant::now() + penalty);
            std::mem::take(&mut queue.waiting)
        };
        for progress in waiting.into_values().flatten() {
            progress.done();
        }
    }

    /// The next keys that a lease still waits for, be it the one that asked first or a later one;
    /// others are settled.
    fn pop(&self) -> Option<Request> {
        loop {
            let mut late = Vec::new();
            let request = {
                let mut queue = lock(&self.queue);
                let mut request = queue.requests.pop_front()?;
                let now = Instant::now();
                request.keys.retain(|key| {
                    let mut waiting = queue.waiting.get(key).into_iter().flatten();
                    let wanted = waiting.any(|progress| now < progress.deadline);
                    if !wanted {
                        late.extend(queue.waiting.remove(key).into_iter().flatten());
                    }
                    wanted
                });
                request
            };
            late.iter().for_each(|progress| progress.done());
            if !request.keys.is_empty() {
                return Some(request);
            }
        }
    }

    /// Whether there is a request, after waiting for one.
    fn wait(&self, limit: Duration) -> bool {
        let mut queue = lock(&self.queue);
        if queue.requests.is_empty() && !queue.closing {
            let waited = self.changed.wait_timeout(queue, limit);
            queue = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        !queue.requests.is_empty()
    }
}

/// Until the store stops or the peer is dismissed.
pub(super) fn run(peers: &Peers, shared: &Arc<Shared>, remote: &Remote) {
    let ended = || peers.is_stopping() || remote.dismissed.load(Ordering::Acquire);
    while !ended() {
        if !remote.fetcher.wait(IDLE) {
            continue;
        }
        let fetched = peers.dial(shared, &remote.address).and_then(|(mut connected, name, _)| {
            Fetching { peers, shared, remote, name, link: &mut connected }.run(&ended)
        });
        let penalty = match fetched {
            Ok(()) => continue,
            Err(error) if error.kind() == crate::error::ErrorKind::Protocol => PENALTY_CORRUPT,
            Err(_) => PENALTY,
        };
        peers.counts.failures.fetch_add(1, Ordering::Relaxed);
        remote.fetcher.fail_all(penalty);
    }
    remote.fetcher.fail_all(PENALTY);
}

struct Fetching<'a, 'b> {
    peers: &'a Peers,
    shared: &'a Arc<Shared>,
    remote: &'a Remote,
    name: String,
    link: &'a mut Connected<'b>,
}

impl Fetching<'_, '_> {
    /// Ok when there was nothing to do for a while.
    fn run(mut self, ended: &dyn Fn() -> bool) -> Result<()> {
        let mut sent: VecDeque<(Request, Instant)> = VecDeque::new();
        while !ended() {
            while sent.len() < FETCHES_MAX
                && let Some(request) = self.remote.fetcher.pop()
            {
                send_message(&mut *self.link.link, &Message::Fetch { keys: &request.keys })?;
                sent.push_back((request, Instant::now()));
            }
            match sent.pop_front() {
                Some((request, at)) => self.receive(&request, at)?,
                None if self.remote.fetcher.wait(IDLE) => {}
                None => return Ok(()),
            }
        }
        Ok(())
    }

    /// All blocks of one request, in order.
    fn receive(&mut self, request: &Request, sent: Instant) -> Result<()> {
        let (mut bytes, mut first) = (0, None);
        let begun = Instant::now();
        for key in &request.keys {
            let Message::Block(head) = self.link.frames.next(&mut *self.link.link)? else {
                return Err(Error::protocol("a peer sent something else than a block"));
            };
            first.get_or_insert_with(|| sent.elapsed());
            if head.key != *key {
                return Err(Error::protocol("a peer sent another block than was asked for"));
            }
            bytes += self.block(&head, &request.tenant, sent)?;
        }
        send_message(&mut *self.link.link, &Message::Taken)?;
        if bytes > 0 {
            let latency_s = first.unwrap_or_default().as_secs_f64();
            let mut cluster = self.peers.cluster();
            cluster.measured(&self.name, bytes, begun.elapsed().as_secs_f64(), latency_s);
        }
        Ok(())
    }

    /// Take one block: how many bytes of KV came with it.
    fn block(&mut self, head: &BlockHead, tenant: &str, sent: Instant) -> Result<u64> {
        let BlockHead { key, parent, len } = head;
        if *len == 0 {
            self.peers.counts.absent_blocks.fetch_add(1, Ordering::Relaxed);
            self.remote.fetcher.settle(key);
            return Ok(0);
        }
        let landing = Landing::reserve(self.shared, tenant, key, parent.as_ref(), *len);
        self.remote.fetcher.settle(key);
        let Some(landing) = landing? else {
            receive::discard(&mut *self.link.link, *len as usize)?;
            return Ok(0);
        };
        // SAFETY: `len` bytes that are ours alone until the landing is published or dropped.
        let target = unsafe { std::slice::from_raw_parts_mut(landing.at(), *len as usize) };
        let Received::Whole(raw) = receive::container(&mut *self.link.link, target)? else {
            self.peers.counts.corrupt_blocks.fetch_add(1, Ordering::Relaxed);
            return Err(Error::protocol("a peer sent wrong bytes; it is not asked for a while"));
        };
        landing.publish(raw)?;
        self.peers.counts.fetch_time.record(sent.elapsed());
        self.peers.counts.fetched_blocks.fetch_add(1, Ordering::Relaxed);
        self.peers.counts.fetched_bytes.fetch_add((*len).into(), Ordering::Relaxed);
        Ok(raw.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Hint;

    fn ask(fetcher: &Fetcher, keys: &[Key], deadline: Instant) -> Arc<Progress> {
        let progress = Arc::new(Progress::new(deadline));
        let (tenant, hint, prefix) = ("", Hint::NONE, false);
        let wanted = Wanted { tenant, hint, keys, prefix, since: 0, enough: keys.len(), deadline };
        fetcher.ask(keys, &wanted, &progress);
        progress
    }

    #[test]
    fn a_key_is_asked_for_as_long_as_anybody_waits_for_it() {
        let fetcher = Fetcher::default();
        let (past, later) = (Instant::now(), Instant::now() + Duration::from_secs(3600));
        let (both, one) = ([1; 32], [2; 32]);
        let first = ask(&fetcher, &[both, one], past);
        let second = ask(&fetcher, &[both], later);
        assert_eq!(fetcher.pop().map(|request| request.keys), Some(vec![both]));
        assert_eq!((*lock(&first.left), *lock(&second.left)), (1, 1), "one key is given up");
        fetcher.settle(&both);
        assert_eq!((*lock(&first.left), *lock(&second.left)), (0, 0));
        assert!(fetcher.pop().is_none());
        let late = ask(&fetcher, &[one], past);
        assert!(fetcher.pop().is_none(), "nobody waits for it");
        assert_eq!(*lock(&late.left), 0);
        assert!(lock(&fetcher.queue).waiting.is_empty());
    }
}
