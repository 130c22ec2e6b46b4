//! What blocks cost and save, by element type and codec.
//!
//! For each kind of block, of the bytes in its extents:
//! `logical - codec_saved + metadata + rounding = physical`. A block counts until its bytes are
//! free again, so one that is gone but still read counts too.

use std::collections::HashMap;

use super::put::DOOMED;
use super::{Body, Index};
use crate::alloc::ExtentId;

/// Processes told apart as users of a block; more share a bit, so sharing is rather undercounted.
const USERS: u32 = u16::BITS;
/// Last row of the table of kinds.
const LAST_ROW: u8 = DOOMED - 1;

/// What a container says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Bytes of the container.
    pub len: u32,
    /// How it is stored.
    pub kind: Kind,
}

/// What the containers of one model have in common; numbers are those of the codec's format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Kind {
    /// Element type.
    pub dtype: u8,
    /// What its planes were to be coded with.
    pub codec: u8,
    /// Bytes before the planes.
    pub header: u32,
    /// Bytes of the block it stands for.
    pub raw: u32,
}

/// What all blocks of one element type and codec take up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Element type.
    pub dtype: u8,
    /// Codec.
    pub codec: u8,
    /// Blocks.
    pub blocks: u64,
    /// Bytes of the blocks, uncoded.
    pub logical: u64,
    /// What caches of each process's own would hold besides: a copy for each further process that
    /// put or leased a block.
    pub shared_saved: u64,
    /// Bytes the codec saved.
    pub codec_saved: u64,
    /// Bytes of container headers.
    pub metadata: u64,
    /// Bytes of extents behind the containers.
    pub rounding: u64,
    /// Bytes of extents.
    pub physical: u64,
}

/// Usage of each kind that is in use. A body names its kind by a row, which is reused once nothing is
/// of that kind; so an index entry stays small whatever is known of a kind.
#[derive(Default)]
pub(super) struct Usages {
    rows: Vec<(Kind, Usage)>,
    by_kind: HashMap<Kind, u8>,
    spare: Vec<u8>,
}

impl Usages {
    /// The row of a kind. Kinds beyond 255 in use at once are counted as the last one.
    pub(super) fn row(&mut self, kind: Kind) -> u8 {
        if let Some(&row) = self.by_kind.get(&kind) {
            return row;
        }
        let usage = Usage { dtype: kind.dtype, codec: kind.codec, ..Usage::default() };
        let row = match self.spare.pop() {
            Some(row) => row,
            None if self.rows.len() > usize::from(LAST_ROW) => return LAST_ROW,
            None => {
                self.rows.push((kind, usage));
                (self.rows.len() - 1) as u8
            }
        };
        self.rows[usize::from(row)] = (kind, usage);
        self.by_kind.insert(kind, row);
        row
    }

    pub(super) fn kind(&self, row: u8) -> Kind {
        self.rows[usize::from(row)].0
    }

    /// Count a published body in an extent of `size`.
    pub(super) fn add(&mut self, body: &Body, size: u64) {
        self.change(body, size, |sum, value| *sum += value);
    }

    /// Inverse of `add`.
    pub(super) fn remove(&mut self, body: &Body, size: u64) {
        self.change(body, size, |sum, value| *sum -= value);
    }

    /// Forget the kind of a removed body if it was the last one.
    pub(super) fn forget_unused(&mut self, row: u8) {
        let (kind, usage) = &self.rows[usize::from(row)];
        if usage.blocks == 0 && self.by_kind.remove(kind).is_some() {
            self.spare.push(row);
        }
    }

    /// Bytes of memory in use.
    pub(super) fn memory_bytes(&self) -> u64 {
        let row = size_of::<(Kind, Usage)>() + size_of::<(Kind, u8)>() + size_of::<u8>();
        (self.rows.len() * row) as u64
    }

    fn change(&mut self, body: &Body, size: u64, apply: fn(&mut u64, u64)) {
        let (kind, usage) = &mut self.rows[usize::from(body.kind)];
        let (len, raw) = (u64::from(body.len), u64::from(kind.raw));
        let header = u64::from(kind.header).min(len);
        let others = u64::from(body.users.count_ones().saturating_sub(1));
        apply(&mut usage.blocks, 1);
        apply(&mut usage.logical, raw);
        apply(&mut usage.shared_saved, raw * others);
        apply(&mut usage.codec_saved, raw.saturating_sub(len - header));
        apply(&mut usage.metadata, header);
        apply(&mut usage.rounding, size - len);
        apply(&mut usage.physical, size);
    }

    /// One row per element type and codec in use.
    pub(super) fn totals(&self) -> Vec<Usage> {
        let mut rows: Vec<Usage> = Vec::new();
        for (_, usage) in self.rows.iter().filter(|(_, usage)| usage.blocks > 0) {
            match rows.iter_mut().find(|r| (r.dtype, r.codec) == (usage.dtype, usage.codec)) {
                Some(row) => row.absorb(usage),
                None => rows.push(*usage),
            }
        }
        rows
    }
}

impl Usage {
    /// Add another's figures to this one's.
    pub fn absorb(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.logical += other.logical;
        self.shared_saved += other.shared_saved;
        self.codec_saved += other.codec_saved;
        self.metadata += other.metadata;
        self.rounding += other.rounding;
        self.physical += other.physical;
    }
}

/// The bit that stands for a process.
pub(super) fn user_bit(process: u32) -> u16 {
    1 << (process % USERS)
}

impl Index {
    /// `user` put or leased the block.
    pub(super) fn count_user(&mut self, extent: ExtentId, user: u16) {
        let before = *self.alloc.owner(extent);
        let after = Body { users: before.users | user, ..before };
        if after.users != before.users {
            let size = self.alloc.size(extent);
            self.usages.remove(&before, size);
            self.usages.add(&after, size);
            *self.alloc.owner_mut(extent) = after;
        }
    }
}
