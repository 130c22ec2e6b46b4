//! `ClusterView`: the cluster index, read in place.

use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict};

use super::arguments;
use crate::cluster::{ClusterView as View, NodeRow, Runs};

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

    /// Stores by name: whether each is alive, and the measured rate and latency of fetches.
    fn nodes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let nodes = PyDict::new(py);
        for (_, NodeRow { name, alive, bytes_per_s, latency_s }) in self.0.nodes() {
            nodes.set_item(name, (alive, bytes_per_s, latency_s))?;
        }
        Ok(nodes)
    }

    /// Replicas by name: what each said last.
    fn replicas<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let names = self.0.nodes();
        let replicas = PyDict::new(py);
        for row in self.0.replicas() {
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
