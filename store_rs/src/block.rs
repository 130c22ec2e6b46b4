//! A block as it lies in the arena: the codec's container, written once and read by everyone.
//!
//! The only module that knows the codec. Writing copies and checksums in one pass, so that what a
//! checksum covers is what was stored, whatever a client does to its buffer meanwhile. Reading
//! verifies in the same pass that copies; anything that does not match is `Corrupt`, never bytes.

use std::cell::RefCell;

pub use mooncake_codec::Decoder;
use mooncake_codec::{BlockWriter, Codec, CodecError, Dtype, Encoder, Header, Shape, header_len};

use crate::error::{Error, Result};
use crate::index::{Kind, Stored};
use crate::wire::BlockShape;

/// Largest plane that is coded: it bounds what an encoder holds.
const CODED_PLANE_MAX: usize = 16 << 20;

/// A block's bytes do not match their checksum, or its header is damaged. It is a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt;

/// The shape of blocks that are put, and how they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    shape: Shape,
    codec: Codec,
    plane: usize,
}

impl Layout {
    /// Check a shape that came over the wire.
    pub fn new(shape: BlockShape, codec: Codec) -> Result<Self> {
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
        let coded = dtype != Dtype::Opaque && plane <= CODED_PLANE_MAX;
        Ok(Self { shape, codec: if coded { codec } else { Codec::None }, plane })
    }

    /// Whether blocks may take less than `container_bytes`.
    pub fn is_coded(&self) -> bool {
        self.codec != Codec::None
    }

    /// Bytes of the block itself.
    pub fn raw_bytes(&self) -> usize {
        self.plane * self.shape.planes as usize
    }

    /// Most bytes its container takes in the arena.
    pub fn container_bytes(&self) -> usize {
        header_len(&self.shape) + self.raw_bytes()
    }

    /// Copy or code a block into its container, checksumming what is read; None if `target` is too
    /// small for it. Before a plane is read, `arrived` is asked for the block's bytes up to its end;
    /// its errors end the copy.
    ///
    /// # Safety
    /// `source` must be readable for `raw_bytes`; its contents may change meanwhile.
    pub unsafe fn write(
        &self,
        encoder: &mut Encoder,
        source: *const u8,
        mut arrived: impl FnMut(usize) -> Result<()>,
        target: &mut [u8],
    ) -> Result<Option<Stored>> {
        let Ok(mut writer) = BlockWriter::new(encoder, self.codec, self.shape, target) else {
            return Ok(None);
        };
        for plane in 0..self.shape.planes as usize {
            arrived((plane + 1) * self.plane)?;
            // SAFETY: the plane lies inside what the caller vouches for.
            if unsafe { writer.plane_shared(source.add(plane * self.plane)) }.is_err() {
                return Ok(None);
            }
        }
        Ok(writer.finish().ok().map(|len| self.stored(len)))
    }

    fn stored(&self, len: usize) -> Stored {
        let (dtype, codec) = (self.shape.dtype as u8, self.codec as u8);
        let (header, raw) = (header_len(&self.shape) as u32, self.raw_bytes() as u32);
        Stored { len: len as u32, kind: Kind { dtype, codec, header, raw } }
    }
}

/// Code a container again with `codec`, plane by plane, into `target`; None if it does not fit.
pub fn recode(
    decoder: &mut Decoder,
    encoder: &mut Encoder,
    source: &[u8],
    codec: Codec,
    target: &mut [u8],
) -> std::result::Result<Option<Stored>, Corrupt> {
    let header = Header::parse(source).map_err(|_| Corrupt)?;
    let shape = header.shape;
    let mut plane = vec![0; shape.plane_bytes().ok_or(Corrupt)?];
    let layout = Layout { shape, codec, plane: plane.len() };
    let Ok(mut writer) = BlockWriter::new(encoder, codec, shape, target) else { return Ok(None) };
    for index in 0..shape.planes {
        decoder.plane(source, &header, index, &mut plane).map_err(|_| Corrupt)?;
        match writer.plane(&plane) {
            Err(CodecError::NoRoom(_)) => return Ok(None),
            other => other.map_err(|_| Corrupt)?,
        }
    }
    Ok(writer.finish().ok().map(|len| layout.stored(len)))
}

