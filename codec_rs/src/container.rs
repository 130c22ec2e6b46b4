//! The container of a coded block.
//!
//! Little endian. A header of 64 bytes, a table of 24 bytes per plane, padding to 64, then planes,
//! each starting at a multiple of 64 when coded. Raw planes follow without a gap, so the payload of a
//! raw container *is* the block. The header carries a checksum of itself and of the
//! table; each plane one of its raw bytes. Every field is checked against the input's own length
//! before it is used.

use crate::checksum::checksum;
use crate::error::CodecError;
use crate::shape::{Codec, Dtype, PLANES_MAX, Shape};

/// Version written into every container; another one is refused.
pub(crate) const VERSION: u16 = 1;
const MAGIC: [u8; 4] = *b"MKVB";
const FIXED: usize = 64;
const PER_PLANE: usize = 24;
const SELF_SUM: std::ops::Range<usize> = 32..40;

/// Where a plane's bytes are, and what they decode to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plane {
    /// From the start of the container.
    pub offset: u64,
    /// Coded bytes.
    pub len: u32,
    /// How they are coded.
    pub codec: Codec,
    /// Checksum of the raw plane.
    pub checksum: u64,
}

/// A container's header, decoded and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Shape of the block.
    pub shape: Shape,
    /// One entry per plane, in order, not overlapping.
    pub planes: Vec<Plane>,
}

/// Bytes before the payload: a multiple of 64.
pub fn header_len(shape: &Shape) -> usize {
    (FIXED + shape.planes as usize * PER_PLANE).next_multiple_of(64)
}

/// Bytes of a raw container, the largest any codec writes; None for an impossible shape.
pub fn max_encoded_len(shape: &Shape) -> Option<usize> {
    Some(header_len(shape) + shape.raw_bytes()?)
}

impl Header {
    /// The header of a raw container whose planes have these checksums.
    pub fn raw(shape: Shape, checksums: Vec<u64>) -> Self {
        let plane = shape.plane_bytes().unwrap_or(0);
        let start = header_len(&shape);
        let planes = checksums.into_iter().enumerate().map(|(i, checksum)| Plane {
            offset: (start + i * plane) as u64,
            len: plane as u32,
            codec: Codec::None,
            checksum,
        });
        Self { shape, planes: planes.collect() }
    }

    /// Bytes of the whole container.
    pub fn container_len(&self) -> usize {
        let end = self.planes.last().map(|p| p.offset as usize + p.len as usize);
        end.unwrap_or_else(|| header_len(&self.shape))
    }

    /// True when the payload is the raw block.
    pub fn is_raw(&self) -> bool {
        self.planes.iter().all(|p| p.codec == Codec::None)
            && Some(self.container_len()) == max_encoded_len(&self.shape)
    }

    /// Write into the first `header_len` bytes of `out`, padding included.
    ///
    /// # Panics
    /// When `out` is shorter than the header.
    pub fn write(&self, out: &mut [u8]) {
        let out = &mut out[..header_len(&self.shape)];
        out.fill(0);
        out[0..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6] = self.shape.dtype as u8;
        out[8..12].copy_from_slice(&self.shape.planes.to_le_bytes());
        out[12..16].copy_from_slice(&self.shape.tokens.to_le_bytes());
        out[16..20].copy_from_slice(&self.shape.channels.to_le_bytes());
        for (plane, entry) in self.planes.iter().zip(out[FIXED..].chunks_exact_mut(PER_PLANE)) {
            entry[0..8].copy_from_slice(&plane.offset.to_le_bytes());
            entry[8..12].copy_from_slice(&plane.len.to_le_bytes());
            entry[12] = plane.codec as u8;
            entry[16..24].copy_from_slice(&plane.checksum.to_le_bytes());
        }
        let sum = checksum(out);
        out[SELF_SUM].copy_from_slice(&sum.to_le_bytes());
    }

    /// Bytes before the payload, as the first bytes of `container` say, unchecked; None if they are
    /// not there or cannot be true.
    pub fn len_at(container: &[u8]) -> Option<usize> {
        let planes = u32_at(container.get(..FIXED)?, 8);
        let len = FIXED + planes as usize * PER_PLANE;
        (planes <= PLANES_MAX).then_some(len.next_multiple_of(64))
    }

    /// Read and check a header; `container` must hold the whole container, and may be longer.
    pub fn parse(container: &[u8]) -> Result<Self, CodecError> {
        let fixed = container.get(..FIXED).ok_or(CodecError::NotAContainer)?;
        if fixed[0..4] != MAGIC || fixed[4..6] != VERSION.to_le_bytes() {
            return Err(CodecError::NotAContainer);
        }
        let shape = Shape {
            dtype: Dtype::from_u8(fixed[6]).ok_or(CodecError::Damaged("dtype"))?,
            planes: u32_at(fixed, 8),
            tokens: u32_at(fixed, 12),
            channels: u32_at(fixed, 16),
        };
        shape.raw_bytes().ok_or(CodecError::Damaged("shape"))?;
        let head = container.get(..header_len(&shape)).ok_or(CodecError::Damaged("truncated"))?;
        let mut zeroed = head.to_vec();
        zeroed[SELF_SUM].fill(0);
        if checksum(&zeroed) != u64_at(head, SELF_SUM.start) {
            return Err(CodecError::Damaged("header checksum"));
        }
        let planes = parse_planes(&shape, head, container.len() as u64)?;
        Ok(Self { shape, planes })
    }
}

fn parse_planes(shape: &Shape, head: &[u8], len: u64) -> Result<Vec<Plane>, CodecError> {
    let raw = shape.plane_bytes().ok_or(CodecError::BadShape)? as u32;
    let mut end = header_len(shape) as u64;
    let mut planes = Vec::with_capacity(shape.planes as usize);
    let table = head[FIXED..].chunks_exact(PER_PLANE).take(shape.planes as usize);
    for entry in table {
        let plane = Plane {
            offset: u64_at(entry, 0),
            len: u32_at(entry, 8),
            codec: Codec::from_u8(entry[12]).ok_or(CodecError::UnknownCodec(entry[12]))?,
            checksum: u64_at(entry, 16),
        };
        if plane.offset < end || plane.offset > len || u64::from(plane.len) > len - plane.offset {
            return Err(CodecError::Damaged("plane outside the container"));
        }
        if plane.codec == Codec::None && plane.len != raw {
            return Err(CodecError::Damaged("raw plane of another length"));
        }
        end = plane.offset + u64::from(plane.len);
        planes.push(plane);
    }
    Ok(planes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}
