//! `PeerSettings`: how a store meets others.

use std::path::PathBuf;

use pyo3::prelude::*;

use super::engine::PythonEngine;
use crate::error::Result;
use crate::peer::{Fabric, PeerSettings as Settings, Tcp, TlsFiles, Transport};

/// Settings of `StoreServer`'s peers.
#[pyclass(module = "mooncake_serve._store", frozen)]
pub(super) struct PeerSettings {
    pub(super) settings: Settings,
    engine: Option<Py<PyAny>>,
}

impl PeerSettings {
    /// How this store reaches others.
    pub(super) fn transport(&self, py: Python<'_>) -> PyResult<Result<Box<dyn Transport>>> {
        let Some(engine) = &self.engine else {
            return Ok(Tcp::new(&self.settings).map(|tcp| Box::new(tcp) as _));
        };
        let engine = Box::new(PythonEngine::new(engine.bind(py))?);
        Ok(Fabric::new(&self.settings, engine).map(|fabric| Box::new(fabric) as _))
    }
}

#[pymethods]
impl PeerSettings {
    #[new]
    #[pyo3(signature = (
        *, node, listen=None, token=None, tls_ca=None, tls_certificate=None, tls_key=None,
        tls_name="mooncake-peer", max_bytes_per_s=None, index_bytes=None,
        engine=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        node: String,
        listen: Option<String>,
        token: Option<Vec<u8>>,
        tls_ca: Option<PathBuf>,
        tls_certificate: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        tls_name: &str,
        max_bytes_per_s: Option<u64>,
        index_bytes: Option<u64>,
        engine: Option<Py<PyAny>>,
    ) -> Self {
        let tls = tls_ca.zip(tls_certificate).zip(tls_key).map(|((ca, certificate), key)| {
            TlsFiles { ca, certificate, key, name: tls_name.to_owned() }
        });
        let settings = Settings { node, listen, token, tls, max_bytes_per_s, index_bytes };
        Self { settings, engine }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.settings)
    }
}
