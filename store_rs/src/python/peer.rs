//! `PeerSettings`: how a store meets others.

use std::path::PathBuf;

use pyo3::prelude::*;

use crate::peer::{PeerSettings as Settings, TlsFiles};

/// Settings of `StoreServer`'s peers.
#[pyclass(module = "mooncake_serve._store", frozen)]
pub(super) struct PeerSettings(pub(super) Settings);

#[pymethods]
impl PeerSettings {
    #[new]
    #[pyo3(signature = (
        *, node, listen=None, token=None, tls_ca=None, tls_certificate=None, tls_key=None,
        tls_name="mooncake-peer", max_bytes_per_s=None, index_bytes=None
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
    ) -> Self {
        let tls = tls_ca.zip(tls_certificate).zip(tls_key).map(|((ca, certificate), key)| {
            TlsFiles { ca, certificate, key, name: tls_name.to_owned() }
        });
        Self(Settings { node, listen, token, tls, max_bytes_per_s, index_bytes })
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