/// What a container says about itself, by its header; its planes stay unread.
pub fn describe(container: &[u8]) -> std::result::Result<Stored, Corrupt> {
    let header = Header::parse(container).map_err(|_| Corrupt)?;
    let raw = header.shape.raw_bytes().ok_or(Corrupt)? as u32;
    let (dtype, codec) = (header.shape.dtype as u8, codec_of(&header));
    let kind = Kind { dtype, codec, header: header_len(&header.shape) as u32, raw };
    Ok(Stored { len: container.len() as u32, kind })
}

/// Shape of the block in a container, and the codec's number of how it is stored.
pub fn form(container: &[u8]) -> std::result::Result<(BlockShape, u8), Corrupt> {
    let header = Header::parse(container).map_err(|_| Corrupt)?;
    let Shape { dtype, planes, tokens, channels } = header.shape;
    let shape = BlockShape { dtype: dtype as u8, planes, tokens, channels };
    Ok((shape, codec_of(&header)))
}

/// Planes that a codec did not pay for are stored by a simpler one, which has a lower number.
fn codec_of(header: &Header) -> u8 {
    header.planes.iter().map(|plane| plane.codec as u8).max().unwrap_or(0)
}

thread_local! {
    /// Buffers of a few planes, kept by every thread that reads: making them anew for each block
    /// would cost page faults.
    static DECODER: RefCell<Decoder> = RefCell::default();
}

/// Copy or decode a whole container into `out`, verified.
pub fn read_into(container: &[u8], out: &mut [u8]) -> std::result::Result<(), Corrupt> {
    let read = DECODER.with_borrow_mut(|decoder| decoder.block(container, out));
    read.map(|_| ()).map_err(|_| Corrupt)
}

/// The planes of one container, in any order.
pub struct Planes {
    header: Header,
    plane: usize,
}

impl Planes {
    /// Check the header of a container.
    pub fn of(container: &[u8]) -> std::result::Result<Self, Corrupt> {
        let header = Header::parse(container).map_err(|_| Corrupt)?;
        let plane = header.shape.plane_bytes().ok_or(Corrupt)?;
        Ok(Self { header, plane })
    }

    /// Copy or decode some planes to their places in `out`, the whole block's, verified.
    pub fn read(
        &self,
        decoder: &mut Decoder,
        container: &[u8],
        planes: std::ops::Range<u32>,
        out: &mut [u8],
    ) -> std::result::Result<(), Corrupt> {
        for index in planes {
            let start = index as usize * self.plane;
            let target = out.get_mut(start..start + self.plane).ok_or(Corrupt)?;
            decoder.plane(container, &self.header, index, target).map_err(|_| Corrupt)?;
        }
        Ok(())
    }
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

/// A container that arrives from its start on: each plane is verified once all of it is there.
#[derive(Default)]
pub struct Arriving {
    header: Option<Header>,
    decoder: Decoder,
    verified: usize,
}

impl Arriving {
    /// The first `filled` bytes of `container` are there; the rest may hold anything.
    pub fn check(&mut self, container: &[u8], filled: usize) -> std::result::Result<(), Corrupt> {
        if self.header.is_none() {
            let complete = Header::len_at(container).is_some_and(|len| len <= filled);
            if !complete && filled < container.len() {
                return Ok(());
            }
            self.header = Some(Header::parse(container).map_err(|_| Corrupt)?);
        }
        let Some(header) = &self.header else { return Ok(()) };
        while let Some(plane) = header.planes.get(self.verified)
            && plane.offset + u64::from(plane.len) <= filled as u64
        {
            let checked = self.decoder.verify(container, header, self.verified as u32);
            checked.map_err(|_| Corrupt)?;
            self.verified += 1;
        }
        Ok(())
    }

    /// Bytes of the block, once every plane was verified.
    pub fn raw_bytes(&self) -> Option<u32> {
        let header = self.header.as_ref()?;
        let whole = self.verified == header.planes.len();
        header.shape.raw_bytes().filter(|_| whole).and_then(|raw| u32::try_from(raw).ok())
    }
}

/// A short checksum over a container as it lies in memory, for whoever stores it elsewhere.
pub fn sum(container: &[u8]) -> u32 {
    mooncake_codec::checksum(container) as u32
}
