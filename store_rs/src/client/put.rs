//! Put from the client's side: tell the store, copy blocks into the put buffer, repeat.
//!
//! The store follows while they are copied.
//! A batch larger than the buffer goes in pieces. The buffer is reused from its start, so that what
//! the store reads is still in cache. One put at a time; others wait for their turn or deadline.

use std::path::PathBuf;

use super::connection::{Connection, unexpected};
use super::deadline::{Deadline, TimedLock};
use crate::arena::IngestView;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::wire::{BlockShape, Caller, MAX_ITEMS, PutItem, PutStatus, Reply, Request};

/// Blocks start at multiples of this in the put buffer.
const ALIGN: usize = 64;

/// One block to store.
#[derive(Debug, Clone, Copy)]
pub struct PutBlock<'a> {
    /// Its key.
    pub key: Key,
    /// The key before it in its chain; None for the first.
    pub parent: Option<Key>,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// The session that puts, opened at the first put.
pub(super) struct Writer {
    path: PathBuf,
    ingest_bytes: u64,
    epoch: u64,
    session: TimedLock<Option<Session>>,
}

struct Session {
    connection: Connection,
    ingest: IngestView,
}

impl Writer {
    pub(super) fn new(path: PathBuf, ingest_bytes: u64, epoch: u64) -> Self {
        Self { path, ingest_bytes, epoch, session: TimedLock::new(None) }
    }

    pub(super) fn put(
        &self,
        blocks: &[PutBlock<'_>],
        shape: BlockShape,
        caller: Caller<'_>,
        deadline: Deadline,
    ) -> Result<Vec<PutStatus>> {
        let Some(largest) = blocks.iter().map(|block| block.bytes.len()).max() else {
            return Ok(Vec::new());
        };
        let mut session = self.session.lock(deadline)?;
        let session = match &mut *session {
            Some(session) => session,
            empty => empty.insert(self.open(deadline)?),
        };
        let room = session.ingest.size();
        if largest > room {
            return Err(Error::refused(format!(
                "a block of {largest} bytes exceeds this client's put buffer of {room}; \
                 raise the store's ingest size"
            )));
        }
        let per_piece = (room / largest.next_multiple_of(ALIGN)).clamp(1, MAX_ITEMS);
        let mut statuses = Vec::with_capacity(blocks.len());
        for piece in blocks.chunks(per_piece) {
            statuses.extend(session.put(piece, shape, caller, deadline)?);
        }
        Ok(statuses)
    }

    fn open(&self, deadline: Deadline) -> Result<Session> {
        let (connection, welcome) = Connection::open(&self.path, self.ingest_bytes, deadline)?;
        if welcome.epoch != self.epoch {
            return Err(Error::unavailable("the store was restarted; connect again"));
        }
        if welcome.ingest_bytes == 0 {
            return Err(Error::refused(
                "all memory for put buffers is taken; close a client or raise the store's \
                 ingest_bytes_total",
            ));
        }
        let fd = welcome.fds.into_iter().nth(1);
        let fd = fd.ok_or_else(|| Error::protocol("the store passed no put buffer"))?;
        Ok(Session { connection, ingest: IngestView::open(fd, welcome.ingest_bytes)? })
    }
}

impl Session {
    fn put(
        &self,
        blocks: &[PutBlock<'_>],
        shape: BlockShape,
        caller: Caller<'_>,
        deadline: Deadline,
    ) -> Result<Vec<PutStatus>> {
        let mut items = Vec::with_capacity(blocks.len());
        let mut offset = 0;
        for block in blocks {
            let item = PutItem { key: block.key, parent: block.parent, offset: offset as u64 };
            items.push(item.encode());
            offset = (offset + block.bytes.len()).next_multiple_of(ALIGN);
        }
        let request = Request::Put { caller, shape, items: &items };
        self.ingest.begin();
        let copy = || {
            let mut offset = 0;
            for block in blocks {
                deadline.left()?;
                self.ingest.write(offset as u64, block.bytes);
                offset = (offset + block.bytes.len()).next_multiple_of(ALIGN);
            }
            Ok(())
        };
        self.connection.call_during(&request, copy, deadline, |reply| match reply {
            Reply::PutDone(statuses) if statuses.len() == items.len() => {
                statuses.iter().map(|&status| PutStatus::decode(status)).collect()
            }
            other => Err(unexpected(&other)),
        })
    }
}
