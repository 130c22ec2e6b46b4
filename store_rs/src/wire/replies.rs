//! What the store answers.

use super::stats::StatsReply;
use super::{Cursor, frame, put_text};
use crate::error::{Error, ErrorKind, Result};
use crate::key::{KEY_BYTES, Key};

const WELCOME: u8 = 129;
const COUNT: u8 = 130;
const LEASES: u8 = 131;
const PUT_DONE: u8 = 132;
const STATS: u8 = 133;
const PONG: u8 = 134;
const LISTED: u8 = 0xA0;
const CLUSTER: u8 = 0xc0;
const LISTING: u8 = 0xB0;
const VERIFIED: u8 = 0xB1;
const ERROR: u8 = 255;

const LEASE_BYTES: usize = 24;
/// A block and its parent.
const LINK_BYTES: usize = 2 * KEY_BYTES;
const ROW_BYTES: usize = KEY_BYTES + 32;

/// Most rows of one listing.
pub const LISTED_MAX: usize = 4096;
/// In place of a position: there is no more.
pub const LIST_END: u32 = u32::MAX;

/// Where a leased block was when it was asked for; told for traces, nothing rests on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Origin {
    /// In the arena, or on its way there for somebody else.
    Dram = 0,
    /// On this node's disk.
    Nvme = 1,
    /// On another node.
    Peer = 2,
}

/// One block of a lease reply; `len` 0 means absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseEntry {
    /// Releases the lease.
    pub token: u64,
    /// Where in the arena.
    pub offset: u64,
    /// Bytes of the block's container.
    pub len: u32,
    /// Where it was.
    pub origin: Origin,
}

/// What became of one block of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PutStatus {
    /// Readable from now on.
    Stored = 0,
    /// It was there already.
    Present = 1,
    /// Everything that could make room is being read or written.
    Full = 2,
    /// Larger than the arena.
    TooLarge = 3,
    /// Its parent is not in the store, so no match could reach it.
    ParentAbsent = 4,
    /// Its tenant has all it may have, and none of that can go.
    OverQuota = 5,
}

/// An answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply<'a> {
    /// Answers hello. The arena's fd, and the put buffer's if granted, come with it.
    Welcome {
        /// Differs at every start of a store.
        epoch: u64,
        /// The store's process.
        pid: u32,
        /// Size of the arena.
        arena_bytes: u64,
        /// Size of the put buffer granted; 0 if none.
        ingest_bytes: u64,
        /// Tiers below DRAM: if there are any, a lease may take as long as they do.
        tiers: u8,
    },
    /// Answers match and evict.
    Count(u32),
    /// Answers lease: one entry per key, fewer for a prefix.
    Leases(&'a [[u8; LEASE_BYTES]]),
    /// Answers put: one status per item.
    PutDone(&'a [u8]),
    /// Answers stats.
    Stats(StatsReply),
    /// Answers list.
    Listed {
        /// Where to go on; 0 at the end.
        next: u32,
        /// Key and parent of each block; a parent of zeros for none.
        items: &'a [[u8; LINK_BYTES]],
    },
    /// Answers rows.
    Listing {
        /// Where to go on; [`LIST_END`] if there is no more.
        next: u32,
        /// Rows, undecoded.
        rows: &'a [[u8; ROW_BYTES]],
    },
    /// Answers verify.
    Verified {
        /// Where to go on; [`LIST_END`] if there is no more.
        next: u32,
        /// What was checked.
        done: Verified,
    },
    /// Answers ping.
    Pong,
    /// Answers cluster: the index's size. Its fd comes with it.
    Cluster(u64),
    /// The call failed.
    Failed(Error),
}

/// One block of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListRow {
    /// Its key.
    pub key: Key,
    /// Bytes of its container in DRAM; 0 if it is not there.
    pub dram_bytes: u32,
    /// Bytes of its container on disk; 0 if it is not there.
    pub disk_bytes: u32,
    /// Leases on it.
    pub leases: u32,
    /// Row of its tenant in the statistics.
    pub tenant: u32,
    /// Microseconds since it was last used.
    pub idle_us: u64,
    /// Whether it is pinned.
    pub pinned: bool,
}

