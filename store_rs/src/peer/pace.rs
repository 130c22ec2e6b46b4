//! A rate limit shared by all connections: each sender waits until its bytes are due.
//!
//! Bytes that were not sent do not add up: after a pause at most `BURST` of the rate goes at once.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// How far behind the clock the schedule may be.
const BURST: Duration = Duration::from_millis(5);

/// See the module.
pub(crate) struct Pacer {
    bytes_per_s: Option<u64>,
    next: Mutex<Instant>,
}

impl Pacer {
    pub(crate) fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s, next: Mutex::new(Instant::now()) }
    }

    /// Whether there is a limit at all.
    pub(crate) fn is_on(&self) -> bool {
        self.bytes_per_s.is_some()
    }

    /// Wait until `bytes` more may be sent.
    pub(crate) fn wait(&self, bytes: usize) {
        let due = self.schedule(bytes, Instant::now());
        if let Some(early) = due.and_then(|due| due.checked_duration_since(Instant::now())) {
            thread::sleep(early);
        }
    }

    /// When `bytes` may go, if asked at `now`; None for at once.
    fn schedule(&self, bytes: usize, now: Instant) -> Option<Instant> {
        let rate = self.bytes_per_s?.max(1);
        let mut next = self.next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let due = (*next).max(now.checked_sub(BURST).unwrap_or(now));
        *next = due + Duration::from_secs_f64(bytes as f64 / rate as f64);
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_due_at_the_rate_and_pauses_are_not_saved_up() {
        let pacer = Pacer::new(Some(1_000_000));
        let start = Instant::now();
        let first = pacer.schedule(100_000, start).expect("paced");
        assert!(first <= start);
        let second = pacer.schedule(100_000, start).expect("paced");
        assert_eq!(second.duration_since(first), Duration::from_millis(100));
        let later = start + Duration::from_secs(60);
        let third = pacer.schedule(1, later).expect("paced");
        assert_eq!(later.duration_since(third), BURST);
        assert_eq!(Pacer::new(None).schedule(1 << 30, start), None);
    }
}
