//! `StoreServer`: a store inside this process, on threads that never need the GIL.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::arguments;
use super::errors::raise;
use super::peer::PeerSettings;
use super::shape::{CODECS, DTYPES};
use crate::disk::DiskOptions;
use crate::error::Error;
use crate::index::{Eviction, Usage};
use crate::progress::Phase;
use crate::server::{CodecChoice, Options, Server};
use crate::wire::StatsReply;

/// A store; serves from `start` to `stop`.
#[pyclass(module = "mooncake_serve._store", frozen)]
pub(super) struct StoreServer {
    options: Options,
    peer: Option<Py<PeerSettings>>,
    server: Mutex<Option<Server>>,
}

impl StoreServer {
    fn server(&self) -> MutexGuard<'_, Option<Server>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running<T>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&Server) -> crate::error::Result<T> + Send,
    ) -> PyResult<T>
    where
        T: Send,
    {
        let answer = py.detach(|| match &*self.server() {
            Some(server) => ask(server),
            None => Err(Error::unavailable("this store is not running; call start()")),
        });
        answer.map_err(|error| raise(py, &error))
    }
}

impl Drop for StoreServer {
    /// Its threads may need the GIL to end, which whoever drops this holds.
    fn drop(&mut self) {
        let mut server = self.server().take();
        Python::try_attach(|py| py.detach(|| drop(server.take())));
    }
}

#[pymethods]
impl StoreServer {
    #[new]
    #[pyo3(signature = (
        *, socket, dram_bytes, ingest_bytes_max=67_108_864, max_sessions=128,
        ingest_bytes_total=None, index_bytes=None, max_leases=65_536, codec="none",
        eviction="ours", transcode_share=0.1, transcode_idle_s=2.0, peer=None, nvme_path=None, nvme_bytes=0,
        nvme_write_bytes_per_s=0, nvme_io_uring=true, tenant_bytes=None,
        tenant_nvme_bytes=None, nvme_codec=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        dram_bytes: u64,
        ingest_bytes_max: u64,
        max_sessions: usize,
        ingest_bytes_total: Option<u64>,
        index_bytes: Option<u64>,
        max_leases: usize,
        codec: &str,
        eviction: &str,
        transcode_share: f64,
        transcode_idle_s: f64,
        peer: Option<Py<PeerSettings>>,
        nvme_path: Option<PathBuf>,
        nvme_bytes: u64,
        nvme_write_bytes_per_s: u64,
        nvme_io_uring: bool,
        tenant_bytes: Option<u64>,
        tenant_nvme_bytes: Option<u64>,
        nvme_codec: Option<&str>,
    ) -> PyResult<Self> {
        let settings = peer.as_ref().map(|peer| peer.get().settings.clone());
        let codec = CodecChoice::from_name(codec).map_err(|error| raise(py, &error))?;
        let eviction = Eviction::from_name(eviction).map_err(|error| raise(py, &error))?;
        let transcode_idle = Duration::try_from_secs_f64(transcode_idle_s)
            .map_err(|error| PyValueError::new_err(format!("transcode_idle_s: {error}")))?;
        let disk_codec = nvme_codec.map(CodecChoice::from_name).transpose();
        let disk_codec = disk_codec.map_err(|error| raise(py, &error))?;
        let nvme = nvme_path.map(|path| DiskOptions {
            path,
            bytes: nvme_bytes,
            write_bytes_per_s: nvme_write_bytes_per_s,
            no_uring: !nvme_io_uring,
            codec: disk_codec,
        });
        let options = Options {
            socket,
            dram_bytes,
            ingest_bytes_max,
            ingest_bytes_total,
            index_bytes,
            max_sessions,
            max_leases,
            codec,
            eviction,
            transcode_share,
            transcode_idle,
            peer: settings.unwrap_or_default(),
            tenant_bytes,
            tenant_disk_bytes: tenant_nvme_bytes,
            nvme,
            progress: Arc::default(),
        };
        Ok(Self { options, peer, server: Mutex::new(None) })
    }

    /// Reserve memory, take the socket, serve. Does nothing if it runs already.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        let transport = self.peer.as_ref().map(|peer| peer.get().transport(py)).transpose()?;
        let started = py.detach(|| {
            let mut server = self.server();
            if server.is_none() {
                let options = self.options.clone();
                *server = Some(match transport {
                    Some(transport) => Server::start_over(options, Vec::new(), transport?)?,
                    None => Server::start(options)?,
                });
            }
            Ok(())
        });
        started.map_err(|error: Error| raise(py, &error))
    }

    /// Stop serving; with `drain`, answer first what has arrived. Does nothing if it is stopped.
    #[pyo3(signature = (drain=false))]
    fn stop(&self, py: Python<'_>, drain: bool) {
        py.detach(|| {
            if let Some(mut server) = self.server().take() {
                server.stop(drain);
            }
        });
    }

    /// Write to disk what is in DRAM only, where there is room: how many blocks went.
    #[pyo3(signature = (*, timeout_s=30.0))]
    fn drain(&self, py: Python<'_>, timeout_s: f64) -> PyResult<u64> {
        let limit = arguments::timeout(timeout_s)?;
        self.running(py, |server| server.drain(limit))
    }

    /// How far a start in another thread is: what takes long, what is done of it, and all of it.
    #[getter]
    fn starting(&self) -> (&'static str, u64, u64) {
        let (phase, done, total) = self.options.progress.read();
        let name = match phase {
            Phase::Quick => "",
            Phase::Reserving => "reserving",
            Phase::Recovering => "recovering",
        };
        (name, done, total)
    }

    /// What an operator should know about how this store runs here.
    #[getter]
    fn warnings(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.running(py, |server| Ok(server.warnings()))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, epoch) =
            self.running(py, |server| server.stats().map(|stats| (stats, server.epoch())))?;
        stats_dict(py, &stats, epoch, std::process::id())
    }

    /// Where other stores reach this one; None if it does not listen.
    #[getter]
    fn peer_address(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.running(py, |server| Ok(server.peer_address().map(str::to_owned)))
    }

    /// These are the peers from now on, by address.
    fn set_peers(&self, py: Python<'_>, addresses: Vec<String>) -> PyResult<()> {
        self.running(py, |server| server.set_peers(&addresses))
    }

    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.running(py, |server| Ok(server.epoch()))
    }

    #[getter]
    fn pid(&self) -> u32 {
        std::process::id()
    }

    #[getter]
    fn socket(&self) -> PathBuf {
        self.options.socket.clone()
    }

    /// Whether it serves: False before start, after stop, and after a broken invariant.
    #[getter]
    fn is_running(&self, py: Python<'_>) -> bool {
        py.detach(|| self.server().as_ref().is_some_and(Server::is_running))
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().start(slf.py())?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.stop(py, false);
    }
}

