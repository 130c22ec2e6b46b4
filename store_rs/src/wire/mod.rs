//! Frames: length-prefixed, versioned, bounded, fixed-size binary.
//!
//! A frame is a 16-byte header (`len u32, version u8, op u8, zero u16, seq u64`, little endian) and
//! `len` bytes of payload. Decoders are total: any bytes give a message or a protocol error, never
//! a panic, and nothing is allocated before a length was checked against what arrived. The
//! header's layout is the same in every version, so that two versions can tell each other apart.

mod messages;
mod replies;
mod stats;

use crate::error::{Error, Result};
pub use messages::{BlockShape, Caller, PIN_HARD, PutItem, Request};
pub use replies::{LIST_END, LISTED_MAX, LeaseEntry, ListRow, Origin, PutStatus, Reply, Verified};
pub use stats::StatsReply;

/// Version of everything below the header.
pub const VERSION: u8 = 4;
/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 16;
/// Largest payload either side accepts.
pub const MAX_PAYLOAD: usize = 1 << 20;
/// Most keys, leases or items one frame may carry.
pub const MAX_ITEMS: usize = 8192;
/// Bytes of a replica's load; see `cluster`.
pub const LOAD_BYTES: usize = 56;
/// Longest tenant id in bytes.
pub const MAX_TENANT: usize = 255;

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes of payload that follow.
    pub len: usize,
    /// The message's kind.
    pub op: u8,
    /// Chosen by the client, repeated by the server.
    pub seq: u64,
}

/// The first whole frame of `bytes`, or None while it is incomplete.
///
/// Consumes `HEADER_BYTES + payload.len()` bytes.
pub fn split(bytes: &[u8]) -> Result<Option<(Header, &[u8])>> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let header = parse_header(head)?;
    Ok(rest.get(..header.len).map(|payload| (header, payload)))
}

/// Decode and check a header.
pub(crate) fn parse_header(head: &[u8; HEADER_BYTES]) -> Result<Header> {
    let [l0, l1, l2, l3, version, op, z0, z1, seq @ ..] = *head;
    if version != VERSION {
        return Err(Error::protocol(format!(
            "the other side speaks wire version {version}, this one {VERSION}; \
             run the same mooncake_serve version on both"
        )));
    }
    let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if len > MAX_PAYLOAD || z0 != 0 || z1 != 0 {
        return Err(Error::protocol(format!("malformed frame header (op {op}, {len} bytes)")));
    }
    Ok(Header { len, op, seq: u64::from_le_bytes(seq) })
}

/// Append a frame to `out`: header, then what `payload` appends.
pub(crate) fn frame(out: &mut Vec<u8>, op: u8, seq: u64, payload: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend([0, 0, 0, 0, VERSION, op, 0, 0]);
    out.extend(seq.to_le_bytes());
    payload(out);
    let len = out.len() - start - HEADER_BYTES;
    debug_assert!(len <= MAX_PAYLOAD);
    out[start..start + 4].copy_from_slice(&(len as u32).to_le_bytes());
}

/// Reads fields from a payload; every read is checked.
pub(crate) struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or_else(truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn chunk<const N: usize>(&mut self) -> Result<&'a [u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or_else(truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.chunk().copied()
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// `count` records of `N` bytes each.
    pub(crate) fn records<const N: usize>(&mut self, count: u32) -> Result<&'a [[u8; N]]> {
        let count = count as usize;
        if count > MAX_ITEMS {
            return Err(Error::protocol(format!("{count} items in a frame; at most {MAX_ITEMS}")));
        }
        Ok(self.take(count * N)?.as_chunks().0)
    }

    pub(crate) fn text(&mut self) -> Result<&'a str> {
        let len = self.u8()? as usize;
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map_err(|_| Error::protocol("a name is not UTF-8"))
    }

    /// Everything must have been read.
    pub(crate) fn end(self) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(Error::protocol(format!("{} bytes too many in a frame", self.0.len())))
    }
}

/// Append a short text with its length; longer ones are cut at a character boundary.
pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    let fits = |&at: &usize| text.is_char_boundary(at);
    let cut = (0..=text.len().min(u8::MAX as usize)).rev().find(fits).unwrap_or(0);
    out.push(cut as u8);
    out.extend(&text.as_bytes()[..cut]);
}

fn truncated() -> Error {
    Error::protocol("a frame ends before its last field")
}

#[cfg(test)]
mod tests;
