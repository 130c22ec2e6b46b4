//! What a restart finds: every whole record of every segment, without reading a block.
//!
//! Only the directories are read, a few pages of each segment however large its blocks are. A
//! record counts if its check holds, it names the place it was found at, and it is of its segment's
//! generation; anything else is dropped. What is wrong with a block's bytes shows when it is read.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::buffer::Buffer;
use super::io::Io;
use crate::error::{Error, Result};
use crate::index::Index;
use crate::log::{Found, PAGE, PER_PAGE, RECORD_BYTES, Record};
use crate::progress::{Phase, Progress};

/// Pages of a directory read at once.
const STEP: usize = 4;

/// What a recovery did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Recovered {
    /// Blocks that are in the index again.
    pub(super) blocks: u64,
    /// Whole records of another format or a generation overwritten since, and records the index had
    /// no room for.
    pub(super) ignored: u64,
    /// Bytes read from disk.
    pub(super) read_bytes: u64,
    /// Segments whose directory could not be read.
    pub(super) failed: u64,
}

/// Fill the index's log from disk.
pub(super) fn recover(io: &dyn Io, index: &Mutex<Index>, progress: &Progress) -> Result<Recovered> {
    let mut index = index.lock().map_err(|_| Error::unavailable("the index is broken"))?;
    let mut done = Recovered::default();
    let mut found = BTreeMap::new();
    let segments = index.log().map_or(0, |log| log.segments()) as u32;
    progress.begin(Phase::Recovering, segments.into());
    for segment in 0..segments {
        progress.advance(1);
        let Some(log) = index.log() else { break };
        let last = log.directory_offset(segment, 0);
        let first = log.segment_offset(segment);
        match directory(io, segment, first, last, &mut done) {
            Ok(records) => {
                if let Some(generation) = records.first().map(|record| record.generation) {
                    found.insert((generation, segment), records);
                }
            }
            Err(_) => done.failed += 1,
        }
    }
    // Oldest first, so that of two records of one block the newer counts.
    for record in found.into_values().flatten().filter(|record| record.len > 0) {
        let taken = index.restore(&record);
        done.blocks += u64::from(taken);
        done.ignored += u64::from(!taken);
    }
    Ok(done)
}

/// The records of one segment in the order of their slots, erased ones (of no length) included.
fn directory(
    io: &dyn Io,
    segment: u32,
    first: u64,
    last: u64,
    done: &mut Recovered,
) -> std::io::Result<Vec<Record>> {
    let mut records: Vec<Record> = Vec::new();
    let mut buffer = Buffer::new(STEP * PAGE);
    let mut end = last + PAGE as u64;
    let mut slot = 0;
    while end > first {
        let start = end.saturating_sub((STEP * PAGE) as u64).max(first);
        let bytes = &mut buffer[..(end - start) as usize];
        io.read_at(start, bytes)?;
        done.read_bytes += bytes.len() as u64;
        // Pages of the directory go down, slots within a page go up.
        for page in bytes.rchunks_exact(PAGE) {
            let mut any = false;
            for bytes in page.as_chunks::<RECORD_BYTES>().0 {
                let generation = records.first().map(|record| record.generation);
                match Record::decode(bytes) {
                    Found::Record(record)
                        if (record.segment, record.slot) == (segment, slot)
                            && generation.unwrap_or(record.generation) == record.generation =>
                    {
                        records.push(record);
                        any = true;
                    }
                    Found::Record(_) | Found::OtherFamily => done.ignored += 1,
                    Found::Nothing => {}
                }
                slot += 1;
            }
            if !any {
                return Ok(records);
            }
        }
        end = start;
    }
    debug_assert!(slot as usize >= PER_PAGE);
    Ok(records)
}
