//! `Reading`: blocks that arrive in buffers plane by plane.

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::arguments::Buffers;
use super::client::count_origins;
use crate::client::{self, Deadline};

/// The blocks, and where they go.
struct Open {
    blocks: client::Reading,
    buffers: Buffers,
}

/// Leased blocks on their way into buffers; ends at `close`, at the end of `with`, or with the
/// object.
#[pyclass(module = "mooncake_serve._store", frozen)]
pub(super) struct Reading {
    open: Mutex<Option<Open>>,
    deadline: Deadline,
}

impl Reading {
    pub(super) fn new(blocks: client::Reading, buffers: Buffers, deadline: Deadline) -> Self {
        Self { open: Mutex::new(Some(Open { blocks, buffers })), deadline }
    }
}

#[pymethods]
impl Reading {
    fn __len__(&self) -> usize {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().map_or(0, |open| open.blocks.blocks())
    }

    /// How many of them came from each tier.
    fn origins<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = PyDict::new(py);
        if let Some(open) = open.as_ref() {
            count_origins(&counts, open.blocks.origins())?;
        }
        Ok(counts)
    }

    /// Copy planes [first, end) of every block, verified; how many blocks are left.
    fn read_planes(&self, py: Python<'_>, first: u32, end: u32) -> PyResult<usize> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let closed = || PyValueError::new_err("this reading was closed");
        let Open { blocks, buffers } = open.as_mut().ok_or_else(closed)?;
        let mut slices = buffers.slices_mut()?;
        let deadline = self.deadline;
        Ok(py.detach(|| blocks.read_planes(&(first..end), &mut slices, deadline)))
    }

    /// End the leases; again is harmless.
    fn close(&self, py: Python<'_>) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Open { blocks, .. }) = open {
            py.detach(|| drop(blocks));
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}
