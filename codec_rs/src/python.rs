//! The PyO3 face: `mooncake_serve._store.codec`.
//!
//! Converts arguments, releases the GIL, and raises `ValueError` with the message of a
//! [`CodecError`]. No logic of its own. Buffers are contiguous; dtypes have the names of torch.

use std::time::Instant;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyModule};

use crate::{
    BlockWriter, Codec, CodecError, Decoder, Dtype, Encoder, Header, Isa, Shape, limit_isa,
    max_encoded_len,
};

const DTYPES: [&str; 6] =
    ["opaque", "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"];
const CODECS: [&str; 4] = ["none", "fast", "dense", "zstd"];
const ISAS: [&str; 4] = ["scalar", "neon", "avx2", "avx512"];

/// dtype, planes, tokens, channels.
type ShapeTuple = (String, u32, u32, u32);
/// Codec, offset, length, checksum of the raw bytes.
type PlaneTuple = (&'static str, u64, u32, u64);

/// Add the submodule `codec`.
pub fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let module = PyModule::new(parent.py(), "codec")?;
    module.add_function(wrap_pyfunction!(encode, &module)?)?;
    module.add_function(wrap_pyfunction!(decode_into, &module)?)?;
    module.add_function(wrap_pyfunction!(inspect, &module)?)?;
    module.add_function(wrap_pyfunction!(checksum, &module)?)?;
    module.add_function(wrap_pyfunction!(use_isa, &module)?)?;
    module.add_function(wrap_pyfunction!(rates, &module)?)?;
    parent.add_submodule(&module)
}

fn invalid(error: CodecError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn position(what: &str, names: &[&str], name: &str) -> PyResult<u8> {
    let index = names.iter().position(|known| *known == name);
    let unknown = || PyValueError::new_err(format!("{what} is one of {names:?}, not {name:?}"));
    index.map(|index| index as u8).ok_or_else(unknown)
}

fn codec_named(name: &str) -> PyResult<Codec> {
    Codec::from_u8(position("codec", &CODECS, name)?).ok_or_else(|| PyValueError::new_err("codec"))
}

fn shape_of((dtype, planes, tokens, channels): ShapeTuple) -> PyResult<Shape> {
    let dtype = Dtype::from_u8(position("dtype", &DTYPES, &dtype)?);
    let shape = Shape { dtype: dtype.unwrap_or(Dtype::Opaque), planes, tokens, channels };
    shape.raw_bytes().map(|_| shape).ok_or_else(|| invalid(CodecError::BadShape))
}

fn tuple_of(shape: &Shape) -> ShapeTuple {
    let dtype = DTYPES[shape.dtype as usize].to_owned();
    (dtype, shape.planes, shape.tokens, shape.channels)
}

/// A contiguous buffer, held for the length of a call.
struct Buffer(PyUntypedBuffer);

impl Buffer {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if buffer.is_c_contiguous() {
            return Ok(Self(buffer));
        }
        Err(PyBufferError::new_err("a block's buffer must be contiguous"))
    }

    fn bytes(&self) -> &[u8] {
        match self.0.len_bytes() {
            0 => &[],
            // SAFETY: a contiguous buffer of that many bytes, kept alive by `self`. That no other
            // thread of the caller writes it meanwhile is part of the functions' contract.
            len => unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast(), len) },
        }
    }

    fn bytes_mut(&mut self) -> PyResult<&mut [u8]> {
        if self.0.readonly() {
            return Err(PyBufferError::new_err("a block is decoded into a writable buffer only"));
        }
        Ok(match self.0.len_bytes() {
            0 => &mut [],
            // SAFETY: a contiguous, writable buffer of that many bytes, kept alive by `self`. That
            // no other thread of the caller uses it meanwhile is part of the functions' contract.
            len => unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast(), len) },
        })
    }
}

/// The container of a block.
#[pyfunction]
fn encode<'py>(
    py: Python<'py>,
    block: &Bound<'py, PyAny>,
    codec: &str,
    shape: ShapeTuple,
) -> PyResult<Bound<'py, PyByteArray>> {
    let (codec, shape, block) = (codec_named(codec)?, shape_of(shape)?, Buffer::of(block)?);
    let raw = block.bytes();
    let container = py.detach(|| -> Result<Vec<u8>, CodecError> {
        let mut out = vec![0; max_encoded_len(&shape).ok_or(CodecError::BadShape)?];
        let len = crate::encode(codec, &shape, raw, &mut out)?;
        out.truncate(len);
        Ok(out)
    });
    Ok(PyByteArray::new(py, &container.map_err(invalid)?))
}

