//! Sending and receiving on the store's sockets: whole frames, no SIGPIPE, fds as SCM_RIGHTS.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, send, sendmsg,
};

use crate::error::{Error, Result};

/// Most fds one message carries: the arena and an ingest buffer.
const MAX_FDS: usize = 2;
const FD_SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Send all of `bytes`, blocking; not for longer at a time than the socket's own timeout, if it has
/// one. Whoever takes nothing for so long breaks the protocol: it may still hold leases.
pub(crate) fn send_all(socket: &UnixStream, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => {
                return Err(Error::unavailable("the client hung up"));
            }
            Err(Errno::AGAIN) => return Err(Error::protocol("a client must take its answers")),
            Err(error) => return Err(Error::io("send to the client", error)),
        }
    }
    Ok(())
}

/// Receive at least one byte, or 0 at the end of the stream.
pub(crate) fn recv_some(socket: &UnixStream, buffer: &mut [u8]) -> Result<usize> {
    loop {
        match recv(socket, &mut *buffer, RecvFlags::empty()) {
            Ok((received, _)) => return Ok(received),
            Err(Errno::INTR) => {}
            Err(error) => return Err(Error::io("wait for the client", error)),
        }
    }
}

/// Send a short message together with fds.
pub(crate) fn send_with_fds(
    socket: &UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); FD_SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Error::protocol("too many fds for one message"));
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) => return send_all(socket, &bytes[sent..]),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(Error::protocol("a client must take its answers")),
            Err(error) => return Err(Error::io("pass shared memory to the client", error)),
        }
    }
}

/// Receive some bytes and the fds that came with them, close-on-exec.
pub(crate) fn recv_with_fds(
    socket: &UnixStream,
    buffer: &mut [u8],
) -> Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); FD_SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // A signal ends the wait of a socket with a timeout, whatever its handler asks for.
    let message = loop {
        let mut parts = [IoSliceMut::new(&mut *buffer)];
        match recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) => break message,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Error::io("wait for the store's welcome", error)),
        }
    };
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = part {
            fds.extend(passed);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Error::unavailable(
            "the store's shared memory did not arrive; raise the fd limit (ulimit -n)",
        ));
    }
    Ok((message.bytes, fds))
}
