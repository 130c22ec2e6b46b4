//! Blocks over a transfer engine, here one that copies within the process.

use std::io;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::peer::{Engine, Fabric};

/// Reads memory of this process; breaks when told.
struct Copying(Arc<Faults>);

#[derive(Default)]
struct Faults {
    fails: AtomicBool,
    damages: AtomicBool,
    reads: AtomicU64,
}

impl Engine for Copying {
    fn session(&self) -> &'static str {
        "here"
    }

    fn register(&self, _start: usize, _len: usize) -> io::Result<()> {
        Ok(())
    }

    fn read(
        &self,
        session: &str,
        source: u64,
        target: usize,
        len: usize,
        _patience: Duration,
    ) -> io::Result<()> {
        assert_eq!(session, "here");
        self.0.reads.fetch_add(1, Ordering::Relaxed);
        if self.0.fails.load(Ordering::Acquire) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (source, target) = (source as usize as *const u8, target as *mut u8);
        // SAFETY: both are buffers that stay mapped; the sender waits until this one was taken.
        unsafe { std::ptr::copy_nonoverlapping(source, target, len) };
        if self.0.damages.load(Ordering::Acquire) {
            // SAFETY: as above.
            unsafe { *target ^= 1 };
        }
        Ok(())
    }
}

fn over_engine(name: &str) -> (Node, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let engine = Box::new(Copying(Arc::clone(&faults)));
    let fabric = Fabric::new(&settings(name), engine).expect("settings");
    (node_over(settings(name), Some(Box::new(fabric))).expect("starts"), faults)
}

#[test]
fn blocks_cross_an_engine_and_frames_do_not() {
    let ((a, _), (b, faults)) = (over_engine("a"), over_engine("b"));
    let chain = keys(20, 40);
    a.put(&chain);
    b.meet(&[&a]);
    until("b knows a's blocks", || b.matches(&chain) == 40);
    assert_eq!(faults.reads.load(Ordering::Relaxed), 0);
    assert_eq!(b.read(&chain, SOON), 40);
    assert!(faults.reads.load(Ordering::Relaxed) >= 40);
    assert_eq!((b.value("peer_fetched_blocks"), b.value("reserved_bytes")), (40, 0));
    until("a's leases have ended", || a.value("leases") == 0);
}

#[test]
fn an_engine_that_fails_or_damages_is_a_miss() {
    let ((a, _), (b, faults)) = (over_engine("a"), over_engine("b"));
    let chain = keys(21, 4);
    a.put(&chain);
    b.meet(&[&a]);
    for fault in [&faults.fails, &faults.damages] {
        until("b knows a's blocks", || b.matches(&chain) == 4);
        fault.store(true, Ordering::Release);
        assert_eq!(b.read(&chain, SOON), 0);
        fault.store(false, Ordering::Release);
        assert_eq!((b.value("blocks"), b.value("reserved_bytes")), (0, 0));
        until("b asks a again", || b.read(&chain, SOON) == 4);
        b.client.evict(&chain, soon()).expect("evicts");
    }
}

#[test]
fn a_store_without_an_engine_and_one_with_it_do_not_meet() {
    let (a, (b, _)) = (node("a"), over_engine("b"));
    a.meet(&[&b]);
    b.meet(&[&a]);
    until("both have tried", || a.value("peer_failures") > 0 && b.value("peer_failures") > 0);
    assert_eq!((a.value("peers_connected"), b.value("peers_connected")), (0, 0));
}

#[test]
fn tls_is_refused_where_it_would_not_cover_the_blocks() {
    let mut settings = settings("a");
    let file = || "/nowhere".into();
    let name = "mooncake-peer".to_owned();
    settings.tls =
        Some(crate::peer::TlsFiles { ca: file(), certificate: file(), key: file(), name });
    let refused = Fabric::new(&settings, Box::new(Copying(Arc::default())));
    assert!(refused.is_err_and(|error| error.message().contains("token_file")));
}
