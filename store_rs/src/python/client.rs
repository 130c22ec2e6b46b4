//! `StoreClient`: the blocking client.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::arguments::{self, Buffers};
use super::cluster::ClusterView;
use super::errors::raise;
use super::hint::{Hint, caller};
use super::lease::Lease;
use super::reading::Reading;
use super::server::stats_dict;
use super::shape::BlockShape;
use crate::client::{Client, Deadline, PutBlock};
use crate::cluster::{Load, REPLICA_NAME_MAX};
use crate::error::{Error, Result};
use crate::key::Key;
use crate::wire::{ListRow, Origin, PIN_HARD};

/// A block's key and its parent's.
type Link<'py> = (Bound<'py, PyBytes>, Option<Bound<'py, PyBytes>>);

/// A connection to the store of this node.
#[pyclass(module = "mooncake_serve._store", frozen)]
pub(super) struct StoreClient {
    client: RwLock<Option<Arc<Client>>>,
    timeout_s: f64,
    epoch: u64,
    server_pid: u32,
}

impl StoreClient {
    fn client(&self) -> Result<Arc<Client>> {
        let client = self.client.read().unwrap_or_else(PoisonError::into_inner).clone();
        client.ok_or_else(|| Error::unavailable("this client was closed; connect again"))
    }

    /// The cluster index, mapped.
    pub(super) fn view(
        &self,
        py: Python<'_>,
        timeout_s: f64,
    ) -> PyResult<crate::cluster::ClusterView> {
        self.call(py, Some(timeout_s), |client, deadline| client.cluster(deadline))
    }

    /// Make one call without the GIL.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        timeout_s: Option<f64>,
        call: impl FnOnce(&Client, Deadline) -> Result<T> + Send,
    ) -> PyResult<T> {
        let deadline = arguments::deadline(timeout_s.unwrap_or(self.timeout_s))?;
        let outcome = self.client().and_then(|client| py.detach(|| call(&client, deadline)));
        outcome.map_err(|error| raise(py, &error))
    }
}

#[pymethods]
impl StoreClient {
    #[staticmethod]
    #[pyo3(signature = (socket, *, ingest_bytes=67_108_864, prefault=false, timeout_s=5.0))]
    fn connect(
        py: Python<'_>,
        socket: PathBuf,
        ingest_bytes: u64,
        prefault: bool,
        timeout_s: f64,
    ) -> PyResult<Self> {
        let timeout = arguments::timeout(timeout_s)?;
        let client = py
            .detach(|| Client::connect(&socket, ingest_bytes, prefault, timeout))
            .map_err(|error| raise(py, &error))?;
        let (epoch, server_pid) = (client.epoch(), client.server_pid());
        Ok(Self { client: RwLock::new(Some(Arc::new(client))), timeout_s, epoch, server_pid })
    }