/// What a check of blocks found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verified {
    /// Copies that were checked, in DRAM and on disk.
    pub checked: u32,
    /// Copies that were wrong and are dropped.
    pub corrupt: u32,
    /// Bytes that were read for it.
    pub bytes: u64,
}

impl ListRow {
    /// Decode one row of [`Reply::Listing`].
    pub fn decode(bytes: &[u8; ROW_BYTES]) -> Self {
        let half =
            |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[KEY_BYTES + at + i]));
        Self {
            key: std::array::from_fn(|i| bytes[i]),
            dram_bytes: half(0),
            disk_bytes: half(4),
            leases: half(8),
            tenant: half(12),
            idle_us: u64::from(half(16)) | u64::from(half(20)) << 32,
            pinned: half(24) != 0,
        }
    }

    /// Encode for [`Reply::Listing`].
    pub fn encode(&self) -> [u8; ROW_BYTES] {
        let mut bytes = [0; ROW_BYTES];
        bytes[..KEY_BYTES].copy_from_slice(&self.key);
        let idle = [self.idle_us as u32, (self.idle_us >> 32) as u32];
        let words = [self.dram_bytes, self.disk_bytes, self.leases, self.tenant];
        let words = words.into_iter().chain(idle).chain([u32::from(self.pinned)]);
        for (at, word) in bytes[KEY_BYTES..].chunks_exact_mut(4).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

impl Origin {
    /// Its name in metrics and traces.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dram => "dram",
            Self::Nvme => "nvme",
            Self::Peer => "peer",
        }
    }
}

impl LeaseEntry {
    /// What stands for an absent block.
    pub const ABSENT: Self = Self { token: 0, offset: 0, len: 0, origin: Origin::Dram };

    /// Decode one entry of [`Reply::Leases`].
    pub fn decode(bytes: &[u8; LEASE_BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let origin = match bytes[20] {
            1 => Origin::Nvme,
            2 => Origin::Peer,
            _ => Origin::Dram,
        };
        Self { token: word(0), offset: word(8), len: word(16) as u32, origin }
    }

    /// Encode for [`Reply::Leases`].
    pub fn encode(&self) -> [u8; LEASE_BYTES] {
        let mut bytes = [0; LEASE_BYTES];
        bytes[..8].copy_from_slice(&self.token.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.len.to_le_bytes());
        bytes[20] = self.origin as u8;
        bytes
    }
}

impl PutStatus {
    /// Decode one status of [`Reply::PutDone`].
    pub fn decode(byte: u8) -> Result<Self> {
        let all = [
            Self::Stored,
            Self::Present,
            Self::Full,
            Self::TooLarge,
            Self::ParentAbsent,
            Self::OverQuota,
        ];
        let found = all.into_iter().find(|status| *status as u8 == byte);
        found.ok_or_else(|| Error::protocol(format!("unknown put status {byte}")))
    }

    /// What `put` reports to its caller.
    pub fn text(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Present => "present",
            Self::Full => "refused: full; all evictable blocks are leased or being written",
            Self::TooLarge => "refused: too large; the block exceeds the arena",
            Self::ParentAbsent => "refused: parent absent; put the blocks before it first",
            Self::OverQuota => "refused: over quota; the tenant's other blocks are all in use",
        }
    }
}

