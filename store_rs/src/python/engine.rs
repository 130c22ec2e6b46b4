//! A transfer engine that a Python object drives; see `mooncake_serve.store.transfer_engine`.
//!
//! The one place where a thread of the store takes the GIL: once for each slot that it reads, and
//! the engine's own call gives it back while bytes move.

use std::io;
use std::time::Duration;

use pyo3::prelude::*;

use crate::peer::Engine;

/// See the module.
pub(super) struct PythonEngine {
    engine: Py<PyAny>,
    session: String,
}

impl PythonEngine {
    pub(super) fn new(engine: &Bound<'_, PyAny>) -> PyResult<Self> {
        let session = engine.getattr("session")?.extract()?;
        Ok(Self { engine: engine.clone().unbind(), session })
    }

    fn call<A>(&self, method: &str, arguments: A) -> io::Result<()>
    where
        A: for<'py> pyo3::call::PyCallArgs<'py>,
    {
        let called = Python::try_attach(|py| {
            let called = self.engine.bind(py).call_method1(method, arguments);
            called.map(|_| ()).map_err(|error| {
                let late = error.is_instance_of::<pyo3::exceptions::PyTimeoutError>(py);
                let kind = if late { io::ErrorKind::TimedOut } else { io::ErrorKind::Other };
                io::Error::new(kind, error.to_string())
            })
        });
        called.unwrap_or_else(|| Err(io::Error::other("Python is not running any more")))
    }
}

impl Engine for PythonEngine {
    fn session(&self) -> &str {
        &self.session
    }

    fn register(&self, start: usize, len: usize) -> io::Result<()> {
        self.call("register", (start, len))
    }

    fn read(
        &self,
        session: &str,
        source: u64,
        target: usize,
        len: usize,
        patience: Duration,
    ) -> io::Result<()> {
        self.call("read", (session, source, target, len, patience.as_secs_f64()))
    }
}
