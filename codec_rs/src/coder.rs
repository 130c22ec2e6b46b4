//! Coding of single planes: which codec, and when a plane is better left raw.
//!
//! A coded plane must gain at least 3 %, counting the padding before the next plane, so a container is
//! never larger than the raw one. A plane a codec cannot code, or not well enough, is tried with the
//! next simpler codec and is raw in the end; each plane's table entry says which it was.

use crate::checksum::checksum;
use crate::container::{Header, Plane};
use crate::dense;
use crate::error::CodecError;
use crate::fast;
use crate::float::for_float;
use crate::isa::Isa;
use crate::shape::{Codec, Shape};

/// Planes start at multiples of this, so that a coded one never costs more than it gains.
pub(crate) const ALIGN: usize = 64;
/// Gain below which a plane stays raw, in percent.
const GAIN_MIN: usize = 3;

const OPAQUE: CodecError = CodecError::Damaged("coded plane of opaque bytes");

/// Codes planes; keeps its buffers from one to the next. Memory: a few times the largest plane.
#[derive(Debug, Default)]
pub struct Encoder {
    dense: dense::Scratch,
    fast: fast::Scratch,
    coded: Vec<u8>,
    /// A plane copied out of memory that others may write.
    pub(crate) private: Vec<u8>,
}

impl Encoder {
    /// An encoder without buffers yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Code a raw plane into `coded()`; returns the codec that was used, None when the plane should
    /// stay raw.
    pub(crate) fn code(&mut self, codec: Codec, shape: &Shape, raw: &[u8]) -> Option<Codec> {
        let channels = shape.channels as usize;
        let isa = Isa::current();
        self.coded.clear();
        self.coded.reserve(raw.len());
        let coded = &mut self.coded;
        let done = match codec {
            Codec::Fast => for_float!(shape.dtype, F => {
                fast::encode::<F>(isa, raw, channels, &mut self.fast, coded);
                true
            }),
            Codec::Dense => for_float!(shape.dtype, F => {
                dense::encode::<F>(isa, raw, channels, &mut self.dense, coded)
            }),
            #[cfg(feature = "zstd")]
            Codec::Zstd => {
                for_float!(shape.dtype, F => crate::interchange::encode::<F>(raw, coded))
            }
            _ => None,
        }?;
        let gain = raw.len() * GAIN_MIN / 100;
        if done && self.coded.len() + ALIGN + gain <= raw.len() {
            return Some(codec);
        }
        if codec == Codec::Dense { self.code(Codec::Fast, shape, raw) } else { None }
    }

    /// What `code` made.
    pub(crate) fn coded(&self) -> &[u8] {
        &self.coded
    }
}

/// Decodes planes; keeps its buffers from one to the next. Memory: a few times the largest plane.
#[derive(Debug, Default)]
pub struct Decoder {
    dense: dense::Scratch,
    fast: fast::Scratch,
    /// A plane that is only verified.
    verified: Vec<u8>,
}

impl Decoder {
    /// A decoder without buffers yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Decode a whole block into `out`, verified in the same pass. On error `out` holds garbage.
    pub fn block(&mut self, container: &[u8], out: &mut [u8]) -> Result<Shape, CodecError> {
        let header = Header::parse(container)?;
        let want = header.shape.raw_bytes().ok_or(CodecError::BadShape)?;
        if out.len() != want {
            return Err(CodecError::WrongSize { have: out.len(), want });
        }
        let plane = header.shape.plane_bytes().ok_or(CodecError::BadShape)?;
        for (index, target) in out.chunks_exact_mut(plane).enumerate() {
            self.plane(container, &header, index as u32, target)?;
        }
        Ok(header.shape)
    }

    /// Decode plane `index` of `container` into `out`, verified. On error `out` holds garbage.
    pub fn plane(
        &mut self,
        container: &[u8],
        header: &Header,
        index: u32,
        out: &mut [u8],
    ) -> Result<(), CodecError> {
        let plane = header.planes.get(index as usize).ok_or(CodecError::NoSuchPlane(index))?;
        let want = header.shape.plane_bytes().ok_or(CodecError::BadShape)?;
        if out.len() != want {
            return Err(CodecError::WrongSize { have: out.len(), want });
        }
        let coded = coded_bytes(container, plane)?;
        let (shape, channels) = (&header.shape, header.shape.channels as usize);
        let isa = Isa::current();
        let sum = match plane.codec {
            Codec::None => crate::block::copy(coded, out),
            Codec::Fast => {
                let scratch = &mut self.fast;
                for_float!(shape.dtype, F => fast::decode::<F>(isa, coded, channels, scratch, out))
                    .ok_or(OPAQUE)??
            }
            Codec::Dense => {
                let scratch = &mut self.dense;
                for_float!(shape.dtype, F => dense::decode::<F>(isa, coded, channels, scratch, out))
                    .ok_or(OPAQUE)??
            }
            #[cfg(feature = "zstd")]
            Codec::Zstd => {
                for_float!(shape.dtype, F => crate::interchange::decode::<F>(coded, out))
                    .ok_or(OPAQUE)??
            }
            #[cfg(not(feature = "zstd"))]
            Codec::Zstd => return Err(CodecError::UnknownCodec(Codec::Zstd as u8)),
        };
        if sum == plane.checksum { Ok(()) } else { Err(CodecError::Corrupt(index)) }
    }

    /// Check plane `index` against its checksum.
    pub fn verify(
        &mut self,
        container: &[u8],
        header: &Header,
        index: u32,
    ) -> Result<(), CodecError> {
        let plane = header.planes.get(index as usize).ok_or(CodecError::NoSuchPlane(index))?;
        if plane.codec == Codec::None {
            let same = checksum(coded_bytes(container, plane)?) == plane.checksum;
            return if same { Ok(()) } else { Err(CodecError::Corrupt(index)) };
        }
        let mut out = std::mem::take(&mut self.verified);
        out.resize(header.shape.plane_bytes().ok_or(CodecError::BadShape)?, 0);
        let checked = self.plane(container, header, index, &mut out);
        self.verified = out;
        checked
    }
}

/// A header may have been parsed from other bytes, so bounds are checked again.
fn coded_bytes<'a>(container: &'a [u8], plane: &Plane) -> Result<&'a [u8], CodecError> {
    let start = plane.offset as usize;
    let end = start.checked_add(plane.len as usize);
    end.and_then(|end| container.get(start..end)).ok_or(CodecError::Damaged("truncated"))
}
