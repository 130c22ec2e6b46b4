//! What clients ask: one variant per call of the store.

use super::{Cursor, LOAD_BYTES, MAX_ITEMS, frame, put_text};
use crate::error::{Error, Result};
use crate::index::Hint;
use crate::key::{KEY_BYTES, Key, NO_KEY};

const HELLO: u8 = 1;
const MATCH: u8 = 2;
const LEASE: u8 = 3;
const RELEASE: u8 = 4;
const CORRUPT: u8 = 5;
const PUT: u8 = 6;
const EVICT: u8 = 7;
const STATS: u8 = 8;
const PING: u8 = 9;
const LIST: u8 = 0x20;
const CLUSTER: u8 = 0x40;
const LOAD: u8 = 0x41;
const POOL: u8 = 0x42;
/// From here on: for operators.
const DRAIN: u8 = 0x30;
const ROWS: u8 = 0x31;
const VERIFY: u8 = 0x32;
const PIN: u8 = 0x33;
const COOL: u8 = 0x34;

/// As `seconds` of [`Request::Pin`]: until it is unpinned.
pub const PIN_HARD: u32 = u32::MAX;

/// Bytes of one put item: key, parent, ingest offset.
const ITEM_BYTES: usize = 2 * KEY_BYTES + 8;

/// The shape of a block: `planes` independent planes of `tokens × channels` elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// The codec's number of the element type.
    pub dtype: u8,
    /// Planes.
    pub planes: u32,
    /// Rows of a plane.
    pub tokens: u32,
    /// Elements of a row.
    pub channels: u32,
}

/// Who asks, and what is known of the next use of the blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Caller<'a> {
    /// The tenant.
    pub tenant: &'a str,
    /// See [`Hint`].
    pub hint: Hint,
}

/// One block of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PutItem {
    /// The block's key.
    pub key: Key,
    /// The key before it in the chain; None for the first block.
    pub parent: Option<Key>,
    /// Where in the session's ingest buffer the raw bytes start.
    pub offset: u64,
}

/// A call. Slices borrow from the frame, so that decoding allocates nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Request<'a> {
    /// First frame of a session; `ingest_bytes` 0 asks for no put buffer.
    Hello {
        /// Size of the put buffer asked for.
        ingest_bytes: u64,
    },
    /// Longest run of present blocks.
    Match {
        /// Who asks.
        caller: Caller<'a>,
        /// The chain, from its first block.
        keys: &'a [Key],
    },
    /// Lease blocks; with `prefix`, stop at the first that is absent.
    Lease {
        /// Who asks.
        caller: Caller<'a>,
        /// Which blocks.
        keys: &'a [Key],
        /// Stop at the first absent one.
        prefix: bool,
        /// How long blocks may take to come from the tiers below DRAM.
        wait_ms: u32,
        /// Of so many, from the first; later ones are begun, and leased if they are there.
        enough: u32,
    },
    /// End leases. No reply.
    Release {
        /// Tokens, 8 bytes each.
        tokens: &'a [[u8; 8]],
    },
    /// The holder of this lease read bytes that do not match their checksum. No reply.
    Corrupt {
        /// The lease.
        token: u64,
    },
    /// Store blocks that lie in the ingest buffer.
    Put {
        /// Whose blocks.
        caller: Caller<'a>,
        /// The shape of all of them.
        shape: BlockShape,
        /// Items, undecoded.
        items: &'a [[u8; ITEM_BYTES]],
    },
    /// Drop blocks.
    Evict {
        /// Which.
        keys: &'a [Key],
    },
    /// What is stored, a piece at a time.
    List {
        /// Where to go on; 0 to begin.
        from: u32,
    },
    /// Counters.
    Stats,
    /// Is the store alive?
    Ping,
    /// Pass the cluster index.
    Cluster,
    /// A replica's load. No reply.
    Load(&'a [u8; LOAD_BYTES]),
    /// What is new in a replica's pool. No reply.
    Pool {
        /// Its name.
        replica: &'a str,
        /// What was said of it before is void.
        anew: bool,
        /// Blocks that came.
        added: &'a [Key],
        /// Blocks that went.
        removed: &'a [Key],
    },
    /// Blocks of every tier from a position on, with all that is known of them.
    Rows {
        /// 0, or where the answer before said to go on.
        from: u32,
    },
    /// Check the bytes of a few blocks from a position on.
    Verify {
        /// 0, or where the answer before said to go on.
        from: u32,
    },
    /// Keep blocks in DRAM.
    Pin {
        /// For how long; 0 ends a pin, [`PIN_HARD`] lasts until then.
        seconds: u32,
        /// Which blocks.
        keys: &'a [Key],
    },
    /// Give back the memory of blocks that are on disk as well.
    Cool,
    /// Write to disk what is in DRAM only.
    Drain {
        /// How long the answer may take.
        limit_ms: u32,
    },
}

