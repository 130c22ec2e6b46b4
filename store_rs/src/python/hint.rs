//! What a caller knows of its blocks' next use, as Python gives it.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::index;
use crate::wire::Caller;

const PRIORITY_MAX: i32 = 100;

/// See the stub.
#[pyclass(module = "mooncake_serve._store", frozen, eq, skip_from_py_object)]
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Hint(index::Hint);

#[pymethods]
impl Hint {
    #[new]
    #[pyo3(signature = (*, priority=0, session_end=false, expected_reuse_s=0))]
    fn new(priority: i32, session_end: bool, expected_reuse_s: u32) -> PyResult<Self> {
        if priority.abs() > PRIORITY_MAX {
            let message = format!("priority is {priority}; it goes from -100 to 100");
            return Err(PyValueError::new_err(message));
        }
        let priority = priority as i8;
        Ok(Self(index::Hint { priority, session_end, expected_reuse_s }))
    }

    #[getter]
    fn priority(&self) -> i8 {
        self.0.priority
    }

    #[getter]
    fn session_end(&self) -> bool {
        self.0.session_end
    }

    #[getter]
    fn expected_reuse_s(&self) -> u32 {
        self.0.expected_reuse_s
    }

    /// For pickle: a request carries its hint to the replica.
    fn __getnewargs_ex__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let named = PyDict::new(py);
        named.set_item("priority", self.0.priority)?;
        named.set_item("session_end", self.0.session_end)?;
        named.set_item("expected_reuse_s", self.0.expected_reuse_s)?;
        Ok((PyTuple::empty(py), named))
    }

    fn __repr__(&self) -> String {
        let index::Hint { priority, session_end, expected_reuse_s } = self.0;
        let end = if session_end { "True" } else { "False" };
        format!("Hint(priority={priority}, session_end={end}, expected_reuse_s={expected_reuse_s})")
    }
}

/// A tenant with what it says of its blocks.
pub(super) fn caller<'a>(tenant: &'a str, hint: Option<&Hint>) -> Caller<'a> {
    Caller { tenant, hint: hint.map_or(index::Hint::NONE, |hint| hint.0) }
}
