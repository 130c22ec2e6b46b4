//! One session with a store: a socket, one call at a time, a deadline on each.
//!
//! After a timeout, an I/O error or a malformed frame the connection is broken for good: a late
//! answer must not be taken for that of another call. The socket is shut down when the last user of
//! the connection lets go, leases included; to the store that is the end of all of them. A forked
//! child can neither use nor end its parent's session.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with, sockopt,
};

use super::deadline::{Deadline, TimedLock};
use crate::error::{Error, Result};
use crate::fdpass::recv_with_fds;
use crate::wire::{self, HEADER_BYTES, Reply, Request};

const FIRST_BUFFER: usize = 16 << 10;

/// How long an answer is looked for before the thread sleeps: on a quiet machine, being woken takes
/// longer than most answers do.
const EAGER: Duration = Duration::from_micros(50);

/// How long a one-way message may wait for room in the socket.
const ONE_WAY: Duration = Duration::from_millis(100);

pub(super) struct Connection {
    socket: UnixStream,
    wire: TimedLock<Wire>,
    broken: AtomicBool,
    owner: u32,
}

/// What a session got with its welcome.
pub(super) struct Welcome {
    pub(super) epoch: u64,
    pub(super) pid: u32,
    pub(super) arena_bytes: u64,
    pub(super) ingest_bytes: u64,
    pub(super) tiers: u8,
    pub(super) fds: Vec<OwnedFd>,
}

struct Wire {
    out: Vec<u8>,
    buffer: Vec<u8>,
    seq: u64,
    receive_timeout: Duration,
}

impl Connection {
    /// Connect and say hello.
    pub(super) fn open(
        path: &Path,
        ingest_bytes: u64,
        deadline: Deadline,
    ) -> Result<(Self, Welcome)> {
        let socket = dial(path, deadline)?;
        let mut wire = Wire {
            out: Vec::with_capacity(FIRST_BUFFER),
            buffer: vec![0; FIRST_BUFFER],
            seq: 0,
            receive_timeout: Duration::ZERO,
        };
        wire.encode(&Request::Hello { ingest_bytes });
        send_by(&socket, &wire.out, deadline)?;
        wire.set_timeout(&socket, deadline)?;
        let (filled, fds) = recv_with_fds(&socket, &mut wire.buffer)?;
        let welcome = match wire.reply(&socket, filled, deadline)? {
            Reply::Welcome { epoch, pid, arena_bytes, ingest_bytes, tiers } => {
                Welcome { epoch, pid, arena_bytes, ingest_bytes, tiers, fds }
            }
            Reply::Failed(error) => return Err(error),
            other => return Err(unexpected(&other)),
        };
        let (broken, owner) = (AtomicBool::new(false), std::process::id());
        Ok((Self { socket, wire: TimedLock::new(wire), broken, owner }, welcome))
    }