impl<'a> From<&'a str> for Caller<'a> {
    fn from(tenant: &'a str) -> Self {
        Self { tenant, hint: Hint::NONE }
    }
}

impl<'a> Caller<'a> {
    fn decode(at: &mut Cursor<'a>) -> Result<Self> {
        let (priority, session_end) = (i8::from_le_bytes(at.array()?), at.u8()? != 0);
        let hint = Hint { priority, session_end, expected_reuse_s: at.u32()? };
        Ok(Self { hint, tenant: at.text()? })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let Hint { priority, session_end, expected_reuse_s } = self.hint;
        out.extend(priority.to_le_bytes());
        out.push(u8::from(session_end));
        out.extend(expected_reuse_s.to_le_bytes());
        put_text(out, self.tenant);
    }
}

impl PutItem {
    /// Decode one item of [`Request::Put`].
    pub fn decode(bytes: &[u8; ITEM_BYTES]) -> Self {
        let mut item = Self { key: NO_KEY, parent: None, offset: 0 };
        let mut parent = NO_KEY;
        let mut offset = [0; 8];
        item.key.copy_from_slice(&bytes[..KEY_BYTES]);
        parent.copy_from_slice(&bytes[KEY_BYTES..2 * KEY_BYTES]);
        offset.copy_from_slice(&bytes[2 * KEY_BYTES..]);
        item.parent = (parent != NO_KEY).then_some(parent);
        item.offset = u64::from_le_bytes(offset);
        item
    }

    /// Encode for [`Request::Put`].
    pub fn encode(&self) -> [u8; ITEM_BYTES] {
        let mut bytes = [0; ITEM_BYTES];
        bytes[..KEY_BYTES].copy_from_slice(&self.key);
        bytes[KEY_BYTES..2 * KEY_BYTES].copy_from_slice(&self.parent.unwrap_or(NO_KEY));
        bytes[2 * KEY_BYTES..].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }
}

impl<'a> Request<'a> {
    /// Decode the payload of a frame with this `op`.
    pub fn decode(op: u8, payload: &'a [u8]) -> Result<Self> {
        let mut at = Cursor::new(payload);
        let request = match op {
            HELLO => Self::Hello { ingest_bytes: at.u64()? },
            MATCH => Self::Match { caller: Caller::decode(&mut at)?, keys: keys(&mut at)? },
            LEASE => {
                let (prefix, wait_ms, enough) = (at.u8()? != 0, at.u32()?, at.u32()?);
                let (caller, keys) = (Caller::decode(&mut at)?, keys(&mut at)?);
                Self::Lease { caller, keys, prefix, wait_ms, enough }
            }
            RELEASE => {
                let count = at.u32()?;
                Self::Release { tokens: at.records(count)? }
            }
            CORRUPT => Self::Corrupt { token: at.u64()? },
            PUT => {
                let dtype = at.u8()?;
                let (planes, tokens, channels) = (at.u32()?, at.u32()?, at.u32()?);
                let caller = Caller::decode(&mut at)?;
                let count = at.u32()?;
                let shape = BlockShape { dtype, planes, tokens, channels };
                Self::Put { caller, shape, items: at.records(count)? }
            }
            EVICT => Self::Evict { keys: keys(&mut at)? },
            STATS => Self::Stats,
            PING => Self::Ping,
            LIST => Self::List { from: at.u32()? },
            CLUSTER => Self::Cluster,
            LOAD => Self::Load(at.chunk()?),
            POOL => Self::Pool {
                anew: at.u8()? != 0,
                replica: at.text()?,
                added: keys(&mut at)?,
                removed: keys(&mut at)?,
            },
            DRAIN => Self::Drain { limit_ms: at.u32()? },
            ROWS => Self::Rows { from: at.u32()? },
            VERIFY => Self::Verify { from: at.u32()? },
            PIN => Self::Pin { seconds: at.u32()?, keys: keys(&mut at)? },
            COOL => Self::Cool,
            _ => return Err(Error::protocol(format!("unknown request {op}"))),
        };
        at.end()?;
        Ok(request)
    }

