//! Whole blocks: containers written plane by plane, and read back.
//!
//! A container is complete only once [`BlockWriter::finish`] has written its header, so a half-written
//! one never parses.

use crate::checksum::{checksum, copy_checksum, copy_near};
use crate::coder::{ALIGN, Decoder, Encoder};
use crate::container::{Header, Plane, header_len};
use crate::error::CodecError;
use crate::shape::{Codec, Shape};

/// Writes one container into a buffer, plane after plane.
#[derive(Debug)]
pub struct BlockWriter<'a> {
    encoder: &'a mut Encoder,
    codec: Codec,
    shape: Shape,
    plane_bytes: usize,
    planes: Vec<Plane>,
    end: usize,
    out: &'a mut [u8],
}

impl<'a> BlockWriter<'a> {
    /// Begin a container in `out`. `max_encoded_len(shape)` bytes are always enough; a coded block
    /// usually needs less, and one that does not fit ends in [`CodecError::NoRoom`].
    pub fn new(
        encoder: &'a mut Encoder,
        codec: Codec,
        shape: Shape,
        out: &'a mut [u8],
    ) -> Result<Self, CodecError> {
        shape.raw_bytes().ok_or(CodecError::BadShape)?;
        let plane_bytes = shape.plane_bytes().ok_or(CodecError::BadShape)?;
        let end = header_len(&shape);
        if out.len() < end {
            return Err(CodecError::NoRoom(out.len()));
        }
        let planes = Vec::with_capacity(shape.planes as usize);
        Ok(Self { encoder, codec, shape, plane_bytes, planes, end, out })
    }

    /// Code the next plane.
    pub fn plane(&mut self, raw: &[u8]) -> Result<(), CodecError> {
        expect_len(raw.len(), self.plane_bytes)?;
        self.expect_more()?;
        self.code(raw, checksum(raw))
    }

    /// Code the next plane from memory that another process may change: each byte is read once, so
    /// that what is stored is what its checksum covers.
    ///
    /// # Safety
    /// `source` must be readable for the bytes of a plane.
    pub unsafe fn plane_shared(&mut self, source: *const u8) -> Result<(), CodecError> {
        self.expect_more()?;
        let len = self.plane_bytes;
        if self.codec == Codec::None {
            let start = self.place(len, Codec::None)?;
            // SAFETY: by the caller's promise; `place` made room in `out`.
            let sum = unsafe { copy_checksum(source, self.out[start..].as_mut_ptr(), len) };
            self.seal(sum);
            return Ok(());
        }
        let mut private = std::mem::take(&mut self.encoder.private);
        private.resize(len, 0);
        // SAFETY: by the caller's promise; `private` holds `len` bytes.
        let sum = unsafe { copy_near(source, private.as_mut_ptr(), len) };
        let coded = self.code(&private, sum);
        self.encoder.private = private;
        coded
    }

    fn expect_more(&self) -> Result<(), CodecError> {
        let full = self.planes.len() == self.shape.planes as usize;
        if full { Err(CodecError::NoSuchPlane(self.shape.planes)) } else { Ok(()) }
    }

    fn code(&mut self, raw: &[u8], sum: u64) -> Result<(), CodecError> {
        if let Some(codec) = self.encoder.code(self.codec, &self.shape, raw) {
            let start = self.place(self.encoder.coded().len(), codec)?;
            copy(self.encoder.coded(), &mut self.out[start..self.end]);
        } else {
            let start = self.place(raw.len(), Codec::None)?;
            copy(raw, &mut self.out[start..self.end]);
        }
        self.seal(sum);
        Ok(())
    }

    /// Enter the next plane into the table, and clear the padding before it; where it starts.
    fn place(&mut self, len: usize, codec: Codec) -> Result<usize, CodecError> {
        let raw = codec == Codec::None;
        let start = if raw { self.end } else { self.end.next_multiple_of(ALIGN) };
        if start + len > self.out.len() {
            return Err(CodecError::NoRoom(self.out.len()));
        }
        self.out[self.end..start].fill(0);
        self.end = start + len;
        self.planes.push(Plane { offset: start as u64, len: len as u32, codec, checksum: 0 });
        Ok(start)
    }

    /// Complete the last plane's entry.
    fn seal(&mut self, checksum: u64) {
        if let Some(plane) = self.planes.last_mut() {
            plane.checksum = checksum;
        }
    }

    /// Write the header; returns the container's length.
    pub fn finish(self) -> Result<usize, CodecError> {
        if self.planes.len() < self.shape.planes as usize {
            return Err(CodecError::NoSuchPlane(self.planes.len() as u32));
        }
        Header { shape: self.shape, planes: self.planes }.write(self.out);
        Ok(self.end)
    }
}