impl<'a> Reply<'a> {
    /// Decode the payload of a frame with this `op`.
    pub fn decode(op: u8, payload: &'a [u8]) -> Result<Self> {
        let mut at = Cursor::new(payload);
        let reply = match op {
            WELCOME => Self::Welcome {
                epoch: at.u64()?,
                pid: at.u32()?,
                arena_bytes: at.u64()?,
                ingest_bytes: at.u64()?,
                tiers: at.u8()?,
            },
            COUNT => Self::Count(at.u32()?),
            LEASES => {
                let count = at.u32()?;
                Self::Leases(at.records(count)?)
            }
            PUT_DONE => {
                let count = at.u32()?;
                Self::PutDone(at.records::<1>(count)?.as_flattened())
            }
            STATS => Self::Stats(StatsReply::decode(&mut at)?),
            LISTING => {
                let (next, count) = (at.u32()?, at.u32()?);
                Self::Listing { next, rows: at.records(count)? }
            }
            VERIFIED => {
                let next = at.u32()?;
                let done = Verified { checked: at.u32()?, corrupt: at.u32()?, bytes: at.u64()? };
                Self::Verified { next, done }
            }
            PONG => Self::Pong,
            LISTED => {
                let (next, count) = (at.u32()?, at.u32()?);
                Self::Listed { next, items: at.records(count)? }
            }
            CLUSTER => Self::Cluster(at.u64()?),
            ERROR => {
                let kind = match at.u8()? {
                    0 => ErrorKind::Refused,
                    1 => ErrorKind::Protocol,
                    _ => ErrorKind::Unavailable,
                };
                Self::Failed(Error::new(kind, at.text()?))
            }
            _ => return Err(Error::protocol(format!("unknown reply {op}"))),
        };
        at.end()?;
        Ok(reply)
    }

    /// Append the answer as a frame to `out`.
    pub fn encode(&self, seq: u64, out: &mut Vec<u8>) {
        match self {
            Self::Welcome { epoch, pid, arena_bytes, ingest_bytes, tiers } => {
                frame(out, WELCOME, seq, |out| {
                    out.extend(epoch.to_le_bytes());
                    out.extend(pid.to_le_bytes());
                    out.extend(arena_bytes.to_le_bytes());
                    out.extend(ingest_bytes.to_le_bytes());
                    out.push(*tiers);
                });
            }
            Self::Count(count) => frame(out, COUNT, seq, |out| out.extend(count.to_le_bytes())),
            Self::Leases(entries) => frame(out, LEASES, seq, |out| {
                out.extend((entries.len() as u32).to_le_bytes());
                out.extend(entries.as_flattened());
            }),
            Self::PutDone(statuses) => frame(out, PUT_DONE, seq, |out| {
                out.extend((statuses.len() as u32).to_le_bytes());
                out.extend(*statuses);
            }),
            Self::Stats(stats) => frame(out, STATS, seq, |out| stats.encode(out)),
            Self::Listing { next, rows } => frame(out, LISTING, seq, |out| {
                out.extend(next.to_le_bytes());
                out.extend((rows.len() as u32).to_le_bytes());
                out.extend(rows.as_flattened());
            }),
            Self::Verified { next, done } => frame(out, VERIFIED, seq, |out| {
                for word in [*next, done.checked, done.corrupt] {
                    out.extend(word.to_le_bytes());
                }
                out.extend(done.bytes.to_le_bytes());
            }),
            Self::Pong => frame(out, PONG, seq, |_| {}),
            Self::Listed { next, items } => frame(out, LISTED, seq, |out| {
                out.extend(next.to_le_bytes());
                out.extend((items.len() as u32).to_le_bytes());
                out.extend(items.as_flattened());
            }),
            Self::Cluster(bytes) => frame(out, CLUSTER, seq, |out| out.extend(bytes.to_le_bytes())),
            Self::Failed(error) => frame(out, ERROR, seq, |out| {
                out.push(match error.kind() {
                    ErrorKind::Refused | ErrorKind::Config(_) => 0,
                    ErrorKind::Protocol => 1,
                    ErrorKind::Unavailable | ErrorKind::Timeout => 2,
                });
                put_text(out, error.message());
            }),
        }
    }
}