    #[pyo3(name = "match", signature = (keys, tenant="", *, hint=None, timeout_s=None))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        tenant: &str,
        hint: Option<&Hint>,
        timeout_s: Option<f64>,
    ) -> PyResult<usize> {
        let (keys, caller) = (arguments::keys(keys)?, caller(tenant, hint));
        self.call(py, timeout_s, |client, deadline| client.match_prefix(&keys, caller, deadline))
    }

    #[pyo3(signature = (keys, tenant="", *, hint=None, timeout_s=None))]
    fn lease(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        tenant: &str,
        hint: Option<&Hint>,
        timeout_s: Option<f64>,
    ) -> PyResult<Vec<Option<Lease>>> {
        let (keys, caller) = (arguments::keys(keys)?, caller(tenant, hint));
        let leases =
            self.call(py, timeout_s, |client, deadline| client.lease(&keys, caller, deadline))?;
        let pairs = keys.into_iter().zip(leases);
        Ok(pairs.map(|(key, lease)| lease.and_then(|lease| Lease::new(key, lease))).collect())
    }

    #[pyo3(signature = (keys, buffers, tenant="", *, hint=None, threads=1, timeout_s=None, origins=None))]
    #[allow(clippy::too_many_arguments)]
    fn read_into(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        tenant: &str,
        hint: Option<&Hint>,
        threads: usize,
        timeout_s: Option<f64>,
        origins: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<usize> {
        let (keys, caller) = (arguments::keys(keys)?, caller(tenant, hint));
        let mut buffers = Buffers::of(buffers, keys.len(), true)?;
        let mut slices = buffers.slices_mut()?;
        let mut seen = Vec::new();
        let read = self.call(py, timeout_s, |client, deadline| {
            client.read_noting(&keys, &mut slices, threads, caller, deadline, |origin| {
                seen.push(origin)
            })
        })?;
        if let Some(origins) = origins {
            count_origins(origins, seen)?;
        }
        Ok(read)
    }

    #[pyo3(signature = (keys, buffers, tenant="", *, hint=None, threads=1, timeout_s=None))]
    #[allow(clippy::too_many_arguments)]
    fn open(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        tenant: &str,
        hint: Option<&Hint>,
        threads: usize,
        timeout_s: Option<f64>,
    ) -> PyResult<Reading> {
        let (keys, caller) = (arguments::keys(keys)?, caller(tenant, hint));
        let buffers = Buffers::of(buffers, keys.len(), true)?;
        let nbytes = buffers.common_size()?;
        let deadline = arguments::deadline(timeout_s.unwrap_or(self.timeout_s))?;
        let reading = self.call(py, timeout_s, |client, deadline| {
            client.open(&keys, nbytes, threads, caller, deadline)
        })?;
        Ok(Reading::new(reading, buffers, deadline))
    }

    #[pyo3(signature = (keys, parents, buffers, shape, tenant="", *, hint=None, timeout_s=None))]
    #[allow(clippy::too_many_arguments)]
    fn put(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        parents: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        shape: &BlockShape,
        tenant: &str,
        hint: Option<&Hint>,
        timeout_s: Option<f64>,
    ) -> PyResult<Vec<&'static str>> {
        let (keys, caller) = (arguments::keys(keys)?, caller(tenant, hint));
        let parents = arguments::parents(parents)?;
        let buffers = Buffers::of(buffers, keys.len(), false)?;
        let slices = buffers.slices();
        if parents.len() != keys.len() {
            let message = format!("{} parents for {} keys", parents.len(), keys.len());
            return Err(PyValueError::new_err(message));
        }
        if let Some(wrong) = slices.iter().find(|bytes| bytes.len() != shape.raw_bytes) {
            let (have, want) = (wrong.len(), shape.raw_bytes);
            let message = format!("a buffer holds {have} bytes, the shape says {want}");
            return Err(PyValueError::new_err(message));
        }
        let blocks = keys.into_iter().zip(parents).zip(slices);
        let blocks: Vec<_> =
            blocks.map(|((key, parent), bytes)| PutBlock { key, parent, bytes }).collect();
        let statuses = self.call(py, timeout_s, |client, deadline| {
            client.put(&blocks, shape.wire, caller, deadline)
        })?;
        Ok(statuses.into_iter().map(|status| status.text()).collect())
    }

    #[pyo3(signature = (keys, *, timeout_s=None))]
    fn evict(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        timeout_s: Option<f64>,
    ) -> PyResult<usize> {
        let keys = arguments::keys(keys)?;
        self.call(py, timeout_s, |client, deadline| client.evict(&keys, deadline))
    }

    #[pyo3(signature = (*, timeout_s=None))]
    fn blocks<'py>(&self, py: Python<'py>, timeout_s: Option<f64>) -> PyResult<Vec<Link<'py>>> {
        let blocks = self.call(py, timeout_s, |client, deadline| client.blocks(deadline))?;
        let bytes = |key: &Key| PyBytes::new(py, key);
        let pair = |(key, parent): &(Key, Option<Key>)| (bytes(key), parent.as_ref().map(bytes));
        Ok(blocks.iter().map(pair).collect())
    }

    #[pyo3(signature = (*, timeout_s=None))]
    fn stats<'py>(&self, py: Python<'py>, timeout_s: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.call(py, timeout_s, |client, deadline| client.stats(deadline))?;
        stats_dict(py, &stats, self.epoch, self.server_pid)
    }

    #[pyo3(signature = (*, timeout_s=None))]
    fn cluster(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<ClusterView> {
        self.call(py, timeout_s, |client, deadline| client.cluster(deadline)).map(ClusterView)
    }

    #[pyo3(signature = (
        replica, *, prefill_tokens=0, waiting=0, running=0, free_blocks=0,
        prefill=[0.0; 3], load_bytes_per_s=0.0, accepting=true
    ))]
    #[allow(clippy::too_many_arguments)]
    fn report(
        &self,
        py: Python<'_>,
        replica: String,
        prefill_tokens: u32,
        waiting: u16,
        running: u16,
        free_blocks: u32,
        prefill: [f32; 3],
        load_bytes_per_s: f32,
        accepting: bool,
    ) -> PyResult<()> {
        if replica.is_empty() || replica.len() > REPLICA_NAME_MAX {
            let message = format!("a replica's name has 1 to {REPLICA_NAME_MAX} bytes");
            return Err(PyValueError::new_err(message));
        }
        let load = Load {
            name: replica,
            prefill_tokens,
            waiting,
            running,
            free_blocks,
            prefill,
            load_bytes_per_s,
            accepting,
        };
        self.call(py, None, |client, _| client.report(&load))
    }

    #[pyo3(signature = (replica, added, removed, *, anew=false))]
    fn report_pool(
        &self,
        py: Python<'_>,
        replica: &str,
        added: &Bound<'_, PyAny>,
        removed: &Bound<'_, PyAny>,
        anew: bool,
    ) -> PyResult<()> {
        let (added, removed) = (arguments::keys(added)?, arguments::keys(removed)?);
        self.call(py, None, |client, _| client.report_pool(replica, anew, &added, &removed))
    }

    #[pyo3(signature = (*, timeout_s=None))]
    fn drain(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<usize> {
        self.call(py, timeout_s, |client, deadline| client.drain(deadline))
    }

    #[pyo3(signature = (*, timeout_s=None))]
    fn list<'py>(
        &self,
        py: Python<'py>,
        timeout_s: Option<f64>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let rows = self.call(py, timeout_s, |client, deadline| client.list(deadline))?;
        rows.iter().map(|row| listed(py, row)).collect()
    }

    #[pyo3(signature = (*, timeout_s=None))]
    fn verify<'py>(&self, py: Python<'py>, timeout_s: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let done = self.call(py, timeout_s, |client, deadline| client.verify(deadline))?;
        let dict = PyDict::new(py);
        dict.set_item("checked", done.checked)?;
        dict.set_item("corrupt", done.corrupt)?;
        dict.set_item("bytes", done.bytes)?;
        Ok(dict)
    }

    #[pyo3(signature = (keys, ttl_s=None, *, timeout_s=None))]
    fn pin(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        ttl_s: Option<u32>,
        timeout_s: Option<f64>,
    ) -> PyResult<usize> {
        let keys = arguments::keys(keys)?;
        let seconds = ttl_s.map_or(PIN_HARD, |seconds| seconds.clamp(1, PIN_HARD - 1));
        self.call(py, timeout_s, |client, deadline| client.pin(&keys, seconds, deadline))
    }

    #[pyo3(signature = (keys, *, timeout_s=None))]
    fn unpin(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        timeout_s: Option<f64>,
    ) -> PyResult<usize> {
        let keys = arguments::keys(keys)?;
        self.call(py, timeout_s, |client, deadline| client.pin(&keys, 0, deadline))
    }

    #[pyo3(signature = (*, timeout_s=None))]
    fn cool(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<usize> {
        self.call(py, timeout_s, |client, deadline| client.cool(deadline))
    }

    #[pyo3(signature = (*, timeout_s=None))]
    fn ping(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        self.call(py, timeout_s, |client, deadline| client.ping(deadline))
    }

    #[getter]
    fn server_pid(&self) -> u32 {
        self.server_pid
    }

    #[getter]
    fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Let go of the store. Leases stay valid until they are released.
    fn close(&self, py: Python<'_>) {
        let client = self.client.write().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(client));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

/// Count blocks in `counts` under the names of the tiers they were in.
pub(super) fn count_origins(
    counts: &Bound<'_, PyDict>,
    origins: impl IntoIterator<Item = Origin>,
) -> PyResult<()> {
    for origin in origins {
        let name = origin.name();
        let before = counts.get_item(name)?.map_or(Ok(0), |count| count.extract::<usize>())?;
        counts.set_item(name, before + 1)?;
    }
    Ok(())
}

fn listed<'py>(py: Python<'py>, row: &ListRow) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("key", PyBytes::new(py, &row.key))?;
    dict.set_item("dram_bytes", row.dram_bytes)?;
    dict.set_item("nvme_bytes", row.disk_bytes)?;
    dict.set_item("leases", row.leases)?;
    dict.set_item("tenant", row.tenant)?;
    dict.set_item("idle_s", row.idle_us as f64 / 1e6)?;
    dict.set_item("pinned", row.pinned)?;
    Ok(dict)
}
