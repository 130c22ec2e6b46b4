//! The thread that stores idle blocks anew in a denser form, within its share of one core.
//!
//! One block at a time, at the lowest priority: the block stays readable throughout (see
//! `index::replace`), and its new container is written straight into the arena, so the thread needs
//! memory for a few planes only. After each block it sleeps as long as its share demands. A block
//! that would not get smaller is left alone for good; a damaged one is dropped.

use std::os::fd::AsFd;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mooncake_codec::{Codec, Decoder, Encoder};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Shared;
use crate::block::{self, Corrupt};
use crate::error::{Error, Result};
use crate::index::{Candidate, Replacement};

/// Pause when there is nothing to do.
const PAUSE: Duration = Duration::from_millis(100);

const LOWEST_PRIORITY: i32 = 19;

/// Start the thread, if the settings ask for one.
pub(super) fn spawn(shared: &Arc<Shared>) -> Result<Option<JoinHandle<()>>> {
    let Some(codec) = shared.codec.when_idle else { return Ok(None) };
    let worker = Worker {
        shared: Arc::clone(shared),
        codec,
        decoder: Decoder::new(),
        encoder: Encoder::new(),
    };
    let spawned = thread::Builder::new()
        .name("store-transcode".to_owned())
        .spawn(move || worker.run())
        .map_err(|error| Error::io("start a thread", error))?;
    Ok(Some(spawned))
}

struct Worker {
    shared: Arc<Shared>,
    codec: Codec,
    decoder: Decoder,
    encoder: Encoder,
}

impl Worker {
    /// Until the server stops or its index is broken.
    fn run(mut self) {
        // On Linux a priority belongs to a thread. Refusal would only make us less polite.
        let _ = rustix::process::setpriority_process(None, LOWEST_PRIORITY);
        let mut cursor = 0;
        let mut pause = Duration::ZERO;
        while self.sleep(pause) {
            let begin = Instant::now();
            match self.step(&mut cursor) {
                Ok(true) => {
                    let share = self.shared.options.transcode_share.clamp(0.001, 1.0);
                    pause = begin.elapsed().mul_f64((1.0 - share) / share);
                }
                Ok(false) => pause = PAUSE,
                Err(_) => return,
            }
        }
    }

    /// Store one block anew; false if there is none to do now.
    fn step(&mut self, cursor: &mut usize) -> Result<bool> {
        let idle = self.shared.options.transcode_idle.as_micros() as u64;
        let Some(since) = self.shared.now().checked_sub(idle) else { return Ok(false) };
        let from = self.shared.codec.on_put as u8;
        let replacement = loop {
            match self.shared.index()?.begin_replace(from, since, cursor) {
                Candidate::Found(replacement) => break replacement,
                Candidate::Searching => {}
                Candidate::Nothing => return Ok(false),
            }
        };
        let recoded = self.recode(&replacement);
        let mut index = self.shared.index()?;
        match recoded {
            Ok(Some(stored)) => {
                index.finish_replace(replacement, stored);
            }
            Ok(None) => index.abandon_replace(replacement),
            Err(Corrupt) => index.drop_corrupt(replacement),
        }
        Ok(true)
    }

    fn recode(
        &mut self,
        replacement: &Replacement,
    ) -> std::result::Result<Option<crate::index::Stored>, Corrupt> {
        let len = replacement.len as usize;
        let (source, target) = (
            self.shared.arena.at(replacement.source, len),
            self.shared.arena.at(replacement.target, len),
        );
        // SAFETY: the old extent is pinned, so nobody writes it; the new one is reserved for us
        // alone. Both are inside the arena, which `at` checked, and do not overlap.
        let (source, target) =
            unsafe { (slice::from_raw_parts(source, len), slice::from_raw_parts_mut(target, len)) };
        block::recode(&mut self.decoder, &mut self.encoder, source, self.codec, target)
    }

    /// False when the server stops meanwhile.
    fn sleep(&self, pause: Duration) -> bool {
        let timeout = Timespec::try_from(pause).ok();
        let mut stop = [PollFd::from_borrowed_fd(self.shared.stop_event.as_fd(), PollFlags::IN)];
        // Interrupted or not, the flag tells.
        let _ = poll(&mut stop, timeout.as_ref());
        !self.shared.stopping.load(Ordering::Acquire)
    }
}
