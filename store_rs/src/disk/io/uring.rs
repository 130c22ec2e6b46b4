//! Reads through io_uring: one system call submits many, and no thread waits for each.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

use super::file::{LogFile, next_start};
use super::{Queue, Read, is_passing};

/// Reads in flight; more wait for their turn.
const DEPTH: u32 = 64;

pub(in crate::disk) struct Uring {
    ring: IoUring,
    file: OwnedFd,
    /// Started, with how many bytes have come.
    flying: HashMap<u64, (Read, usize)>,
    /// Not submitted yet.
    waiting: VecDeque<u64>,
}

impl Uring {
    /// A ring for reads of `file`; an error where the kernel or its seccomp filter refuses.
    pub(in crate::disk) fn new(file: &LogFile) -> io::Result<Self> {
        let ring = IoUring::new(DEPTH)?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let file = file.fd().try_clone_to_owned()?;
        Ok(Self { ring, file, flying: HashMap::new(), waiting: VecDeque::new() })
    }

    /// Hand waiting reads to the kernel as far as the ring has room.
    fn push(&mut self) {
        while let Some(&id) = self.waiting.front() {
            let Some(entry) = self.flying.get(&id).map(|(read, done)| self.entry(read, *done))
            else {
                self.waiting.pop_front();
                continue;
            };
            // SAFETY: the memory is the read's own until `wait` returns its id, and the file is
            // open as long as the ring.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                return;
            }
            self.waiting.pop_front();
        }
    }

    fn entry(&self, read: &Read, done: usize) -> squeue::Entry {
        // SAFETY: `done` is below `len`, the size of the target.
        let target = unsafe { read.target.add(done) };
        // A read longer than this comes back short and goes on.
        let len = (read.len - done).min(1 << 30) as u32;
        opcode::Read::new(types::Fd(self.file.as_raw_fd()), target, len)
            .offset(read.offset + done as u64)
            .build()
            .user_data(read.id)
    }

    fn finish(&mut self, id: u64, result: i32) -> Option<io::Result<()>> {
        let (read, done) = self.flying.get_mut(&id)?;
        let outcome = match result {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            1.. => {
                *done = next_start(*done + result as usize, read.len);
                if *done < read.len {
                    self.waiting.push_front(id);
                    return None;
                }
                Ok(())
            }
            _ => Err(io::Error::from_raw_os_error(-result)),
        };
        if outcome.as_ref().is_err_and(is_passing) {
            self.waiting.push_front(id);
            return None;
        }
        self.flying.remove(&id);
        Some(outcome)
    }
}

impl Queue for Uring {
    unsafe fn start(&mut self, read: Read) {
        self.flying.insert(read.id, (read, 0));
        self.waiting.push_back(read.id);
    }

    fn submit(&mut self) {
        self.push();
        // What the kernel does not take now is submitted with the next wait.
        let _ = self.ring.submit();
    }

    fn wait(&mut self, patience: Duration, ended: &mut Vec<(u64, io::Result<()>)>) {
        self.push();
        let limit = types::Timespec::from(patience);
        let submitted = self.ring.submitter().submit_with_args(
            usize::from(!self.flying.is_empty()),
            &types::SubmitArgs::new().timespec(&limit),
        );
        if let Err(error) = submitted
            && !is_passing(&error)
            && !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EBUSY))
        {
            // The ring is unusable: whatever the kernel has not taken will never end, and what it
            // has taken may still write. Nothing is said to have ended, so no memory is reused.
            std::thread::sleep(patience);
        }
        let results: Vec<_> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (id, result) in results {
            ended.extend(self.finish(id, result).map(|outcome| (id, outcome)));
        }
        self.push();
    }
}
