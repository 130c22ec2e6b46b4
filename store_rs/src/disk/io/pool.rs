//! Reads on threads: for kernels and containers that refuse io_uring.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::{Io, Queue, Read};

/// Reads at once.
const THREADS: usize = 8;

pub(in crate::disk) struct Pool {
    jobs: Sender<Read>,
    ended: Receiver<(u64, io::Result<()>)>,
}

impl Pool {
    pub(in crate::disk) fn new(io: &Arc<dyn Io>) -> io::Result<Self> {
        let (jobs, waiting) = channel::<Read>();
        let (report, ended) = channel();
        let waiting = Arc::new(Mutex::new(waiting));
        for _ in 0..THREADS {
            let (io, waiting, report) = (Arc::clone(io), Arc::clone(&waiting), report.clone());
            thread::Builder::new().name("store-disk-read".to_owned()).spawn(move || {
                loop {
                    let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    // The queue is gone, and with it whoever would read this.
                    let Ok(read) = next else { return };
                    // SAFETY: whoever started the read gave this memory to it alone.
                    let target = unsafe { std::slice::from_raw_parts_mut(read.target, read.len) };
                    if report.send((read.id, io.read_at(read.offset, target))).is_err() {
                        return;
                    }
                }
            })?;
        }
        Ok(Self { jobs, ended })
    }
}

impl Queue for Pool {
    unsafe fn start(&mut self, read: Read) {
        // The threads live as long as the queue.
        let _ = self.jobs.send(read);
    }

    fn wait(&mut self, patience: Duration, ended: &mut Vec<(u64, io::Result<()>)>) {
        ended.extend(self.ended.recv_timeout(patience).ok());
        ended.extend(self.ended.try_iter());
    }
}
