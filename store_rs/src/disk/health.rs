//! Whether the disk can be used, as the threads of the tier find out.
//!
//! A failed write, a few failed reads in a row, or a read that does not end switch the tier off: the index then answers as
//! if nothing were on disk, and serving goes on from DRAM. Probes by the writer switch it on again.
//! A disk without space is no failure: the log goes on with what it has.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::latency::Latency;

/// Failed reads in a row that are no longer the fault of one place.
const READS_FAILED_MAX: u64 = 3;

#[derive(Default)]
pub(super) struct Health {
    off: AtomicBool,
    full: AtomicBool,
    reads_failed_in_a_row: AtomicU64,
    pub(super) read_errors: AtomicU64,
    pub(super) write_errors: AtomicU64,
    pub(super) bytes_read: AtomicU64,
    pub(super) bytes_written: AtomicU64,
    switched_off: AtomicU64,
    /// Of reads that ended well, from the order to the last byte.
    read_time: Latency,
}

impl Health {
    /// A read ended well.
    pub(super) fn read(&self, bytes: u64, took: Duration) {
        self.read_time.record(took);
        self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
        self.reads_failed_in_a_row.store(0, Ordering::Relaxed);
    }

    /// A read failed. True if that switches the tier off.
    pub(super) fn read_failed(&self) -> bool {
        self.read_errors.fetch_add(1, Ordering::Relaxed);
        let failed = self.reads_failed_in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        failed >= READS_FAILED_MAX && self.switch_off()
    }

    /// A write failed. True if that switches the tier off.
    pub(super) fn write_failed(&self) -> bool {
        self.write_errors.fetch_add(1, Ordering::Relaxed);
        self.switch_off()
    }

    /// Reads do not end.
    pub(super) fn hangs(&self) {
        self.switch_off();
    }

    /// A probe succeeded.
    pub(super) fn switch_on(&self) {
        self.reads_failed_in_a_row.store(0, Ordering::Relaxed);
        self.off.store(false, Ordering::Release);
    }

    pub(super) fn is_off(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }

    /// The disk gave no more space, or does again.
    pub(super) fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::Relaxed);
    }

    pub(super) fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    pub(super) fn values(&self) -> Vec<(String, u64)> {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut values = self.read_time.values("nvme_read");
        let own = [
            ("nvme_serving", u64::from(!self.is_off())),
            ("nvme_alert", u64::from(self.is_off() || self.is_full())),
            ("nvme_full", u64::from(self.is_full())),
            ("nvme_switched_off", count(&self.switched_off)),
            ("nvme_read_errors", count(&self.read_errors)),
            ("nvme_write_errors", count(&self.write_errors)),
            ("nvme_read_bytes", count(&self.bytes_read)),
            ("nvme_written_bytes", count(&self.bytes_written)),
        ];
        values.extend(own.map(|(name, value)| (name.to_owned(), value)));
        values
    }

    fn switch_off(&self) -> bool {
        let was_on = !self.off.swap(true, Ordering::AcqRel);
        self.switched_off.fetch_add(u64::from(was_on), Ordering::Relaxed);
        was_on
    }
}

/// Whether an error says that there is no space, rather than that the disk fails.
pub(super) fn is_no_space(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
}