/// Decode a container into a buffer of the block's size, verified; its shape.
#[pyfunction]
fn decode_into(
    py: Python<'_>,
    container: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<ShapeTuple> {
    let (container, mut out) = (Buffer::of(container)?, Buffer::of(out)?);
    let (coded, target) = (container.bytes(), out.bytes_mut()?);
    let shape = py.detach(|| crate::decode_into(coded, target)).map_err(invalid)?;
    Ok(tuple_of(&shape))
}

/// Shape and plane table of a container.
#[pyfunction]
fn inspect(container: &Bound<'_, PyAny>) -> PyResult<(ShapeTuple, Vec<PlaneTuple>)> {
    let container = Buffer::of(container)?;
    let header = Header::parse(container.bytes()).map_err(invalid)?;
    let planes = header.planes.iter();
    let table = planes.map(|p| (CODECS[p.codec as usize], p.offset, p.len, p.checksum)).collect();
    Ok((tuple_of(&header.shape), table))
}

/// The checksum a container holds of each raw plane.
#[pyfunction]
fn checksum(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<u64> {
    let data = Buffer::of(data)?;
    let bytes = data.bytes();
    Ok(py.detach(|| crate::checksum(bytes)))
}

/// Use no instruction set above `limit` in this process from now on; the one in use.
#[pyfunction]
#[pyo3(signature = (limit=None))]
fn use_isa(limit: Option<&str>) -> PyResult<&'static str> {
    if let Some(name) = limit {
        let known = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512];
        limit_isa(known[usize::from(position("limit", &ISAS, name)?)]);
    }
    Ok(ISAS[Isa::current() as usize])
}

/// Seconds to copy, encode and decode the planes of `blocks` once, plane by plane on this thread,
/// and the coded bytes of each plane. Each figure is a sum of medians of `rounds` interleaved runs;
/// with `hot` a plane is worked on again at once, else only after all the others.
#[pyfunction]
#[pyo3(signature = (blocks, codec, shape, rounds=5, hot=false))]
fn rates(
    py: Python<'_>,
    blocks: &Bound<'_, PyAny>,
    codec: &str,
    shape: ShapeTuple,
    rounds: usize,
    hot: bool,
) -> PyResult<(f64, f64, f64, Vec<u32>)> {
    let (codec, shape, blocks) = (codec_named(codec)?, shape_of(shape)?, Buffer::of(blocks)?);
    let plane = Shape { planes: 1, ..shape };
    let raw = blocks.bytes();
    py.detach(|| Bench::new(codec, plane, raw)?.run(rounds.max(1), hot)).map_err(invalid)
}

/// Buffers of a measurement, aligned as an arena's are.
struct Bench<'a> {
    codec: Codec,
    shape: Shape,
    raw: &'a [u8],
    plane: usize,
    slot: usize,
    coded: Vec<u8>,
    copied: Vec<u8>,
    times: Vec<[Vec<f64>; 3]>,
    lens: Vec<u32>,
}

impl<'a> Bench<'a> {
    fn new(codec: Codec, shape: Shape, raw: &'a [u8]) -> Result<Self, CodecError> {
        let plane = shape.plane_bytes().ok_or(CodecError::BadShape)?;
        let slot = max_encoded_len(&shape).ok_or(CodecError::BadShape)?.next_multiple_of(64);
        let count = raw.len() / plane;
        if count == 0 || !raw.len().is_multiple_of(plane) {
            return Err(CodecError::WrongSize { have: raw.len(), want: plane });
        }
        Ok(Self {
            codec,
            shape,
            raw,
            plane,
            slot,
            coded: vec![1; count * slot + 64],
            copied: vec![1; count * plane + 64],
            times: vec![Default::default(); count],
            lens: vec![0; count],
        })
    }

    fn run(mut self, rounds: usize, hot: bool) -> Result<(f64, f64, f64, Vec<u32>), CodecError> {
        let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
        if hot {
            for at in 0..self.lens.len() {
                for _ in 0..rounds {
                    (0..3).try_for_each(|s| self.step(s, at, &mut encoder, &mut decoder))?;
                }
            }
        } else {
            for _ in 0..rounds {
                for step in 0..3 {
                    for at in 0..self.lens.len() {
                        self.step(step, at, &mut encoder, &mut decoder)?;
                    }
                }
            }
        }
        let mut sums = [0f64; 3];
        for times in &mut self.times {
            for (sum, times) in sums.iter_mut().zip(times) {
                times.sort_unstable_by(f64::total_cmp);
                *sum += times[times.len() / 2];
            }
        }
        Ok((sums[0], sums[1], sums[2], self.lens))
    }

    /// Copy (0), encode (1) or decode (2) one plane.
    fn step(
        &mut self,
        step: usize,
        at: usize,
        encoder: &mut Encoder,
        decoder: &mut Decoder,
    ) -> Result<(), CodecError> {
        let raw = &self.raw[at * self.plane..][..self.plane];
        let skip = self.copied.as_ptr().align_offset(64);
        let copied = &mut self.copied[skip + at * self.plane..][..self.plane];
        let skip = self.coded.as_ptr().align_offset(64);
        let coded = &mut self.coded[skip + at * self.slot..][..self.slot];
        let start = Instant::now();
        match step {
            0 => copied.copy_from_slice(raw),
            1 => {
                let mut writer = BlockWriter::new(encoder, self.codec, self.shape, coded)?;
                writer.plane(raw)?;
                writer.finish()?;
            }
            _ => decoder.plane(coded, &Header::parse(coded)?, 0, copied)?,
        }
        self.times[at][step].push(start.elapsed().as_secs_f64());
        if step == 1 {
            self.lens[at] = Header::parse(coded)?.planes[0].len;
        }
        Ok(())
    }
}
