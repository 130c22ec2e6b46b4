//! What operators ask of a live store: listings, checks, pins, giving memory back.
//!
//! A check reads a block's bytes under a lease of its own session, outside the lock; a page of
//! blocks an answer, so that no call takes long. A copy that is wrong is dropped, like one that a
//! reader reports.

use super::session::Session;
use crate::block;
use crate::error::{Error, Result};
use crate::index::Listed;
use crate::wire::{LIST_END, LISTED_MAX, ListRow, PIN_HARD, Reply, Request, Verified};

/// Bytes checked before an answer; a little more if the last block is large.
const VERIFY_BYTES: u64 = 128 << 20;
/// Blocks looked at for one answer of a check.
const VERIFY_BLOCKS: usize = 1024;

impl Session {
    /// Answer one of the operators' requests.
    pub(super) fn operate(&self, request: &Request<'_>, seq: u64, out: &mut Vec<u8>) -> Result<()> {
        match *request {
            Request::Rows { from } => {
                let now = self.shared.now();
                let (rows, next) = self.shared.index()?.rows(from, LISTED_MAX, now);
                let rows: Vec<_> = rows.iter().map(|row| encode(row).encode()).collect();
                Reply::Listing { next: next.unwrap_or(LIST_END), rows: &rows }.encode(seq, out);
            }
            Request::Verify { from } => {
                let (next, done) = self.verify(from)?;
                Reply::Verified { next, done }.encode(seq, out);
            }
            Request::Pin { seconds, keys } => {
                let until = self.shared.now() + u64::from(seconds) * 1_000_000;
                let mut index = self.shared.index()?;
                let pinned = match seconds {
                    0 => index.unpin(keys),
                    PIN_HARD => index.pin(keys, None),
                    _ => index.pin(keys, Some(until)),
                };
                Reply::Count(pinned as u32).encode(seq, out);
            }
            Request::Cool => {
                let cooled = self.shared.index()?.cool();
                Reply::Count(cooled as u32).encode(seq, out);
            }
            _ => return Err(Error::protocol("not a request that this store answers")),
        }
        Ok(())
    }

    fn verify(&self, from: u32) -> Result<(u32, Verified)> {
        let now = self.shared.now();
        let mut done = Verified::default();
        let mut at = from;
        loop {
            let (rows, next) = self.shared.index()?.rows(at, 1, now);
            for row in &rows {
                self.verify_dram(row, &mut done)?;
                self.verify_disk(row, &mut done)?;
            }
            let Some(next) = next else { return Ok((LIST_END, done)) };
            at = next;
            if done.bytes >= VERIFY_BYTES || (at - from) as usize >= VERIFY_BLOCKS {
                return Ok((at, done));
            }
        }
    }

    fn verify_dram(&self, row: &Listed, done: &mut Verified) -> Result<()> {
        let now = self.shared.now();
        let leased = self.shared.index()?.lend(self.id, &row.key, now);
        let Some(leased) = leased else { return Ok(()) };
        let at = self.shared.arena.at(leased.offset, leased.len as usize);
        // SAFETY: leased until the release below, so nobody writes it.
        let container = unsafe { std::slice::from_raw_parts(at, leased.len as usize) };
        let good = block::verify(container).is_ok();
        let mut index = self.shared.index()?;
        if !good {
            index.report_corrupt(self.id, leased.token);
        }
        index.release(self.id, leased.token);
        done.count(leased.len, good);
        Ok(())
    }

    fn verify_disk(&self, row: &Listed, done: &mut Verified) -> Result<()> {
        let Some(disk) = &self.shared.disk else { return Ok(()) };
        if let Some((len, good)) = disk.verify(&self.shared, &row.key)? {
            done.count(len, good);
        }
        Ok(())
    }
}

impl Verified {
    fn count(&mut self, len: u32, good: bool) {
        self.checked += 1;
        self.corrupt += u32::from(!good);
        self.bytes += u64::from(len);
    }
}

fn encode(row: &Listed) -> ListRow {
    let Listed { key, dram_bytes, disk_bytes, leases, idle_us, tenant, pinned } = *row;
    ListRow { key, dram_bytes, disk_bytes, leases, tenant, idle_us, pinned }
}
