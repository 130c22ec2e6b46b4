//! One session: reads frames, answers them in order, and returns everything when it ends.
//!
//! Ends by hang-up or death: its leases end. Ends by breaking the protocol while its process
//! lives: what it leased is quarantined until the kernel says that the process is dead. So does a
//! client that asks and does not take the answers: no more than one of them waits here.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mooncake_codec::Encoder;
use rustix::event::{PollFd, PollFlags, poll};

use super::fetch::{self, Wanted};
use super::put::Forecast;
use super::{Peer, Shared};
use crate::arena::Ingest;
use crate::cluster::Load;
use crate::error::{Error, ErrorKind, Result};
use crate::fdpass::{recv_some, send_all, send_with_fds};
use crate::index::SessionId;
use crate::key::{KEY_BYTES, Key, NO_KEY};
use crate::wire::{self, Caller, HEADER_BYTES, LeaseEntry, MAX_ITEMS, Origin, Reply, Request};

const FIRST_BUFFER: usize = 64 << 10;

/// How long a client may take nothing of what it is sent.
const SEND_PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) ingest: Option<Ingest>,
    pub(super) encoder: Encoder,
    pub(super) forecast: Forecast,
    pub(super) id: SessionId,
    peer: Arc<Peer>,
    welcomed: bool,
    /// What the last lease had brought and could not grant yet; the client asks for it again.
    brought: HashMap<Key, Origin>,
}

impl Session {
    pub(super) fn new(shared: Arc<Shared>, peer: Arc<Peer>, id: SessionId) -> Self {
        let (encoder, forecast) = (Encoder::new(), Forecast::default());
        let (welcomed, brought) = (false, HashMap::new());
        Self { shared, peer, id, ingest: None, encoder, forecast, welcomed, brought }
    }

    pub(super) fn run(mut self) {
        if let Err(error) = self.serve()
            && error.kind() == ErrorKind::Protocol
        {
            self.quarantine(error);
        }
    }

    fn serve(&mut self) -> Result<()> {
        let socket = &self.peer.socket;
        socket
            .set_write_timeout(Some(SEND_PATIENCE))
            .map_err(|error| Error::io("set up a session", error))?;
        let mut buffer = vec![0; FIRST_BUFFER];
        let mut filled = 0;
        let mut out = Vec::with_capacity(FIRST_BUFFER);
        loop {
            let received = recv_some(&self.peer.socket, &mut buffer[filled..])?;
            if received == 0 {
                return Ok(());
            }
            filled += received;
            let mut at = 0;
            while let Some((header, payload)) = wire::split(&buffer[at..filled])? {
                at += HEADER_BYTES + header.len;
                self.answer(Request::decode(header.op, payload)?, header.seq, &mut out)?;
                if out.len() >= FIRST_BUFFER {
                    self.send(&mut out)?;
                }
            }
            buffer.copy_within(at..filled, 0);
            filled -= at;
            if filled == buffer.len() {
                // Bounded: `split` refuses a frame above MAX_PAYLOAD, and consumes whole ones.
                buffer.resize(2 * filled, 0);
            }
            self.send(&mut out)?;
        }
    }

    fn send(&self, out: &mut Vec<u8>) -> Result<()> {
        send_all(&self.peer.socket, out)?;
        out.clear();
        Ok(())
    }

