//! What two stores say to each other, in the frames of `wire`.
//!
//! A connection is for one thing: `Fetch` asks for blocks, each answered in order by a [`BlockHead`]
//! and, if it is there, `len` bytes of its container; `Taken` says that all of the oldest request's
//! have arrived, so that the sender may let go of them. `Subscribe` asks for the stream of what the
//! other store holds. Every frame is bounded, and so is what follows a head: the reader decides by
//! `len` before it takes a byte.

use std::io::IoSlice;

use super::link::{Link, read_exact, write_all};
use crate::error::{Error, Result};
use crate::index::{Entry, Tier};
use crate::key::{KEY_BYTES, Key, NO_KEY};
use crate::wire::{self, Cursor, HEADER_BYTES, LOAD_BYTES, MAX_ITEMS, frame, put_text};

const HELLO: u8 = 1;
const FETCH: u8 = 2;
const BLOCK: u8 = 3;
const SUBSCRIBE: u8 = 4;
const SNAPSHOT: u8 = 5;
const HELD: u8 = 6;
const CHANGES: u8 = 7;
const LOADS: u8 = 8;
const BEAT: u8 = 9;
const POOL: u8 = 10;
const RATE: u8 = 11;
const TAKEN: u8 = 12;

/// Keys of one `Fetch`.
pub(crate) const FETCH_MAX: usize = 32;
/// Requests that may be under way on one connection.
pub(crate) const FETCHES_MAX: usize = 2;

/// Bytes of an [`Entry`] on the wire.
pub(crate) const ENTRY_BYTES: usize = 12;

/// What leads a block, or says that it is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockHead {
    /// Which block: the key that was asked for.
    pub(crate) key: Key,
    /// The key before it in its chain.
    pub(crate) parent: Option<Key>,
    /// Bytes of its container, which follow; 0 if it is absent.
    pub(crate) len: u32,
}

/// One frame.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Message<'a> {
    /// First in both directions.
    Hello {
        /// The sender's name.
        node: &'a str,
        /// Differs at every start of it.
        epoch: u64,
    },
    /// Send these blocks.
    Fetch {
        /// Which.
        keys: &'a [Key],
    },
    /// See [`BlockHead`].
    Block(BlockHead),
    /// The blocks of the oldest request have arrived.
    Taken,
    /// Send what you hold, and then every change.
    Subscribe,
    /// Forget what you know; all I hold follows, then changes from `next` on.
    Snapshot {
        /// See above.
        next: u64,
    },
    /// Part of a snapshot.
    Held(&'a [[u8; ENTRY_BYTES]]),
    /// Changes in order, the first of them number `first`.
    Changes {
        /// See above.
        first: u64,
        /// [`Entry`]s.
        entries: &'a [[u8; ENTRY_BYTES]],
    },
    /// Load rows of replicas on the sender's node.
    Loads(&'a [[u8; LOAD_BYTES]]),
    /// Nothing changed, but I am here.
    Beat,
    /// What is new in the pool of a replica on the sender's node.
    Pool {
        /// Its name.
        replica: &'a str,
        /// What was said of it before is void.
        anew: bool,
        /// [`Entry`]s.
        entries: &'a [[u8; ENTRY_BYTES]],
    },
    /// What fetching blocks costs the sender: bytes a second and seconds to the first byte.
    Rate(f64, f64),
}

/// An [`Entry`] as it is sent.
pub(crate) fn encode_entry(entry: &Entry) -> [u8; ENTRY_BYTES] {
    let mut bytes = [0; ENTRY_BYTES];
    bytes[..8].copy_from_slice(&entry.fingerprint.to_le_bytes());
    bytes[8..10].copy_from_slice(&entry.check.to_le_bytes());
    bytes[10] = entry.tier as u8;
    bytes
}

/// The entry in these bytes.
pub(crate) fn decode_entry(bytes: &[u8; ENTRY_BYTES]) -> Result<Entry> {
    let [f0, f1, f2, f3, f4, f5, f6, f7, c0, c1, tier, _] = *bytes;
    let fingerprint = u64::from_le_bytes([f0, f1, f2, f3, f4, f5, f6, f7]);
    let tier = Tier::from_u8(tier)
        .ok_or_else(|| Error::protocol(format!("unknown tier {tier} from a peer")))?;
    Ok(Entry { fingerprint, check: u16::from_le_bytes([c0, c1]), tier })
}

impl<'a> Message<'a> {
    pub(crate) fn decode(op: u8, payload: &'a [u8]) -> Result<Self> {
        let mut at = Cursor::new(payload);
        let message = match op {
            HELLO => Self::Hello { epoch: at.u64()?, node: at.text()? },
            FETCH => Self::Fetch { keys: records::<KEY_BYTES>(&mut at)? },
            BLOCK => {
                let (key, parent): (Key, Key) = (at.array()?, at.array()?);
                let parent = (parent != NO_KEY).then_some(parent);
                Self::Block(BlockHead { key, parent, len: at.u32()? })
            }
            TAKEN => Self::Taken,
            SUBSCRIBE => Self::Subscribe,
            SNAPSHOT => Self::Snapshot { next: at.u64()? },
            HELD => Self::Held(records(&mut at)?),
            CHANGES => Self::Changes { first: at.u64()?, entries: records(&mut at)? },
            LOADS => Self::Loads(records(&mut at)?),
            BEAT => Self::Beat,
            POOL => {
                Self::Pool { anew: at.u8()? != 0, replica: at.text()?, entries: records(&mut at)? }
            }
            RATE => Self::Rate(f64::from_bits(at.u64()?), f64::from_bits(at.u64()?)),
            _ => return Err(Error::protocol(format!("unknown message {op} from a peer"))),
        };
        at.end()?;
        Ok(message)
    }
}

fn records<'a, const N: usize>(at: &mut Cursor<'a>) -> Result<&'a [[u8; N]]> {
    let count = at.u32()?;
    at.records(count)
}

