//! `ClusterView`, the cluster index read in place, and `ClusterIndex`, one without a store.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict};

use super::arguments;
use super::errors::raise;
use crate::cluster::{Cluster, ClusterView as View, Load, NodeRow, Runs};
use crate::error::{Error, Result};
use crate::index::{Entry, Tier};
use crate::key::KEY_BYTES;

/// The cluster index of this node's store.
#[pyclass(module = "mooncake_serve._store", frozen)]
pub(super) struct ClusterView(pub(super) View);

#[pymethods]
impl ClusterView {
    #[getter]
    fn moved(&self) -> bool {
        self.0.moved()
    }

    #[getter]
    fn entries(&self) -> u64 {
        self.0.entries()
    }

    /// Per node, by name: leading blocks in memory, in memory or on disk; and over all nodes.
    fn longest_prefix<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<(Bound<'py, PyDict>, u32)> {
        let keys = arguments::keys(keys)?;
        let mut runs = Runs::default();
        py.detach(|| self.0.runs(&keys, &mut runs));
        let by_node = PyDict::new(py);
        if !runs.nodes.is_empty() {
            let names = self.0.nodes();
            for run in &runs.nodes {
                if let Some((_, row)) = names.iter().find(|(at, _)| *at == run.node) {
                    by_node.set_item(&row.name, (run.dram, run.nvme))?;
                }
            }
        }
        Ok((by_node, runs.cluster))
    }

    /// Leading blocks in the pool of each replica that has the first, by name.
    fn pooled_prefix<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let keys = arguments::keys(keys)?;
        let mut runs = Runs::default();
        py.detach(|| self.0.runs(&keys, &mut runs));
        let by_replica = PyDict::new(py);
        let rows = self.0.replicas();
        for run in &runs.pools {
            if let Some((_, row)) = rows.iter().find(|(at, _)| *at == run.replica) {
                by_replica.set_item(&row.load.name, run.blocks)?;
            }
        }
        Ok(by_replica)
    }

    /// Stores by name: whether each is alive, and the measured rate and latency of fetches.
    fn nodes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let nodes = PyDict::new(py);
        for (_, NodeRow { name, alive, from, .. }) in self.0.nodes() {
            nodes.set_item(name, (alive, from.bytes_per_s, from.latency_s))?;
        }
        Ok(nodes)
    }

    /// Replicas by name: what each said last.
    fn replicas<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let names = self.0.nodes();
        let replicas = PyDict::new(py);
        for (_, row) in self.0.replicas() {
            let node = names.iter().find(|(at, _)| *at == row.node).map(|(_, node)| &node.name);
            let entry = PyDict::new(py);
            entry.set_item("node", node)?;
            entry.set_item("at_s", row.at_us as f64 / 1e6)?;
            entry.set_item("prefill_tokens", row.load.prefill_tokens)?;
            entry.set_item("waiting", row.load.waiting)?;
            entry.set_item("running", row.load.running)?;
            entry.set_item("free_blocks", row.load.free_blocks)?;
            entry.set_item("prefill", row.load.prefill)?;
            entry.set_item("load_bytes_per_s", row.load.load_bytes_per_s)?;
            replicas.set_item(row.load.name, entry)?;
        }
        Ok(replicas)
    }
}

/// An index that no store feeds: for benchmarks and tests of routing.
#[pyclass(module = "mooncake_serve._store", frozen)]
pub(super) struct ClusterIndex(Mutex<Cluster>);

impl ClusterIndex {
    fn cluster(&self) -> MutexGuard<'_, Cluster> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Map it.
    pub(super) fn open(&self) -> Result<View> {
        let cluster = self.cluster();
        let (fd, bytes) = cluster.fd();
        let fd = fd.try_clone_to_owned().map_err(|error| Error::io("keep an fd", error))?;
        View::open(fd, bytes)
    }
}

#[pymethods]
impl ClusterIndex {
    #[new]
    #[pyo3(signature = (node, *, bytes_max=268_435_456))]
    fn new(py: Python<'_>, node: &str, bytes_max: u64) -> PyResult<Self> {
        let cluster = Cluster::new(node, bytes_max).map_err(|error| raise(py, &error))?;
        Ok(Self(Mutex::new(cluster)))
    }

    /// Memory it takes.
    #[getter]
    fn size_bytes(&self) -> u64 {
        self.cluster().fd().1
    }

    fn join(&self, py: Python<'_>, node: &str) -> PyResult<u16> {
        self.cluster().join(node).map_err(|error| raise(py, &error))
    }

    fn leave(&self, node: u16) {
        self.cluster().leave(node);
    }

    /// `keys` are 32 bytes each, one after the other; `tier` 0 is memory, 1 disk, 255 gone.
    fn apply(&self, py: Python<'_>, node: u16, keys: &[u8], tier: u8) -> PyResult<()> {
        let wrong = || PyValueError::new_err("keys have 32 bytes each, tiers are 0, 1 or 255");
        let tier = Tier::from_u8(tier).ok_or_else(wrong)?;
        let (keys, rest) = keys.as_chunks::<KEY_BYTES>();
        if !rest.is_empty() {
            return Err(wrong());
        }
        let applied = py.detach(|| {
            let entries: Vec<_> = keys.iter().map(|key| Entry::new(key, tier)).collect();
            self.cluster().apply(node, &entries, 0)
        });
        applied.map_err(|error| raise(py, &error))
    }

    fn report(&self, node: u16, replica: String, prefill_tokens: u32, token_s: f32, at_s: f64) {
        let prefill = [0.0, token_s, 0.0];
        let (name, accepting) = (replica, true);
        let load = Load { name, prefill_tokens, prefill, accepting, ..Load::default() };
        self.cluster().report(node, load, (at_s * 1e6) as u64);
    }

    fn report_pool(&self, py: Python<'_>, node: u16, replica: &str, keys: &[u8]) -> PyResult<()> {
        let (keys, rest) = keys.as_chunks::<KEY_BYTES>();
        if !rest.is_empty() {
            return Err(PyValueError::new_err("keys have 32 bytes each"));
        }
        let entries: Vec<_> = keys.iter().map(|key| Entry::new(key, Tier::Pool)).collect();
        let reported = self.cluster().report_pool(node, replica, true, &entries, 0);
        reported.map_err(|error| raise(py, &error))
    }

    fn view(&self, py: Python<'_>) -> PyResult<ClusterView> {
        self.open().map(ClusterView).map_err(|error| raise(py, &error))
    }
}