/// Counters by name, `tenants`: {name: {"bytes", "blocks"}}, and `usage`: a row for each tier,
/// element type and codec.
pub(super) fn stats_dict<'py>(
    py: Python<'py>,
    stats: &StatsReply,
    epoch: u64,
    pid: u32,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in &stats.values {
        dict.set_item(name, value)?;
    }
    dict.set_item("epoch", epoch)?;
    dict.set_item("pid", pid)?;
    let tenants = PyDict::new(py);
    for (name, bytes, blocks) in &stats.tenants {
        let row = PyDict::new(py);
        row.set_item("bytes", bytes)?;
        row.set_item("blocks", blocks)?;
        tenants.set_item(name, row)?;
    }
    dict.set_item("tenants", tenants)?;
    for (name, text) in &stats.texts {
        dict.set_item(name, text)?;
    }
    let usage = stats.usage.iter().map(|(tier, row)| usage_row(py, tier, row));
    dict.set_item("usage", usage.collect::<PyResult<Vec<_>>>()?)?;
    Ok(dict)
}

fn usage_row<'py>(py: Python<'py>, tier: &str, row: &Usage) -> PyResult<Bound<'py, PyDict>> {
    let name = |names: &[&'static str], number: u8| names.get(usize::from(number)).copied();
    let dict = PyDict::new(py);
    dict.set_item("tier", tier)?;
    dict.set_item("dtype", name(&DTYPES, row.dtype))?;
    dict.set_item("codec", name(&CODECS, row.codec))?;
    for (name, value) in [
        ("blocks", row.blocks),
        ("logical_bytes", row.logical),
        ("shared_saved_bytes", row.shared_saved),
        ("codec_saved_bytes", row.codec_saved),
        ("metadata_bytes", row.metadata),
        ("rounding_bytes", row.rounding),
        ("physical_bytes", row.physical),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}
