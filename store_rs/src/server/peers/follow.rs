//! Following one peer: its entries and loads come into the cluster index, and go when it does.
//!
//! A stream that breaks, falls silent or skips a change is ended and begun anew with a snapshot,
//! after a pause that grows with every failure. Meanwhile nothing of the peer counts.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Connected, Peers, Remote, Shared, monotonic_us};
use crate::cluster::{Load, Rate};
use crate::error::{Error, Result};
use crate::index::Entry;
use crate::peer::{Message, decode_entry, send_message};
use crate::server::lock;

const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Until the store stops or the peer is dismissed.
pub(super) fn run(peers: &Peers, shared: &Shared, remote: &Arc<Remote>) {
    let mut failures: u32 = 0;
    while !peers.is_stopping() && !remote.dismissed.load(Ordering::Acquire) {
        match peers.dial(shared, &remote.address) {
            Ok((_, name, _)) if name == peers.settings.node => return,
            Ok((connected, name, _)) => {
                failures = 0;
                follow(peers, shared, remote, connected, &name);
            }
            Err(_) => failures += 1,
        }
        peers.counts.failures.fetch_add(1, Ordering::Relaxed);
        peers.pause(jittered(PAUSE_MAX.min(PAUSE_MIN * 2_u32.pow(failures.min(8))), shared));
    }
}

/// Between half and all of `pause`, so that the followers of a restarted store do not come at once.
fn jittered(pause: Duration, shared: &Shared) -> Duration {
    let share = (shared.epoch ^ shared.now()).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
    pause / 2 + pause / 2 * share as u32 / 1024
}

fn follow(
    peers: &Peers,
    shared: &Shared,
    remote: &Arc<Remote>,
    mut connected: Connected<'_>,
    name: &str,
) {
    let Ok(row) = peers.cluster().join(name) else { return };
    lock(&peers.by_row).insert(row, Arc::clone(remote));
    // However it ends, what the peer had does not count any more.
    let _ = follow_stream(peers, shared, remote, &mut connected, row);
    lock(&peers.by_row).remove(&row);
    peers.cluster().leave(row);
}

fn follow_stream(
    peers: &Peers,
    shared: &Shared,
    remote: &Remote,
    connected: &mut Connected<'_>,
    row: u16,
) -> Result<()> {
    send_message(&mut *connected.link, &Message::Subscribe)?;
    let mut expected = None;
    while !remote.dismissed.load(Ordering::Acquire) {
        let message = connected.frames.next(&mut *connected.link)?;
        remote.heard_us.store(monotonic_us(), Ordering::Relaxed);
        let entries = match message {
            Message::Snapshot { next } => {
                if expected.replace(next).is_some() {
                    peers.counts.resyncs.fetch_add(1, Ordering::Relaxed);
                }
                peers.cluster().clear(row);
                continue;
            }
            Message::Held(entries) => entries,
            Message::Changes { first, entries } => {
                if expected != Some(first) {
                    return Err(Error::protocol("a peer's stream skipped a change"));
                }
                expected = Some(first + entries.len() as u64);
                entries
            }
            Message::Loads(rows) => {
                let mut cluster = peers.cluster();
                for load in rows {
                    cluster.report(row, Load::decode(load), monotonic_us());
                }
                continue;
            }
            Message::Pool { replica, anew, entries } => {
                let entries: Vec<Entry> =
                    entries.iter().map(decode_entry).collect::<Result<_>>()?;
                let now_s = shared.now() / 1_000_000;
                peers.cluster().report_pool(row, replica, anew, &entries, now_s)?;
                continue;
            }
            Message::Rate(bytes_per_s, latency_s) => {
                peers.cluster().report_rate(row, Rate { bytes_per_s, latency_s });
                continue;
            }
            Message::Beat => continue,
            other => return Err(Error::protocol(format!("a stream holds {other:?}"))),
        };
        let entries: Vec<Entry> = entries.iter().map(decode_entry).collect::<Result<_>>()?;
        peers.cluster().apply(row, &entries, shared.now() / 1_000_000)?;
    }
    Ok(())
}
