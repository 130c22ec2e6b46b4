//! The shape of a block, as Python gives it.

use mooncake_codec::Codec;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::block::Layout;
use crate::wire;

/// Names of element types, by the codec's number.
pub(super) const DTYPES: [&str; 6] =
    ["opaque", "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"];

/// Names of codecs, by the codec's number.
pub(super) const CODECS: [&str; 4] = ["none", "fast", "dense", "zstd"];

/// `planes` planes of `tokens × channels` elements.
#[pyclass(module = "mooncake_serve._store", frozen, eq, skip_from_py_object)]
#[derive(Clone, Copy, PartialEq)]
pub(super) struct BlockShape {
    pub(super) wire: wire::BlockShape,
    pub(super) raw_bytes: usize,
}

impl BlockShape {
    pub(super) fn checked(wire: wire::BlockShape) -> PyResult<Self> {
        let layout = Layout::new(wire, Codec::None)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self { wire, raw_bytes: layout.raw_bytes() })
    }
}

#[pymethods]
impl BlockShape {
    #[new]
    fn new(dtype: &str, planes: u32, tokens: u32, channels: u32) -> PyResult<Self> {
        let number = DTYPES.iter().position(|&name| name == dtype).ok_or_else(|| {
            PyValueError::new_err(format!("unknown dtype {dtype:?}; one of {}", DTYPES.join(", ")))
        })?;
        Self::checked(wire::BlockShape { dtype: number as u8, planes, tokens, channels })
    }

    /// A block of bytes without structure.
    #[staticmethod]
    fn opaque(nbytes: u32) -> PyResult<Self> {
        Self::checked(wire::BlockShape { dtype: 0, planes: 1, tokens: 1, channels: nbytes })
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        DTYPES[self.wire.dtype as usize]
    }

    #[getter]
    fn planes(&self) -> u32 {
        self.wire.planes
    }

    #[getter]
    fn tokens(&self) -> u32 {
        self.wire.tokens
    }

    #[getter]
    fn channels(&self) -> u32 {
        self.wire.channels
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.raw_bytes
    }

    fn __repr__(&self) -> String {
        let wire::BlockShape { planes, tokens, channels, .. } = self.wire;
        format!("BlockShape({:?}, {planes}, {tokens}, {channels})", self.dtype())
    }
}
