//! The PyO3 face: `mooncake_serve._store.policy`.
//!
//! Converts arguments, releases the GIL around simulations, and raises `ValueError` with the
//! message of the pure code. No logic of its own. Configurations, cost models and reports cross as
//! JSON, whose fields are those of [`Config`], [`Profile`], [`Costs`] and the report.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::de::DeserializeOwned;

use crate::route::{Costs, Decision, Load, Plan, Planner, Query, RouterKind, Row, Runs};
use crate::sim::trace::Trace;
use crate::sim::{Config, Profile, Shape, generate, simulate};

fn invalid(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn parse<T: DeserializeOwned>(what: &str, json: &str) -> PyResult<T> {
    serde_json::from_str(json).map_err(|error| invalid(format!("{what}: {error}")))
}

/// A parsed trace; simulate it as often as needed.
#[pyclass(name = "Trace", frozen, module = "mooncake_serve._store.policy")]
struct PyTrace(Trace);

#[pymethods]
impl PyTrace {
    #[staticmethod]
    fn parse(py: Python<'_>, text: &str, block_tokens: u32) -> PyResult<Self> {
        if block_tokens == 0 {
            return Err(invalid("block_tokens must be positive"));
        }
        py.detach(|| Trace::parse(text, block_tokens)).map(Self).map_err(invalid)
    }

    /// A trace of the shape of a chat service.
    #[staticmethod]
    #[pyo3(signature = (seed, requests, rate=None, block_tokens=512))]
    fn generate(
        seed: u64,
        requests: usize,
        rate: Option<f64>,
        block_tokens: u32,
    ) -> PyResult<Self> {
        let mut shape = Shape { requests, block_tokens, ..Shape::default() };
        shape.rate = rate.unwrap_or(shape.rate);
        if requests == 0 || block_tokens == 0 || !(shape.rate > 0.0 && shape.rate.is_finite()) {
            return Err(invalid("requests, rate and block_tokens must be positive"));
        }
        Ok(Self(generate(&shape, seed)))
    }

    fn to_text(&self) -> String {
        self.0.to_text()
    }

    #[getter]
    fn requests(&self) -> usize {
        self.0.requests.len()
    }

    #[getter]
    fn unique_blocks(&self) -> usize {
        self.0.unique_blocks
    }

    /// Run one configuration; the report as JSON.
    fn simulate(&self, py: Python<'_>, profile: &str, config: &str) -> PyResult<String> {
        let profile: Profile = parse("profile", profile)?;
        let config: Config = parse("config", config)?;
        let report = py.detach(|| simulate(&self.0, &profile, &config)).map_err(invalid)?;
        serde_json::to_string(&report).map_err(invalid)
    }
}

/// Where to send a request, and what that rests on.
#[pyclass(name = "Plan", frozen, get_all, module = "mooncake_serve._store.policy")]
struct PyPlan {
    replica: usize,
    queue_s: f64,
    load_s: f64,
    prefill_s: f64,
    /// Blocks reused from device, dram, nvme, peer.
    blocks: [u32; 4],
}

#[pymethods]
impl PyPlan {
    #[getter]
    fn ttft_s(&self) -> f64 {
        self.queue_s + self.load_s + self.prefill_s
    }

    fn __repr__(&self) -> String {
        let [device, dram, nvme, peer] = self.blocks;
        format!(
            "Plan(replica={}, queue_s={:.4}, load_s={:.4}, prefill_s={:.4}, device={device}, \
             dram={dram}, nvme={nvme}, peer={peer})",
            self.replica, self.queue_s, self.load_s, self.prefill_s
        )
    }
}

impl From<Plan> for PyPlan {
    fn from(plan: Plan) -> Self {
        Self {
            replica: plan.replica,
            queue_s: plan.queue_s,
            load_s: plan.reuse.load_s,
            prefill_s: plan.reuse.prefill_s,
            blocks: plan.reuse.blocks,
        }
    }
}

/// A router with its reservations; not shared between threads without a lock.
#[pyclass(name = "Planner", module = "mooncake_serve._store.policy")]
struct PyPlanner(Planner);

#[pymethods]
impl PyPlanner {
    #[new]
    #[pyo3(signature = (costs, *, router="ours", slo_s=None, seed=0, grace_s=0.0))]
    fn new(
        costs: &str,
        router: &str,
        slo_s: Option<f64>,
        seed: u64,
        grace_s: f64,
    ) -> PyResult<Self> {
        let costs: Costs = parse("costs", costs)?;
        let kind: RouterKind = router.parse().map_err(invalid)?;
        Ok(Self(Planner::new(kind.build(&costs, slo_s, seed), grace_s)))
    }

    fn set_costs(&mut self, costs: &str) -> PyResult<()> {
        self.0.set_costs(&parse("costs", costs)?);
        Ok(())
    }

    #[pyo3(signature = (replica, at_s, *, queue_s=0.0, prefill_tokens=0, waiting=0, requests=0,
                        active_blocks=0, accepting=true))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn report(
        &mut self,
        replica: usize,
        at_s: f64,
        queue_s: f64,
        prefill_tokens: u64,
        waiting: u32,
        requests: u32,
        active_blocks: u64,
        accepting: bool,
    ) {
        let load = Load { queue_s, prefill_tokens, waiting, requests, active_blocks, accepting };
        self.0.report(replica, Row { at_s, load });
    }

    /// The plan and its time to first token; without a plan the request must be refused, and the
    /// time is the best on offer.
    fn plan(
        &mut self,
        request: u64,
        tokens: u32,
        keys: Vec<u64>,
        runs: Vec<(u32, u32, u32)>,
        cluster_run: u32,
        now_s: f64,
    ) -> (Option<PyPlan>, f64) {
        let runs: Vec<Runs> =
            runs.into_iter().map(|(device, dram, nvme)| Runs::local(device, dram, nvme)).collect();
        let query = Query { tokens, keys: &keys };
        match self.0.plan(request, &query, &runs, cluster_run, now_s) {
            Decision::Go(plan) => (Some(plan.into()), plan.ttft_s()),
            Decision::Reject { best_s } => (None, best_s),
        }
    }

    fn cancel(&mut self, request: u64) {
        self.0.cancel(request);
    }
}

/// Add the submodule `policy` to `parent`.
///
/// # Errors
/// Whatever the interpreter raises while it builds the module.
pub fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let module = PyModule::new(parent.py(), "policy")?;
    module.add_class::<PyTrace>()?;
    module.add_class::<PyPlan>()?;
    module.add_class::<PyPlanner>()?;
    parent.add_submodule(&module)
}
