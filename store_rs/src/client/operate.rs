//! What operators ask of a live store.

use super::connection::{Connection, unexpected};
use super::deadline::Deadline;
use super::{Client, count};
use crate::error::Result;
use crate::key::Key;
use crate::wire::{LIST_END, ListRow, MAX_ITEMS, Reply, Request, Verified};

impl Client {
    /// Have the store write to disk what it holds in DRAM only; how many blocks it wrote. On a
    /// session of its own, since it may take long.
    pub fn drain(&self, deadline: Deadline) -> Result<usize> {
        let (session, _) = Connection::open(&self.path, 0, deadline)?;
        session.call(&Request::Drain { limit_ms: deadline.share_ms()? }, deadline, count)
    }

    /// Every block the store holds.
    pub fn list(&self, deadline: Deadline) -> Result<Vec<ListRow>> {
        let (mut rows, mut from) = (Vec::new(), 0);
        while from != LIST_END {
            from = self.reader.call(&Request::Rows { from }, deadline, |reply| match reply {
                Reply::Listing { next, rows: page } => {
                    rows.extend(page.iter().map(ListRow::decode));
                    Ok(next)
                }
                other => Err(unexpected(&other)),
            })?;
        }
        Ok(rows)
    }

    /// Have the store check every copy of every block; wrong ones are dropped.
    pub fn verify(&self, deadline: Deadline) -> Result<Verified> {
        let (session, _) = Connection::open(&self.path, 0, deadline)?;
        let (mut all, mut from) = (Verified::default(), 0);
        while from != LIST_END {
            from = session.call(&Request::Verify { from }, deadline, |reply| match reply {
                Reply::Verified { next, done } => {
                    all.checked += done.checked;
                    all.corrupt += done.corrupt;
                    all.bytes += done.bytes;
                    Ok(next)
                }
                other => Err(unexpected(&other)),
            })?;
        }
        Ok(all)
    }

    /// Keep blocks in DRAM for `seconds`; 0 ends that, [`crate::wire::PIN_HARD`] lasts until then.
    /// How many it was done for.
    pub fn pin(&self, keys: &[Key], seconds: u32, deadline: Deadline) -> Result<usize> {
        let pin = |keys| self.reader.call(&Request::Pin { seconds, keys }, deadline, count);
        keys.chunks(MAX_ITEMS).map(pin).sum()
    }

    /// Give back the memory of blocks that are on disk as well and that nobody reads; how many.
    pub fn cool(&self, deadline: Deadline) -> Result<usize> {
        // Behind this client's own releases, which nobody confirms: they went the same way.
        self.loader(deadline)?.call(&Request::Cool, deadline, count)
    }
}
