//! The control thread: accepts clients and learns from the kernel when one dies.
//!
//! It owns the listener and one epoll set of the listener, the stop event and the pidfd of every
//! session. A dead process's socket is shut down, even if a forked child still holds it open, and
//! the session's own thread then ends its leases.

use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::net::sockopt;
use rustix::process::geteuid;

use super::session::Session;
use super::socket::Listener;
use super::{Peer, Shared};
use crate::error::{Error, Result};
use crate::fdpass::send_all;
use crate::index::SessionId;
use crate::wire::Reply;

/// Epoll data of the listener and the stop event; sessions start at 1.
const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;

/// Pause after accept failed for want of fds or memory; sessions go on meanwhile.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long a draining stop waits for clients to take their answers.
const DRAIN_GRACE: Duration = Duration::from_secs(2);

struct Control {
    shared: Arc<Shared>,
    listener: Listener,
    events: OwnedFd,
    sessions: Vec<(SessionId, JoinHandle<()>)>,
}

pub(super) fn spawn(shared: Arc<Shared>, listener: Listener) -> Result<JoinHandle<()>> {
    let failed = |error| Error::io("set up epoll", error);
    let events = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
    let watch = |fd: rustix::fd::BorrowedFd<'_>, data| {
        epoll::add(&events, fd, epoll::EventData::new_u64(data), epoll::EventFlags::IN)
    };
    watch(listener.socket.as_fd(), LISTENER).map_err(failed)?;
    watch(shared.stop_event.as_fd(), STOP).map_err(failed)?;
    let control = Control { shared, listener, events, sessions: Vec::new() };
    spawn_thread("store-control", move || control.run())
}

fn spawn_thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|error| Error::io("start a thread", error))
}

impl Control {
    fn run(mut self) {
        while !self.shared.stopping.load(Ordering::Acquire) {
            let mut space = [MaybeUninit::uninit(); 64];
            let Ok((ready, _)) = epoll::wait(&self.events, &mut space, None) else { continue };
            for event in ready {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    STOP => {}
                    session => self.hang_up(session),
                }
            }
        }
        self.end_sessions();
    }

    fn end_sessions(&mut self) {
        if self.shared.draining.load(Ordering::Acquire) {
            // What has arrived can still be read and answered; nothing new arrives.
            self.shared.hang_up_all(Shutdown::Read);
            let patience = Instant::now() + DRAIN_GRACE;
            while self.sessions.iter().any(|(_, thread)| !thread.is_finished())
                && Instant::now() < patience
            {
                thread::sleep(Duration::from_millis(1));
            }
        }
        self.shared.hang_up_all(Shutdown::Both);
        for (_, thread) in self.sessions.drain(..) {
            // A session that panicked has poisoned the index, which reports it.
            let _ = thread.join();
        }
    }

    /// The process behind a session is dead.
    fn hang_up(&self, session: SessionId) {
        let peer = self.shared.clients().get(&session).cloned();
        let Some(peer) = peer else { return };
        if let Some(pidfd) = &peer.pidfd {
            // Fails only if it was removed before.
            let _ = epoll::delete(&self.events, pidfd);
        }
        // Fails only if it is shut down already.
        let _ = peer.socket.shutdown(Shutdown::Both);
    }

    fn accept(&mut self) {
        self.sessions.retain(|(_, thread)| !thread.is_finished());
        match self.listener.socket.accept() {
            Ok((socket, _)) => {
                if let Err(error) = self.admit(&socket) {
                    let mut frame = Vec::new();
                    Reply::Failed(error).encode(0, &mut frame);
                    // The client learns why, if it still listens.
                    let _ = send_all(&socket, &frame);
                }
            }
            Err(_) => thread::sleep(ACCEPT_PAUSE),
        }
    }

    fn admit(&mut self, socket: &UnixStream) -> Result<()> {
        let credentials = sockopt::socket_peercred(socket)
            .map_err(|error| Error::io("read the client's uid", error))?;
        if credentials.uid != geteuid() {
            return Err(Error::refused("this store serves another user; start one of your own"));
        }
        let limit = self.shared.options.max_sessions;
        if self.shared.clients().len() >= limit {
            return Err(Error::refused(format!(
                "all {limit} sessions are taken; close a client or raise max_sessions"
            )));
        }
        let socket = socket.try_clone().map_err(|error| Error::io("keep a socket", error))?;
        let pidfd = peer_pidfd(&socket)
            .map_err(|error| Error::io("watch a client's process (ulimit -n)", error))?;
        let peer = Arc::new(Peer { pidfd, socket });
        let id = {
            let mut index = self.shared.index()?;
            let id = index.open_session();
            index.identify(id, credentials.pid.as_raw_nonzero().get() as u32);
            id
        };
        self.shared.clients().insert(id, Arc::clone(&peer));
        // From here on the session's drop undoes everything, whatever fails below.
        let session = Session::new(Arc::clone(&self.shared), Arc::clone(&peer), id);
        if let Some(pidfd) = &peer.pidfd {
            let data = epoll::EventData::new_u64(id);
            epoll::add(&self.events, pidfd, data, epoll::EventFlags::IN)
                .map_err(|error| Error::io("watch a client's process", error))?;
        }
        self.sessions.push((id, spawn_thread("store-session", move || session.run())?));
        Ok(())
    }
}

/// A pidfd of the process that connected, from the kernel itself, so that no pid can be reused in
/// between. None before Linux 6.5: then the end of the stream alone tells.
fn peer_pidfd(socket: &UnixStream) -> std::io::Result<Option<OwnedFd>> {
    let mut fd: libc::c_int = -1;
    let mut len = size_of_val(&fd) as libc::socklen_t;
    // SAFETY: `fd` and `len` are valid for writes of the sizes passed.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    if status == 0 && fd >= 0 {
        // SAFETY: the kernel made a new fd that only we know.
        return Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }));
    }
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOPROTOOPT) => Ok(None),
        _ => Err(error),
    }
}
