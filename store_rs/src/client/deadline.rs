//! Deadlines: a moment by which a call must have ended, and a lock that respects it.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// A moment by which a call returns, with an answer or `Timeout`.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Instant);

/// Longer waits are cut to this, which is as good as for ever.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

impl Deadline {
    /// `timeout` from now.
    pub fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout.min(LONGEST))
    }

    /// Time left, or `Timeout`. Never zero, which sockets would take for "no limit".
    pub fn left(&self) -> Result<Duration> {
        match self.0.checked_duration_since(Instant::now()) {
            Some(left) if left > Duration::from_micros(1) => Ok(left),
            _ => Err(Error::timeout(
                "the store did not answer before the deadline; \
                 if it hangs, restart it (mooncake-serve store restart)",
            )),
        }
    }

    /// Most of what is left, in milliseconds: for the other side, so that its answer arrives.
    pub(super) fn share_ms(&self) -> Result<u32> {
        let most = self.left()? * 4 / 5;
        Ok(u32::try_from(most.as_millis()).unwrap_or(u32::MAX))
    }

    /// Whether the moment has passed.
    pub fn passed(&self) -> bool {
        self.left().is_err()
    }
}

/// A mutex whose `lock` gives up at a deadline.
pub(super) struct TimedLock<T> {
    held: Mutex<bool>,
    freed: Condvar,
    value: Mutex<T>,
}

pub(super) struct TimedGuard<'a, T> {
    lock: &'a TimedLock<T>,
    value: std::sync::MutexGuard<'a, T>,
}

impl<T> TimedLock<T> {
    pub(super) fn new(value: T) -> Self {
        Self { held: Mutex::new(false), freed: Condvar::new(), value: Mutex::new(value) }
    }

    pub(super) fn lock(&self, deadline: Deadline) -> Result<TimedGuard<'_, T>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        while *held {
            let waited = self.freed.wait_timeout(held, deadline.left()?);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *held = true;
        drop(held);
        // Uncontended: only the thread that set `held` comes here.
        Ok(TimedGuard {
            lock: self,
            value: self.value.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }
}

impl<T> Deref for TimedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for TimedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for TimedGuard<'_, T> {
    fn drop(&mut self) {
        *self.lock.held.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.lock.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_held_lock_times_out_and_then_frees() {
        let lock = TimedLock::new(1);
        let soon = || Deadline::after(Duration::from_millis(5));
        let held = lock.lock(soon()).expect("free");
        assert_eq!(lock.lock(soon()).err().map(|error| error.kind()), Some(ErrorKind::Timeout));
        drop(held);
        *lock.lock(soon()).expect("free again") += 1;
        assert_eq!(*lock.lock(soon()).expect("free"), 2);
    }
}
