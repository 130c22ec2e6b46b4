//! Room on disk: segments are begun one after another, and given up when all are full.
//!
//! The one that loses least goes; what was read of it is moved to the reserve first.

use std::io;

use super::buffer::Buffer;
use super::health::is_no_space;
use super::stage::record;
use super::writer::Writer;
use crate::block;
use crate::log::{EntryId, PAGE, Place};

/// Most of a segment that is worth moving.
const MOVED_SHARE: u64 = 2;

impl Writer {
    /// A place in the open segment, or in the next one.
    pub(super) fn append(
        &mut self,
        len: u32,
        sum: u32,
        make_room: bool,
    ) -> io::Result<Option<(EntryId, Place, u32)>> {
        for _ in 0..2 {
            {
                let Ok(mut index) = self.shared.index() else { return Ok(None) };
                let Some(log) = index.log_mut() else { return Ok(None) };
                if let Some(placed) = log.append(len, sum) {
                    return Ok(Some(placed));
                }
            }
            self.stage.flush(&*self.io)?;
            if !self.begin_segment(make_room)? {
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Seal the open segment and begin another. False if there is none to be had.
    fn begin_segment(&mut self, make_room: bool) -> io::Result<bool> {
        self.with_log(|log| log.seal());
        // One round to give up a segment, one to begin it.
        for _ in 0..2 {
            if self.begin_candidate(false)? {
                return Ok(true);
            }
            if !make_room || !self.give_up_segment()? {
                return Ok(false);
            }
            if self.with_log(|log| log.open_segment().is_some()) == Some(true) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn begin_candidate(&mut self, reserve: bool) -> io::Result<bool> {
        let planned = self.with_log(|log| {
            let (segment, unborn) = log.candidate(reserve)?;
            let start = log.segment_offset(segment);
            Some((segment, unborn, start, log.directory_offset(segment, 0), log.segment_bytes()))
        });
        let Some(Some((segment, unborn, start, directory, bytes))) = planned else {
            return Ok(false);
        };
        if unborn && let Err(error) = self.io.allocate(start, bytes) {
            if !is_no_space(&error) {
                return Err(error);
            }
            self.health.set_full(true);
            self.with_log(|log| log.limit_to_allocated());
            return self.begin_candidate(reserve);
        }
        self.stage.clear(&*self.io, directory)?;
        self.with_log(|log| log.begin(segment));
        Ok(true)
    }

    /// Free the segment that loses least, moving what is worth it to the reserve.
    fn give_up_segment(&mut self) -> io::Result<bool> {
        let planned = self.shared.index().ok().and_then(|mut index| {
            let log = index.log()?;
            let victim = log.victim()?;
            let (wanted, cold) = (log.entries_of(victim, true), log.entries_of(victim, false));
            let most = log.segment_bytes() / MOVED_SHARE;
            let fits = wanted.iter().scan(0, |sum, &entry| {
                *sum += u64::from(log.place(entry).len);
                Some(*sum <= most)
            });
            let kept = fits.take_while(|fits| *fits).count();
            index.drop_entries(&cold);
            index.drop_entries(&wanted[kept..]);
            // Sessions give up segments, too, where the index is at its limit.
            index.log_mut()?.pin(victim);
            Some((victim, wanted[..kept].to_vec()))
        });
        let Some((victim, wanted)) = planned else { return Ok(false) };
        let moved = self.move_entries(&wanted);
        let Ok(mut index) = self.shared.index() else { return Ok(false) };
        index.log_mut().into_iter().for_each(|log| log.unpin(victim));
        moved?;
        let Some(log) = index.log() else { return Ok(false) };
        let left = [log.entries_of(victim, true), log.entries_of(victim, false)].concat();
        index.drop_entries(&left);
        index.free_segment(victim);
        Ok(true)
    }

    /// Copy blocks to the reserve.
    fn move_entries(&mut self, entries: &[EntryId]) -> io::Result<()> {
        if !entries.is_empty() && self.begin_candidate(true)? {
            for entry in entries {
                self.move_entry(*entry)?;
            }
        }
        Ok(())
    }

    /// Copy one block to the open segment. One that cannot be read stays behind and goes.
    fn move_entry(&mut self, entry: EntryId) -> io::Result<()> {
        let Some((node, header)) = self.shared.index().ok().and_then(|i| i.entry_header(entry))
        else {
            return Ok(());
        };
        let bytes = (header.len as usize).next_multiple_of(PAGE);
        let mut buffer = Buffer::new(bytes);
        let Some(from) = self.with_log(|log| log.offset(&log.place(entry))) else { return Ok(()) };
        if self.io.read_at(from, &mut buffer).is_err() {
            return Ok(());
        }
        let container = &buffer[..header.len as usize];
        if block::sum(container) != header.sum {
            return Ok(());
        }
        let placed = self.with_log(|log| log.append(header.len, header.sum));
        let Some(Some((to, place, slot))) = placed else { return Ok(()) };
        let (offset, page_offset) = self.offsets(&place, slot);
        let record = record(header.key, header.parent, header.tenant, &place, slot);
        let io = &*self.io;
        let written = self
            .stage
            .add(io, offset, container)
            .and_then(|()| self.stage.add_record(io, page_offset, &record))
            .and_then(|()| self.stage.flush(io));
        if let Err(error) = written {
            self.drop_entry(to);
            return Err(error);
        }
        if let Ok(mut index) = self.shared.index() {
            index.moved(node, entry, to);
        }
        Ok(())
    }
}