    /// Answer one request; only a broken protocol or socket is an error here.
    fn answer(&mut self, request: Request<'_>, seq: u64, out: &mut Vec<u8>) -> Result<()> {
        if let Request::Hello { ingest_bytes } = request {
            return self.welcome(ingest_bytes, seq);
        }
        if !self.welcomed {
            return Err(Error::protocol("the first frame of a session must be hello"));
        }
        let outcome = match request {
            Request::Hello { .. } => Ok(()),
            Request::Release { tokens } => return self.release(tokens),
            Request::Corrupt { token } => {
                self.shared.index()?.report_corrupt(self.id, token);
                return Ok(());
            }
            Request::Load(load) => {
                self.shared.peers.report(Load::decode(load));
                return Ok(());
            }
            Request::Pool { replica, anew, added, removed } => {
                self.shared.report_pool(replica, anew, added, removed);
                return Ok(());
            }
            Request::Cluster => return self.pass_cluster(seq, out),
            Request::Lease { caller, keys, prefix, wait_ms, enough } => {
                let Caller { tenant, hint } = caller;
                let deadline = Instant::now() + Duration::from_millis(wait_ms.into());
                let enough = enough as usize;
                let since = self.shared.now();
                let wanted = Wanted { tenant, hint, keys, prefix, since, enough, deadline };
                self.lease(&wanted, seq, out)
            }
            Request::Match { caller, keys } => {
                let matched = fetch::match_prefix(&self.shared, keys, caller.hint)?;
                Reply::Count(matched as u32).encode(seq, out);
                Ok(())
            }
            Request::Put { caller, shape, items } => {
                self.put(caller, shape, items).map(|done| Reply::PutDone(&done).encode(seq, out))
            }
            Request::Evict { keys } => {
                let evicted = self.shared.index()?.evict(keys);
                Reply::Count(evicted as u32).encode(seq, out);
                Ok(())
            }
            Request::List { from } => self.list(from, seq, out),
            Request::Stats => self.shared.stats().map(|stats| Reply::Stats(stats).encode(seq, out)),
            Request::Drain { limit_ms } => {
                let limit = Duration::from_millis(limit_ms.into());
                let drained = self.shared.drain(limit);
                drained.map(|blocks| Reply::Count(blocks as u32).encode(seq, out))
            }
            Request::Ping => {
                Reply::Pong.encode(seq, out);
                Ok(())
            }
            operators => self.operate(&operators, seq, out),
        };
        match outcome {
            Err(error) if error.kind() == ErrorKind::Protocol => Err(error),
            Err(error) => {
                Reply::Failed(error).encode(seq, out);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn welcome(&mut self, ingest_bytes: u64, seq: u64) -> Result<()> {
        if self.welcomed {
            return Err(Error::protocol("hello twice in one session"));
        }
        let granted = self.shared.take_ingest(ingest_bytes);
        if granted > 0 {
            match Ingest::create(granted as usize) {
                Ok(ingest) => self.ingest = Some(ingest),
                Err(error) => {
                    self.shared.return_ingest(granted);
                    return Err(error);
                }
            }
        }
        self.welcomed = true;
        let mut frame = Vec::new();
        let reply = Reply::Welcome {
            epoch: self.shared.epoch,
            pid: std::process::id(),
            arena_bytes: self.shared.arena.size(),
            ingest_bytes: granted,
            tiers: self.shared.tiers.len() as u8,
        };
        reply.encode(seq, &mut frame);
        let arena = self.shared.arena.fd();
        match &self.ingest {
            Some(ingest) => send_with_fds(&self.peer.socket, &frame, &[arena, ingest.fd()]),
            None => send_with_fds(&self.peer.socket, &frame, &[arena]),
        }
    }

    fn lease(&mut self, wanted: &Wanted<'_>, seq: u64, out: &mut Vec<u8>) -> Result<()> {
        let mut brought = fetch::bring(&self.shared, wanted)?;
        let before = std::mem::take(&mut self.brought);
        brought.extend(wanted.keys.iter().filter_map(|key| before.get_key_value(key)));
        let mut dram_hits = 0;
        let Wanted { keys, prefix, hint, .. } = *wanted;
        let now = self.shared.now();
        let mut entries = Vec::with_capacity(keys.len().min(MAX_ITEMS));
        let mut index = self.shared.index()?;
        let room = index.lease_room(self.id);
        if keys.len() > room {
            return Err(Error::refused(format!(
                "{} leases wanted, {room} left to this session; release some first",
                keys.len()
            )));
        }
        for key in keys {
            match index.lease(self.id, key, hint, now) {
                Some(leased) => {
                    let origin = brought.remove(key).unwrap_or(Origin::Dram);
                    dram_hits += u64::from(origin == Origin::Dram);
                    let (token, offset, len) = (leased.token, leased.offset, leased.len);
                    entries.push(LeaseEntry { token, offset, len, origin }.encode());
                }
                None if prefix => break,
                None => entries.push(LeaseEntry::ABSENT.encode()),
            }
        }
        index.count_dram_hits(dram_hits);
        drop(index);
        self.brought = brought;
        Reply::Leases(&entries).encode(seq, out);
        Ok(())
    }

    fn list(&self, from: u32, seq: u64, out: &mut Vec<u8>) -> Result<()> {
        let (blocks, next) = self.shared.index()?.list(from, MAX_ITEMS);
        let link = |(key, parent): (Key, Option<Key>)| {
            let mut link = [0; 2 * KEY_BYTES];
            link[..KEY_BYTES].copy_from_slice(&key);
            link[KEY_BYTES..].copy_from_slice(&parent.unwrap_or(NO_KEY));
            link
        };
        let items: Vec<_> = blocks.into_iter().map(link).collect();
        Reply::Listed { next: next.unwrap_or(0), items: &items }.encode(seq, out);
        Ok(())
    }

    fn release(&self, tokens: &[[u8; 8]]) -> Result<()> {
        let mut index = self.shared.index()?;
        for token in tokens {
            // A token that is not ours changes nothing; the index counts it.
            index.release(self.id, u64::from_le_bytes(*token));
        }
        Ok(())
    }

    /// The cluster index's fd, after the answers that wait in `out`.
    fn pass_cluster(&self, seq: u64, out: &mut Vec<u8>) -> Result<()> {
        self.send(out)?;
        let mut frame = Vec::new();
        let cluster = self.shared.peers.cluster();
        let (fd, bytes) = cluster.fd();
        Reply::Cluster(bytes).encode(seq, &mut frame);
        send_with_fds(&self.peer.socket, &frame, &[fd])
    }

    /// Tell the client what it did wrong, and keep its leases out of use while it may read them.
    fn quarantine(&self, error: Error) {
        let mut frame = Vec::new();
        Reply::Failed(error).encode(0, &mut frame);
        // It may be gone already; then the waiting below ends at once.
        let _ = send_all(&self.peer.socket, &frame);
        let held = self.shared.index().map_or(0, |mut index| index.quarantine_session(self.id));
        let _ = self.peer.socket.shutdown(std::net::Shutdown::Write);
        if held > 0 {
            self.wait_for_death();
        }
    }

    fn wait_for_death(&self) {
        let Some(pidfd) = &self.peer.pidfd else {
            // Without a pidfd the end of the stream is all the kernel tells.
            let mut ignored = [0; 4096];
            while recv_some(&self.peer.socket, &mut ignored).is_ok_and(|received| received > 0) {}
            return;
        };
        while !self.shared.stopping.load(Ordering::Acquire) {
            let mut fds = [
                PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.shared.stop_event.as_fd(), PollFlags::IN),
            ];
            if poll(&mut fds, None).is_ok() && !fds[0].revents().is_empty() {
                return;
            }
        }
    }
}

impl Drop for Session {
    /// Runs however the session ended, so that nothing it held can leak. The index goes last: once
    /// it counts one session less, everything of that session is back.
    fn drop(&mut self) {
        if let Some(ingest) = self.ingest.take() {
            let granted = ingest.size();
            drop(ingest);
            self.shared.return_ingest(granted);
        }
        self.shared.clients().remove(&self.id);
        if let Ok(mut index) = self.shared.index() {
            index.end_session(self.id);
        }
    }
}
