//! What the replicas are busy with, as one router knows it.
//!
//! Owns: the newest load row of each replica and this router's own reservations that no row shows
//! yet. A reservation is made in the same step as the decision, so the next request of a burst sees
//! it; it ends when a row arrives that was taken `grace_s` or more after it, or by `cancel`.
//! Between rows a queue drains at one second a second.

use super::{Load, Plan};

/// What a replica says about itself.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// When the row was taken or, on another host's clock, received.
    pub at_s: f64,
    /// Its load at that time.
    pub load: Load,
}

#[derive(Clone, Copy, Debug)]
struct Reservation {
    request: u64,
    replica: usize,
    at_s: f64,
    seconds: f64,
    tokens: u64,
    blocks: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Ledger {
    rows: Vec<Row>,
    reservations: Vec<Reservation>,
    grace_s: f64,
}

impl Ledger {
    pub(super) fn new(grace_s: f64) -> Self {
        Self { rows: Vec::new(), reservations: Vec::new(), grace_s }
    }

    pub(super) fn reported_s(&self, replica: usize) -> f64 {
        self.rows.get(replica).map_or(f64::NEG_INFINITY, |row| row.at_s)
    }

    /// Take a newer row; replicas beyond the known ones are added, not accepting until they report.
    pub(super) fn report(&mut self, replica: usize, row: Row) {
        if replica >= self.rows.len() {
            let silent = Row { at_s: f64::NEG_INFINITY, load: Load::default() };
            self.rows.resize(replica + 1, silent);
        }
        if row.at_s < self.rows[replica].at_s {
            return;
        }
        self.rows[replica] = row;
        let grace_s = self.grace_s;
        self.reservations.retain(|held| held.replica != replica || held.at_s + grace_s > row.at_s);
    }

    /// Count `request` on the planned replica until a row shows it.
    pub(super) fn reserve(
        &mut self,
        request: u64,
        plan: &Plan,
        tokens: u32,
        blocks: usize,
        now_s: f64,
    ) {
        self.reservations.push(Reservation {
            request,
            replica: plan.replica,
            at_s: now_s,
            seconds: plan.reuse.total_s(),
            tokens: u64::from(tokens),
            blocks: blocks as u64,
        });
    }

    /// The request failed or went elsewhere.
    pub(super) fn cancel(&mut self, request: u64) {
        self.reservations.retain(|held| held.request != request);
    }

    /// The loads at `now_s`, into `out`.
    pub(super) fn loads(&self, now_s: f64, out: &mut Vec<Load>) {
        out.clear();
        out.extend(self.rows.iter().map(|row| {
            let drained = (now_s - row.at_s).max(0.0);
            Load { queue_s: (row.load.queue_s - drained).max(0.0), ..row.load }
        }));
        for held in &self.reservations {
            let load = &mut out[held.replica];
            load.queue_s += held.seconds;
            load.prefill_tokens += held.tokens;
            load.waiting += 1;
            load.requests += 1;
            load.active_blocks += held.blocks;
        }
    }
}