    /// Send a request and hand its reply to `take`. A refusal is an error, but breaks nothing.
    pub(super) fn call<T>(
        &self,
        request: &Request<'_>,
        deadline: Deadline,
        take: impl FnOnce(Reply<'_>) -> Result<T>,
    ) -> Result<T> {
        self.call_during(request, || Ok(()), deadline, take)
    }

    /// The same, with `work` done once the request is sent; its errors break the connection.
    pub(super) fn call_during<T>(
        &self,
        request: &Request<'_>,
        work: impl FnOnce() -> Result<()>,
        deadline: Deadline,
        take: impl FnOnce(Reply<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut wire = self.wire.lock(deadline)?;
        self.check_usable()?;
        // Broken unless the whole exchange succeeds.
        self.broken.store(true, Ordering::Relaxed);
        wire.encode(request);
        send_by(&self.socket, &wire.out, deadline)?;
        work()?;
        wire.set_timeout(&self.socket, deadline)?;
        let filled = wire.receive(&self.socket, 0)?;
        match wire.reply(&self.socket, filled, deadline)? {
            Reply::Failed(error) => {
                let usable = error.kind() == crate::error::ErrorKind::Refused;
                self.broken.store(!usable, Ordering::Relaxed);
                Err(error)
            }
            reply => {
                let taken = take(reply)?;
                self.broken.store(false, Ordering::Relaxed);
                Ok(taken)
            }
        }
    }

    /// Send a request whose reply comes with an fd; both.
    pub(super) fn call_for_fd<T>(
        &self,
        request: &Request<'_>,
        deadline: Deadline,
        take: impl FnOnce(Reply<'_>) -> Result<T>,
    ) -> Result<(T, OwnedFd)> {
        let mut wire = self.wire.lock(deadline)?;
        self.check_usable()?;
        self.broken.store(true, Ordering::Relaxed);
        wire.encode(request);
        send_by(&self.socket, &wire.out, deadline)?;
        wire.set_timeout(&self.socket, deadline)?;
        let (filled, fds) = recv_with_fds(&self.socket, &mut wire.buffer)?;
        let taken = take(wire.reply(&self.socket, filled, deadline)?)?;
        let fd = fds.into_iter().next();
        let fd = fd.ok_or_else(|| Error::protocol("the store passed no fd"))?;
        self.broken.store(false, Ordering::Relaxed);
        Ok((taken, fd))
    }

    /// Send a request that has no reply.
    pub(super) fn send(&self, request: &Request<'_>) -> Result<()> {
        let deadline = Deadline::after(ONE_WAY);
        let mut wire = self.wire.lock(deadline)?;
        self.check_usable()?;
        wire.encode(request);
        let sent = send_by(&self.socket, &wire.out, deadline);
        self.broken.store(sent.is_err(), Ordering::Relaxed);
        sent
    }

    /// Whether this is a child of the process that connected.
    pub(super) fn is_forked(&self) -> bool {
        std::process::id() != self.owner
    }

    fn check_usable(&self) -> Result<()> {
        if self.is_forked() {
            return Err(Error::unavailable(
                "this client was connected before a fork; connect again in the child",
            ));
        }
        if self.broken.load(Ordering::Relaxed) {
            return Err(Error::unavailable(
                "this connection ended after an earlier failure; connect again",
            ));
        }
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.is_forked() {
            // Ends the session even if a forked child still holds the socket.
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Wire {
    fn encode(&mut self, request: &Request<'_>) {
        self.out.clear();
        self.seq += 1;
        request.encode(self.seq, &mut self.out);
    }

    fn set_timeout(&mut self, socket: &UnixStream, deadline: Deadline) -> Result<()> {
        // Rounded up to a millisecond, so that calls with the same timeout set it once.
        let left = Duration::from_millis(deadline.left()?.as_millis() as u64 + 1);
        if left != self.receive_timeout {
            sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(left))
                .map_err(|error| Error::io("set a timeout", error))?;
            self.receive_timeout = left;
        }
        Ok(())
    }

    fn receive(&mut self, socket: &UnixStream, filled: usize) -> Result<usize> {
        let begun = Instant::now();
        loop {
            let eager = begun.elapsed() < EAGER;
            let flags = if eager { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
            match recv(socket, &mut self.buffer[filled..], flags) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return Err(hung_up()),
                Ok((received, _)) => return Ok(filled + received),
                Err(Errno::AGAIN) if eager => std::thread::yield_now(),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Error::io("wait for the store", error)),
            }
        }
    }

    /// Complete and decode the reply whose first `filled` bytes are in the buffer.
    fn reply(
        &mut self,
        socket: &UnixStream,
        mut filled: usize,
        deadline: Deadline,
    ) -> Result<Reply<'_>> {
        while wire::split(&self.buffer[..filled])?.is_none() {
            if filled == self.buffer.len() {
                self.buffer.resize(2 * filled, 0);
            }
            self.set_timeout(socket, deadline)?;
            filled = self.receive(socket, filled)?;
        }
        let Some((header, payload)) = wire::split(&self.buffer[..filled])? else {
            return Err(Error::protocol("a frame came apart"));
        };
        let reply = Reply::decode(header.op, payload)?;
        let whole = header.len + HEADER_BYTES == filled;
        // A store that gives up on a session answers with seq 0.
        if whole && (header.seq == self.seq || matches!(reply, Reply::Failed(_))) {
            return Ok(reply);
        }
        Err(Error::protocol("the store answered another question than was asked"))
    }
}

/// What the store should not have answered.
pub(super) fn unexpected(reply: &Reply<'_>) -> Error {
    Error::protocol(format!("the store gave the wrong kind of answer: {reply:?}"))
}

fn hung_up() -> Error {
    Error::unavailable("the store closed the connection; connect again once it is up")
}

fn dial(path: &Path, deadline: Deadline) -> Result<UnixStream> {
    let failed =
        |error: Errno| Error::io(&format!("connect to the store at {}", path.display()), error);
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let flags = SocketFlags::CLOEXEC;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    // Also bounds connect, which blocks while the store's backlog is full.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(deadline.left()?))
        .map_err(failed)?;
    match connect(&socket, &address) {
        Ok(()) => Ok(UnixStream::from(socket)),
        Err(error @ (Errno::NOENT | Errno::CONNREFUSED)) => Err(Error::unavailable(format!(
            "no store answers at {} ({error}); start one (mooncake-serve store --socket {0})",
            path.display()
        ))),
        Err(error) => Err(failed(error)),
    }
}

/// Send everything, or fail at the deadline.
fn send_by(socket: &UnixStream, mut bytes: &[u8], deadline: Deadline) -> Result<()> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let left = Timespec::try_from(deadline.left()?)
                    .map_err(|_| Error::timeout("the deadline is out of range"))?;
                let mut fds = [PollFd::new(socket, PollFlags::OUT)];
                match poll(&mut fds, Some(&left)) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(Error::io("wait for the store", error)),
                }
            }
            // The store hung up; what it said before, if anything, is still there to be received.
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
            Err(error) => return Err(Error::io("send to the store", error)),
        }
    }
    Ok(())
}
