//! The zstd codec: the portable form, readable anywhere zstd is.
//!
//! Each element is rotated left by one bit, which moves the sign to the bottom, and the plane is
//! cut into byte planes, low bytes first. All but the last are stored; the last, which holds the
//! exponents, is one zstd frame, and the rest of the coded plane. `mooncake_serve/codec.py` reads and
//! writes the same form without this crate.

use crate::checksum::Sink;
use crate::error::CodecError;
use crate::float::Float;

/// Of zstd's levels, the one that is fastest here: higher ones gain little on exponents.
const LEVEL: i32 = 1;
/// Elements rebuilt at a time.
const TILE: usize = 1024;

/// Append the coded form of `raw` to `out`; false when zstd fails.
pub(crate) fn encode<F: Float>(raw: &[u8], out: &mut Vec<u8>) -> bool {
    let elements = F::elements(raw);
    let count = elements.len();
    let start = out.len();
    out.resize(start + raw.len(), 0);
    for (plane, bytes) in out[start..].chunks_exact_mut(count).enumerate() {
        for (byte, raw) in bytes.iter_mut().zip(elements) {
            *byte = F::turned_byte(F::bits(*raw), plane);
        }
    }
    let stored = start + raw.len() - count;
    let Ok(frame) = zstd::bulk::compress(&out[stored..], LEVEL) else { return false };
    out.truncate(stored);
    out.extend(frame);
    true
}

/// Decode a plane into `out`, which tells its size; returns the checksum of what was decoded.
pub(crate) fn decode<F: Float>(coded: &[u8], out: &mut [u8]) -> Result<u64, CodecError> {
    let count = out.len() / F::SIZE;
    let (stored, frame) = coded
        .split_at_checked(out.len() - count)
        .ok_or(CodecError::Damaged("zstd plane too short"))?;
    let mut top = vec![0; count];
    match zstd::bulk::decompress_to_buffer(frame, &mut top) {
        Ok(len) if len == count => {}
        _ => return Err(CodecError::Damaged("zstd frame")),
    }
    let mut sink = Sink::new(out);
    let mut tile = Vec::with_capacity(TILE);
    for first in (0..count).step_by(TILE) {
        let elements = first..count.min(first + TILE);
        tile.clear();
        tile.extend(elements.map(|at| {
            F::raw(F::from_turned(|plane| match stored.get(plane * count + at) {
                Some(byte) if plane + 1 < F::SIZE => *byte,
                _ => top[at],
            }))
        }));
        sink.push(F::raw_bytes(&tile));
    }
    Ok(sink.finish())
}
