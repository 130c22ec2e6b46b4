//! What is on its way to disk: bytes collected into large writes, then the records that name them.
//!
//! Keeps the order that recovery relies on: bytes before their records. A record whose bytes were
//! not written whole is never written.

use std::io;

use super::buffer::Buffer;
use super::io::Io;
use crate::log::{Log, PAGE, PER_PAGE, Place, RECORD_BYTES, Record};

/// Bytes of one write.
pub(super) const STAGE_BYTES: usize = 4 << 20;

pub(super) struct Stage {
    bytes: Buffer,
    filled: usize,
    /// Where in the file the first of them goes.
    offset: u64,
    directory: Buffer,
    /// Segment and number of the directory's page, if one is being filled.
    page: Option<(u32, u32)>,
    page_offset: u64,
    dirty: bool,
    pub(super) written: u64,
    /// Where the last bytes were written, and how many.
    pub(super) last: (u64, usize),
}

impl Stage {
    pub(super) fn new() -> Self {
        Self {
            bytes: Buffer::new(STAGE_BYTES),
            filled: 0,
            offset: 0,
            directory: Buffer::new(PAGE),
            page: None,
            page_offset: 0,
            dirty: false,
            written: 0,
            last: (0, 0),
        }
    }

    /// Bytes of memory in use.
    pub(super) fn memory_bytes() -> u64 {
        (STAGE_BYTES + 3 * PAGE) as u64
    }

    /// Add a container at its place.
    pub(super) fn add(&mut self, io: &dyn Io, offset: u64, container: &[u8]) -> io::Result<()> {
        if self.filled > 0 && self.offset + self.filled as u64 != offset {
            self.flush_bytes(io)?;
        }
        let mut at = offset;
        for part in container.chunks(STAGE_BYTES) {
            if self.filled + part.len().next_multiple_of(PAGE) > STAGE_BYTES {
                self.flush_bytes(io)?;
            }
            if self.filled == 0 {
                self.offset = at;
            }
            let end = self.filled + part.len();
            self.bytes[self.filled..end].copy_from_slice(part);
            self.filled = end.next_multiple_of(PAGE);
            self.bytes[end..self.filled].fill(0);
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Add the record of a container that was added.
    pub(super) fn add_record(
        &mut self,
        io: &dyn Io,
        page_offset: u64,
        record: &Record,
    ) -> io::Result<()> {
        let page = (record.segment, record.slot / PER_PAGE as u32);
        if self.page != Some(page) {
            self.flush(io)?;
            self.directory.fill(0);
            (self.page, self.page_offset) = (Some(page), page_offset);
        }
        self.put(record);
        self.dirty = true;
        Ok(())
    }

    /// Write everything: bytes, then records.
    pub(super) fn flush(&mut self, io: &dyn Io) -> io::Result<()> {
        self.flush_bytes(io)?;
        if self.dirty {
            io.write_at(self.page_offset, &self.directory)?;
            self.written += PAGE as u64;
            self.dirty = false;
        }
        Ok(())
    }

    /// Forget what was not written.
    pub(super) fn discard(&mut self) {
        (self.filled, self.page, self.dirty) = (0, None, false);
    }

    /// Write a mark over a record, so that a restart does not find it.
    pub(super) fn erase(&mut self, io: &dyn Io, page_offset: u64, mark: &Record) -> io::Result<()> {
        let page = (mark.segment, mark.slot / PER_PAGE as u32);
        if self.page == Some(page) {
            self.put(mark);
            self.dirty = true;
            return self.flush(io);
        }
        let mut other = Buffer::new(PAGE);
        if io.read_at(page_offset, &mut other).is_err() {
            // A restart could not read its records either; written anew, it can be read again.
            other.fill(0);
        }
        let at = mark.slot as usize % PER_PAGE * RECORD_BYTES;
        other[at..at + RECORD_BYTES].copy_from_slice(&mark.encode());
        self.written += PAGE as u64;
        io.write_at(page_offset, &other)
    }

    /// Clear the first page of a segment's directory: from now on it holds nothing.
    pub(super) fn clear(&mut self, io: &dyn Io, page_offset: u64) -> io::Result<()> {
        self.written += PAGE as u64;
        io.write_at(page_offset, &Buffer::new(PAGE))
    }

    fn put(&mut self, record: &Record) {
        let at = record.slot as usize % PER_PAGE * RECORD_BYTES;
        self.directory[at..at + RECORD_BYTES].copy_from_slice(&record.encode());
    }

    fn flush_bytes(&mut self, io: &dyn Io) -> io::Result<()> {
        if self.filled > 0 {
            io.write_at(self.offset, &self.bytes[..self.filled])?;
            self.written += self.filled as u64;
            self.last = (self.offset, self.filled);
            self.filled = 0;
        }
        Ok(())
    }
}

/// The record of a container appended to the log.
pub(super) fn record(
    key: crate::key::Key,
    parent: Option<crate::key::Key>,
    tenant: u64,
    place: &Place,
    slot: u32,
) -> Record {
    let Place { segment, generation, page, len, sum } = *place;
    Record { key, parent, tenant, generation, segment, slot, page, len, sum }
}

/// Where a place and its record are in the file.
pub(super) fn offsets(log: &Log, place: &Place, slot: u32) -> (u64, u64) {
    (log.offset(place), log.directory_offset(place.segment, slot))
}