/// Append `message` to `out`.
pub(crate) fn encode_message(message: &Message<'_>, out: &mut Vec<u8>) {
    match message {
        Message::Hello { node, epoch } => frame(out, HELLO, 0, |out| {
            out.extend(epoch.to_le_bytes());
            put_text(out, node);
        }),
        Message::Fetch { keys } => frame(out, FETCH, 0, |out| put_records(out, keys)),
        Message::Block(head) => frame(out, BLOCK, 0, |out| {
            out.extend(head.key);
            out.extend(head.parent.unwrap_or(NO_KEY));
            out.extend(head.len.to_le_bytes());
        }),
        Message::Taken => frame(out, TAKEN, 0, |_| {}),
        Message::Subscribe => frame(out, SUBSCRIBE, 0, |_| {}),
        Message::Snapshot { next } => {
            frame(out, SNAPSHOT, 0, |out| out.extend(next.to_le_bytes()));
        }
        Message::Held(entries) => frame(out, HELD, 0, |out| put_records(out, entries)),
        Message::Changes { first, entries } => frame(out, CHANGES, 0, |out| {
            out.extend(first.to_le_bytes());
            put_records(out, entries);
        }),
        Message::Loads(rows) => frame(out, LOADS, 0, |out| put_records(out, rows)),
        Message::Beat => frame(out, BEAT, 0, |_| {}),
        Message::Pool { replica, anew, entries } => frame(out, POOL, 0, |out| {
            out.push(u8::from(*anew));
            put_text(out, replica);
            put_records(out, entries);
        }),
        Message::Rate(bytes_per_s, latency_s) => frame(out, RATE, 0, |out| {
            out.extend(bytes_per_s.to_bits().to_le_bytes());
            out.extend(latency_s.to_bits().to_le_bytes());
        }),
    }
}

fn put_records<const N: usize>(out: &mut Vec<u8>, records: &[[u8; N]]) {
    debug_assert!(records.len() <= MAX_ITEMS);
    out.extend((records.len() as u32).to_le_bytes());
    out.extend(records.as_flattened());
}

/// Reads frames into one buffer that it keeps.
#[derive(Default)]
pub(crate) struct FrameReader {
    buffer: Vec<u8>,
}

impl FrameReader {
    /// The next message. Memory is bounded by the largest frame.
    pub(crate) fn next(&mut self, link: &mut dyn Link) -> Result<Message<'_>> {
        let failed = |error| Error::io("wait for a peer", error);
        let mut head = [0; HEADER_BYTES];
        read_exact(link, &mut head).map_err(failed)?;
        let header = wire::parse_header(&head)?;
        self.buffer.resize(header.len, 0);
        read_exact(link, &mut self.buffer).map_err(failed)?;
        Message::decode(header.op, &self.buffer)
    }
}

/// Send one message.
pub(crate) fn send_message(link: &mut dyn Link, message: &Message<'_>) -> Result<()> {
    let mut out = Vec::new();
    encode_message(message, &mut out);
    write_all(link, &mut [IoSlice::new(&out)]).map_err(|error| Error::io("send to a peer", error))
}
