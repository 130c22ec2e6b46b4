//! Errors as the classes of `mooncake_serve.errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

use crate::error::{Error, ErrorKind};

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// The Python exception that stands for `error`.
pub(super) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    build(py, error).unwrap_or_else(|failed| failed)
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let module =
        ERRORS.get_or_try_init(py, || py.import("mooncake_serve.errors").map(Bound::unbind))?;
    let class = |name| module.bind(py).getattr(name);
    let message = error.message();
    let raised = match error.kind() {
        ErrorKind::Unavailable => class("StoreUnavailable")?.call1((message,))?,
        ErrorKind::Timeout => class("StoreTimeout")?.call1((message,))?,
        ErrorKind::Refused => class("StoreRefused")?.call1((message,))?,
        ErrorKind::Protocol => class("StoreProtocolError")?.call1((message,))?,
        ErrorKind::Config(field) => class("ConfigError")?.call1((field, message))?,
    };
    Ok(PyErr::from_value(raised))
}