/// Code a whole block into `out`, for which `max_encoded_len(shape)` bytes are always enough; returns
/// the container's length.
pub fn encode(
    codec: Codec,
    shape: &Shape,
    raw: &[u8],
    out: &mut [u8],
) -> Result<usize, CodecError> {
    let plane = shape.plane_bytes().ok_or(CodecError::BadShape)?;
    expect_len(raw.len(), shape.raw_bytes().ok_or(CodecError::BadShape)?)?;
    let mut encoder = Encoder::new();
    let mut writer = BlockWriter::new(&mut encoder, codec, *shape, out)?;
    raw.chunks_exact(plane).try_for_each(|raw| writer.plane(raw))?;
    writer.finish()
}

/// Write a raw container; returns its length.
pub fn encode_raw(shape: &Shape, raw: &[u8], out: &mut [u8]) -> Result<usize, CodecError> {
    encode(Codec::None, shape, raw, out)
}

/// Decode a whole block into `out`, verified. [`Decoder::block`] keeps its buffers between blocks.
pub fn decode_into(container: &[u8], out: &mut [u8]) -> Result<Shape, CodecError> {
    Decoder::new().block(container, out)
}

/// Decode one plane into `out`, verified. [`Decoder::plane`] keeps its buffers between planes.
pub fn decode_plane_into(
    container: &[u8],
    header: &Header,
    plane: u32,
    out: &mut [u8],
) -> Result<(), CodecError> {
    Decoder::new().plane(container, header, plane, out)
}

/// Check every plane of a container against its checksum.
pub fn verify(container: &[u8]) -> Result<(), CodecError> {
    let header = Header::parse(container)?;
    let mut decoder = Decoder::new();
    (0..header.shape.planes).try_for_each(|index| decoder.verify(container, &header, index))
}

/// Copy; returns the checksum of what was copied.
pub(crate) fn copy(source: &[u8], target: &mut [u8]) -> u64 {
    assert_eq!(source.len(), target.len(), "a raw plane has the block's plane size");
    // SAFETY: both slices are `source.len()` bytes long and, being borrowed, do not overlap.
    unsafe { copy_checksum(source.as_ptr(), target.as_mut_ptr(), source.len()) }
}

fn expect_len(have: usize, want: usize) -> Result<(), CodecError> {
    if have == want { Ok(()) } else { Err(CodecError::WrongSize { have, want }) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::container::max_encoded_len;
    use crate::shape::Dtype;

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

    #[test]
    fn planes_from_shared_memory_are_the_same() {
        let raw = block(&SHAPE);
        let plane = SHAPE.plane_bytes().expect("a valid shape");
        for codec in [Codec::None, Codec::Fast, Codec::Dense] {
            let max = max_encoded_len(&SHAPE).expect("a valid shape");
            let (mut want, mut have) = (vec![0; max], vec![0; max]);
            let len = encode(codec, &SHAPE, &raw, &mut want).expect("encodes");
            let mut encoder = Encoder::new();
            let mut writer = BlockWriter::new(&mut encoder, codec, SHAPE, &mut have).expect("fits");
            for raw in raw.chunks_exact(plane) {
                // SAFETY: `raw` is a plane.
                unsafe { writer.plane_shared(raw.as_ptr()) }.expect("codes");
            }
            assert_eq!(writer.plane(&raw[..plane]), Err(CodecError::NoSuchPlane(SHAPE.planes)));
            assert_eq!(writer.finish(), Ok(len));
            assert_eq!(have, want);
        }
    }

    #[test]
    fn a_container_takes_what_it_needs_and_no_more() {
        let raw = block(&SHAPE);
        for codec in [Codec::None, Codec::Fast, Codec::Dense] {
            let mut out = vec![0; max_encoded_len(&SHAPE).expect("a valid shape")];
            let len = encode(codec, &SHAPE, &raw, &mut out).expect("encodes");
            assert_eq!(encode(codec, &SHAPE, &raw, &mut out[..len]), Ok(len));
            for room in [len - 1, header_len(&SHAPE), 0] {
                let tight = encode(codec, &SHAPE, &raw, &mut out[..room]);
                assert_eq!(tight, Err(CodecError::NoRoom(room)));
            }
        }
    }

    proptest! {
        #[test]
        fn the_worst_case_is_enough_for_any_mix_of_planes(
            tokens in 1u32..9, channels in 1u32..90, noisy in proptest::collection::vec(any::<bool>(), 1..9),
            seed in any::<u8>(),
        ) {
            let shape = Shape { planes: noisy.len() as u32, tokens, channels, ..SHAPE };
            let plane = shape.plane_bytes().expect("a valid shape");
            let noise = |i: usize| (((i + 1) * (usize::from(seed) + 77) * 2_654_435_761) >> 13) as u8;
            let raw: Vec<u8> = noisy
                .iter()
                .flat_map(|noisy| (0..plane).map(move |i| if *noisy { noise(i) } else { 0 }))
                .collect();
            let mut container = vec![0; max_encoded_len(&shape).expect("a valid shape")];
            for codec in [Codec::None, Codec::Fast, Codec::Dense] {
                let len = encode(codec, &shape, &raw, &mut container);
                let len = len.expect("fits");
                let mut out = vec![0; raw.len()];
                prop_assert_eq!(decode_into(&container[..len], &mut out), Ok(shape));
                prop_assert_eq!(&out, &raw);
            }
        }

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
