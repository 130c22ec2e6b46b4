//! Arguments from Python: keys, buffers, timeouts.

use std::time::Duration;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::client::Deadline;
use crate::key::Key;

/// A block key: 32 bytes.
pub(super) fn key(object: &Bound<'_, PyAny>) -> PyResult<Key> {
    let bytes = object.cast::<PyBytes>()?.as_bytes();
    bytes.try_into().map_err(|_| {
        PyValueError::new_err(format!("a key has 32 bytes, not {}; see block_keys()", bytes.len()))
    })
}

/// A sequence of block keys.
pub(super) fn keys(sequence: &Bound<'_, PyAny>) -> PyResult<Vec<Key>> {
    sequence.try_iter()?.map(|item| key(&item?)).collect()
}

/// A sequence of parents: a key, or None for the first block of a chain.
pub(super) fn parents(sequence: &Bound<'_, PyAny>) -> PyResult<Vec<Option<Key>>> {
    let parent =
        |item: Bound<'_, PyAny>| if item.is_none() { Ok(None) } else { key(&item).map(Some) };
    sequence.try_iter()?.map(|item| parent(item?)).collect()
}

/// When a call with this timeout must have returned.
pub(super) fn deadline(timeout_s: f64) -> PyResult<Deadline> {
    Ok(Deadline::after(timeout(timeout_s)?))
}

/// A timeout in seconds, above 0.
pub(super) fn timeout(timeout_s: f64) -> PyResult<Duration> {
    if timeout_s > 0.0 {
        return Ok(Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::MAX));
    }
    Err(PyValueError::new_err(format!("timeout_s must be above 0, not {timeout_s}")))
}

/// Contiguous buffers of Python objects, held for the length of a call.
pub(super) struct Buffers(Vec<PyUntypedBuffer>);

impl Buffers {
    /// Borrow `count` buffers, one per key.
    pub(super) fn of(sequence: &Bound<'_, PyAny>, count: usize, writable: bool) -> PyResult<Self> {
        let mut buffers = Vec::with_capacity(count);
        for item in sequence.try_iter()? {
            let buffer = PyUntypedBuffer::get(&item?)?;
            if !buffer.is_c_contiguous() {
                return Err(PyBufferError::new_err("a block's buffer must be contiguous"));
            }
            if writable && buffer.readonly() {
                return Err(PyBufferError::new_err("a block is read into a writable buffer only"));
            }
            buffers.push(buffer);
        }
        if buffers.len() == count {
            return Ok(Self(buffers));
        }
        let got = buffers.len();
        Err(PyValueError::new_err(format!("{got} buffers for {count} keys; give one per key")))
    }

    /// Bytes of each, which are the same for all; 0 without any.
    pub(super) fn common_size(&self) -> PyResult<usize> {
        let size = self.0.first().map_or(0, PyUntypedBuffer::len_bytes);
        if self.0.iter().all(|buffer| buffer.len_bytes() == size) {
            return Ok(size);
        }
        Err(PyValueError::new_err("the buffers differ in size; blocks of a chain do not"))
    }

    /// Bytes to read.
    pub(super) fn slices(&self) -> Vec<&[u8]> {
        let slice = |buffer: &PyUntypedBuffer| match buffer.len_bytes() {
            0 => &[][..],
            // SAFETY: a contiguous buffer of that many bytes, kept alive by `self`. That no other
            // thread of the caller writes it meanwhile is part of put's contract.
            len => unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), len) },
        };
        self.0.iter().map(slice).collect()
    }

    /// Bytes to write. Buffers must not overlap.
    pub(super) fn slices_mut(&mut self) -> PyResult<Vec<&mut [u8]>> {
        let mut ranges: Vec<(usize, usize)> =
            self.0.iter().map(|buffer| (buffer.buf_ptr() as usize, buffer.len_bytes())).collect();
        ranges.sort_unstable();
        if ranges.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
            return Err(PyValueError::new_err("buffers overlap; give each key its own"));
        }
        let slice = |buffer: &PyUntypedBuffer| match buffer.len_bytes() {
            0 => &mut [][..],
            // SAFETY: a contiguous, writable buffer of that many bytes, kept alive by `self`, that
            // overlaps no other. That no other thread of the caller uses it meanwhile is part of
            // read_into's contract.
            len => unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast(), len) },
        };
        Ok(self.0.iter().map(slice).collect())
    }
}
