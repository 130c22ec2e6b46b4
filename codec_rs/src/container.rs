//! The container of a coded block.
//!
//! Little endian. A header of 64 bytes, a table of 24 bytes per plane, padding to 64, then planes,
//! each starting at a multiple of 64 when coded. Raw planes follow each other without gaps, so the
//! payload of a raw container *is* the block. The header carries a checksum of itself and of the
//! table; each plane one of its raw bytes. Every field is checked against the input's own length
//! before it is used.

use crate::checksum::{checksum, copy_checksum};
use crate::error::CodecError;
use crate::shape::{Codec, Dtype, Shape};

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

/// Write a raw container; returns its length.
pub fn encode_raw(shape: &Shape, raw: &[u8], out: &mut [u8]) -> Result<usize, CodecError> {
    let want = shape.raw_bytes().ok_or(CodecError::BadShape)?;
    let plane = shape.plane_bytes().ok_or(CodecError::BadShape)?;
    expect_len(raw.len(), want)?;
    let start = header_len(shape);
    if out.len() < start + want {
        return Err(CodecError::WrongSize { have: out.len(), want: start + want });
    }
    let mut sums = Vec::with_capacity(shape.planes as usize);
    let (head, payload) = out.split_at_mut(start);
    for (source, target) in raw.chunks_exact(plane).zip(payload.chunks_exact_mut(plane)) {
        sums.push(copy(source, target));
    }
    Header::raw(*shape, sums).write(head);
    Ok(start + want)
}

/// Decode a whole block into `out`, verified in the same pass. On error `out` holds garbage.
pub fn decode_into(container: &[u8], out: &mut [u8]) -> Result<Shape, CodecError> {
    let header = Header::parse(container)?;
    let plane = header.shape.plane_bytes().ok_or(CodecError::BadShape)?;
    expect_len(out.len(), header.shape.raw_bytes().ok_or(CodecError::BadShape)?)?;
    for (index, target) in out.chunks_exact_mut(plane).enumerate() {
        decode_one(container, &header, index as u32, target)?;
    }
    Ok(header.shape)
}

/// Decode one plane into `out`, verified.
pub fn decode_plane_into(
    container: &[u8],
    header: &Header,
    plane: u32,
    out: &mut [u8],
) -> Result<(), CodecError> {
    if plane >= header.shape.planes {
        return Err(CodecError::Damaged("no such plane"));
    }
    expect_len(out.len(), header.shape.plane_bytes().ok_or(CodecError::BadShape)?)?;
    decode_one(container, header, plane, out)
}

/// Check every plane of a container against its checksum.
pub fn verify(container: &[u8]) -> Result<(), CodecError> {
    let header = Header::parse(container)?;
    for (index, plane) in header.planes.iter().enumerate() {
        let coded = coded_bytes(container, plane)?;
        match plane.codec {
            Codec::None if checksum(coded) == plane.checksum => {}
            Codec::None => return Err(CodecError::Corrupt(index as u32)),
            other => return Err(CodecError::UnknownCodec(other as u8)),
        }
    }
    Ok(())
}

fn decode_one(
    container: &[u8],
    header: &Header,
    index: u32,
    out: &mut [u8],
) -> Result<(), CodecError> {
    let plane = &header.planes[index as usize];
    let coded = coded_bytes(container, plane)?;
    match plane.codec {
        Codec::None if copy(coded, out) == plane.checksum => Ok(()),
        Codec::None => Err(CodecError::Corrupt(index)),
        other => Err(CodecError::UnknownCodec(other as u8)),
    }
}

/// A header may have been parsed from other bytes, so bounds are checked again.
fn coded_bytes<'a>(container: &'a [u8], plane: &Plane) -> Result<&'a [u8], CodecError> {
    let start = plane.offset as usize;
    let end = start.checked_add(plane.len as usize);
    end.and_then(|end| container.get(start..end)).ok_or(CodecError::Damaged("truncated"))
}

fn copy(source: &[u8], target: &mut [u8]) -> u64 {
    assert_eq!(source.len(), target.len(), "a raw plane has the block's plane size");
    // SAFETY: both slices are `source.len()` bytes long and, being borrowed, do not overlap.
    unsafe { copy_checksum(source.as_ptr(), target.as_mut_ptr(), source.len()) }
}

fn expect_len(have: usize, want: usize) -> Result<(), CodecError> {
    if have == want { Ok(()) } else { Err(CodecError::WrongSize { have, want }) }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn block(shape: &Shape) -> Vec<u8> {
        let len = shape.raw_bytes().expect("a valid shape");
        (0..len).map(|i| ((i * 31) >> 3) as u8).collect()
    }

    fn encoded(shape: &Shape) -> Vec<u8> {
        let mut out = vec![0; max_encoded_len(shape).expect("a valid shape")];
        let len = encode_raw(shape, &block(shape), &mut out).expect("encodes");
        assert_eq!(len, out.len());
        out
    }

    const SHAPE: Shape = Shape { dtype: Dtype::Bf16, planes: 6, tokens: 16, channels: 24 };

    #[test]
    fn a_raw_container_holds_the_block_as_it_is() {
        let container = encoded(&SHAPE);
        assert_eq!(&container[header_len(&SHAPE)..], &block(&SHAPE)[..]);
        assert!(Header::parse(&container).expect("parses").is_raw());
        let mut out = vec![0; block(&SHAPE).len()];
        assert_eq!(decode_into(&container, &mut out), Ok(SHAPE));
        assert_eq!(out, block(&SHAPE));
        assert_eq!(verify(&container), Ok(()));
    }

    #[test]
    fn impossible_shapes_are_refused() {
        for shape in [
            Shape { planes: 0, ..SHAPE },
            Shape { tokens: 0, ..SHAPE },
            Shape { tokens: u32::MAX, ..SHAPE },
            Shape { planes: 1 << 17, tokens: 1, channels: 1, ..SHAPE },
        ] {
            assert_eq!(max_encoded_len(&shape), None);
            assert_eq!(encode_raw(&shape, &[], &mut []), Err(CodecError::BadShape));
        }
    }

    proptest! {
        #[test]
        fn any_flipped_byte_is_an_error(at in any::<prop::sample::Index>(), flip in 1u8..) {
            let mut container = encoded(&SHAPE);
            let at = at.index(container.len());
            container[at] ^= flip;
            let mut out = vec![0; block(&SHAPE).len()];
            prop_assert!(decode_into(&container, &mut out).is_err());
            prop_assert!(verify(&container).is_err());
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400),
                                            keep in 0usize..2000) {
            let mut container = encoded(&SHAPE);
            container.truncate(keep);
            let mut out = vec![0; block(&SHAPE).len()];
            prop_assert!(decode_into(&container, &mut out).is_err());
            prop_assert!(Header::parse(&bytes).is_err());
        }
    }
}