    /// Append the call as a frame to `out`. At most `MAX_ITEMS` keys, tokens or items.
    pub fn encode(&self, seq: u64, out: &mut Vec<u8>) {
        match *self {
            Self::Hello { ingest_bytes } => {
                frame(out, HELLO, seq, |out| out.extend(ingest_bytes.to_le_bytes()));
            }
            Self::Match { caller, keys } => frame(out, MATCH, seq, |out| {
                caller.encode(out);
                put_records(out, keys);
            }),
            Self::Lease { caller, keys, prefix, wait_ms, enough } => {
                frame(out, LEASE, seq, |out| {
                    out.push(u8::from(prefix));
                    out.extend(wait_ms.to_le_bytes());
                    out.extend(enough.to_le_bytes());
                    caller.encode(out);
                    put_records(out, keys);
                })
            }
            Self::Release { tokens } => frame(out, RELEASE, seq, |out| put_records(out, tokens)),
            Self::Corrupt { token } => {
                frame(out, CORRUPT, seq, |out| out.extend(token.to_le_bytes()));
            }
            Self::Put { caller, shape, items } => frame(out, PUT, seq, |out| {
                out.push(shape.dtype);
                for size in [shape.planes, shape.tokens, shape.channels] {
                    out.extend(size.to_le_bytes());
                }
                caller.encode(out);
                put_records(out, items);
            }),
            Self::Evict { keys } => frame(out, EVICT, seq, |out| put_records(out, keys)),
            Self::Stats => frame(out, STATS, seq, |_| {}),
            Self::Ping => frame(out, PING, seq, |_| {}),
            Self::List { from } => frame(out, LIST, seq, |out| out.extend(from.to_le_bytes())),
            Self::Cluster => frame(out, CLUSTER, seq, |_| {}),
            Self::Load(load) => frame(out, LOAD, seq, |out| out.extend(load)),
            Self::Pool { replica, anew, added, removed } => frame(out, POOL, seq, |out| {
                out.push(u8::from(anew));
                put_text(out, replica);
                put_records(out, added);
                put_records(out, removed);
            }),
            Self::Rows { from } => frame(out, ROWS, seq, |out| out.extend(from.to_le_bytes())),
            Self::Verify { from } => {
                frame(out, VERIFY, seq, |out| out.extend(from.to_le_bytes()));
            }
            Self::Pin { seconds, keys } => frame(out, PIN, seq, |out| {
                out.extend(seconds.to_le_bytes());
                put_records(out, keys);
            }),
            Self::Cool => frame(out, COOL, seq, |_| {}),
            Self::Drain { limit_ms } => {
                frame(out, DRAIN, seq, |out| out.extend(limit_ms.to_le_bytes()));
            }
        }
    }
}

fn keys<'a>(at: &mut Cursor<'a>) -> Result<&'a [Key]> {
    let count = at.u32()?;
    at.records(count)
}

fn put_records<const N: usize>(out: &mut Vec<u8>, records: &[[u8; N]]) {
    debug_assert!(records.len() <= MAX_ITEMS);
    out.extend((records.len() as u32).to_le_bytes());
    out.extend(records.as_flattened());
}
