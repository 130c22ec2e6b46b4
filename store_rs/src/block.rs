//! A block as it lies in the arena: the codec's container, written once and read by everyone.
//!
//! The only module that knows the codec. Writing copies and checksums in one pass, so that what a
//! checksum covers is what was stored, whatever a client does to its buffer meanwhile. Reading
//! verifies in the same pass that copies; anything that does not match is `Corrupt`, never bytes.

use mooncake_codec::{Dtype, Header, Shape, copy_checksum, decode_into, header_len};

use crate::error::{Error, Result};
use crate::wire::BlockShape;

/// A block's bytes do not match their checksum, or its header is damaged. It is a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt;

/// Where the parts of a raw block go.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    shape: Shape,
    header: usize,
    plane: usize,
}

impl Layout {
    /// Check a shape that came over the wire.
    pub fn new(shape: BlockShape) -> Result<Self> {
        let wrong = |why: &str| {
            let BlockShape { planes, tokens, channels, .. } = shape;
            Error::refused(format!("block shape {planes}×{tokens}×{channels}: {why}"))
        };
        let dtype = Dtype::from_u8(shape.dtype).ok_or_else(|| wrong("unknown dtype"))?;
        let BlockShape { planes, tokens, channels, .. } = shape;
        let shape = Shape { dtype, planes, tokens, channels };
        let raw = shape
            .raw_bytes()
            .filter(|&raw| raw > 0 && raw + header_len(&shape) <= u32::MAX as usize);
        let plane = shape.plane_bytes().filter(|_| planes <= 1 << 16);
        let (Some(_), Some(plane)) = (raw, plane) else {
            return Err(wrong("must hold 1 byte to 4 GiB in at most 65536 planes"));
        };
        Ok(Self { shape, header: header_len(&shape), plane })
    }

    /// Bytes of the block itself.
    pub fn raw_bytes(&self) -> usize {
        self.plane * self.shape.planes as usize
    }

    /// Bytes of its container in the arena.
    pub fn container_bytes(&self) -> usize {
        self.header + self.raw_bytes()
    }

    /// Copy a block into its container, checksumming what is copied.
    ///
    /// # Safety
    /// `source` must be readable for `raw_bytes` (its contents may change meanwhile) and `target`
    /// writable by us alone for `container_bytes`, until this returns.
    pub unsafe fn write(&self, source: *const u8, target: *mut u8) {
        let mut sums = Vec::with_capacity(self.shape.planes as usize);
        for plane in 0..self.shape.planes as usize {
            // SAFETY: both ranges lie inside what the caller vouches for.
            sums.push(unsafe {
                copy_checksum(
                    source.add(plane * self.plane),
                    target.add(self.header + plane * self.plane),
                    self.plane,
                )
            });
        }
        // SAFETY: the header's bytes are ours alone, by the caller's promise.
        let head = unsafe { std::slice::from_raw_parts_mut(target, self.header) };
        Header::raw(self.shape, sums).write(head);
    }
}

/// Copy or decode a whole container into `out`, verified.
pub fn read_into(container: &[u8], out: &mut [u8]) -> std::result::Result<(), Corrupt> {
    decode_into(container, out).map(|_| ()).map_err(|_| Corrupt)
}

/// Bytes of the block in a container.
pub fn raw_bytes(container: &[u8]) -> std::result::Result<usize, Corrupt> {
    let header = Header::parse(container).map_err(|_| Corrupt)?;
    header.shape.raw_bytes().ok_or(Corrupt)
}

/// Where in a container the block's own bytes are; None if they are coded.
pub fn payload(container: &[u8]) -> std::result::Result<Option<std::ops::Range<usize>>, Corrupt> {
    let header = Header::parse(container).map_err(|_| Corrupt)?;
    let start = header_len(&header.shape);
    let raw = header.shape.raw_bytes().ok_or(Corrupt)?;
    Ok(header.is_raw().then_some(start..start + raw))
}

/// Check every byte of a container.
pub fn verify(container: &[u8]) -> std::result::Result<(), Corrupt> {
    mooncake_codec::verify(container).map_err(|_| Corrupt)
}
