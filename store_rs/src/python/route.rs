//! `RoutePlanner`: which replica a request goes to.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyAny;

use super::arguments;
use super::client::StoreClient;
use super::cluster::ClusterIndex;
use super::errors::raise;
use crate::route::{Assumed, Choice, Router};

/// Where a request goes, and what that rests on.
#[pyclass(module = "mooncake_serve._store", frozen, get_all)]
pub(super) struct Route {
    replica: String,
    queue_s: f64,
    load_s: f64,
    prefill_s: f64,
    blocks: [u32; 4],
}

#[pymethods]
impl Route {
    #[getter]
    fn ttft_s(&self) -> f64 {
        self.queue_s + self.load_s + self.prefill_s
    }
}

/// The router of this process.
#[pyclass(module = "mooncake_serve._store", frozen)]
pub(super) struct RoutePlanner(Mutex<Router>);

impl RoutePlanner {
    fn router(&self) -> MutexGuard<'_, Router> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a planner can get its view from.
#[derive(FromPyObject)]
enum Source<'py> {
    Store(Bound<'py, StoreClient>),
    Index(Bound<'py, ClusterIndex>),
}

#[pymethods]
impl RoutePlanner {
    #[new]
    #[pyo3(signature = (
        *, slo_s=None, seed=0, token_s=1e-3, dram_bytes_per_s=5e9, peer_bytes_per_s=1e9
    ))]
    fn new(
        slo_s: Option<f64>,
        seed: u64,
        token_s: f64,
        dram_bytes_per_s: f64,
        peer_bytes_per_s: f64,
    ) -> Self {
        let assumed = Assumed { token_s, dram_bytes_per_s, peer_bytes_per_s };
        Self(Mutex::new(Router::new(assumed, slo_s, seed)))
    }

    fn set_model(&self, block_tokens: u32, token_bytes: f64) {
        self.router().set_model(block_tokens, token_bytes);
    }

    fn set_replicas(&self, running: HashMap<String, String>, now_s: f64) {
        let running: Vec<_> = running.into_iter().collect();
        self.router().set_replicas(&running, now_s);
    }

    fn drop_replica(&self, name: &str, now_s: f64) {
        self.router().drop_replica(name, now_s);
    }

    fn replicas(&self) -> Vec<String> {
        self.router().replicas().into_iter().map(str::to_owned).collect()
    }

    #[getter]
    fn wants_view(&self) -> bool {
        self.router().wants_view()
    }

    /// Read the cluster index of a client's store from now on; None goes without.
    #[pyo3(signature = (source, *, timeout_s=0.05))]
    fn set_view(&self, py: Python<'_>, source: Option<Source<'_>>, timeout_s: f64) -> PyResult<()> {
        let view = match source {
            None => None,
            Some(Source::Store(client)) => Some(client.get().view(py, timeout_s)?),
            Some(Source::Index(index)) => {
                Some(index.get().open().map_err(|error| raise(py, &error))?)
            }
        };
        self.router().set_view(view);
        Ok(())
    }

    #[pyo3(signature = (
        request, tokens, keys, now_s, *, only=None, prefer=None, avoid=Vec::new()
    ))]
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value)]
    fn plan(
        &self,
        py: Python<'_>,
        request: u64,
        tokens: u32,
        keys: &Bound<'_, PyAny>,
        now_s: f64,
        only: Option<String>,
        prefer: Option<String>,
        avoid: Vec<String>,
    ) -> PyResult<(Option<Route>, f64)> {
        let keys = arguments::keys(keys)?;
        let among = Choice { only: only.as_deref(), avoid: &avoid, prefer: prefer.as_deref() };
        let planned = py.detach(|| self.router().plan(request, tokens, &keys, among, now_s));
        Ok(match planned {
            Err(best_s) => (None, best_s),
            Ok(route) => {
                let ttft_s = route.queue_s + route.load_s + route.prefill_s;
                let crate::route::Route { replica, queue_s, load_s, prefill_s, blocks } = route;
                (Some(Route { replica, queue_s, load_s, prefill_s, blocks }), ttft_s)
            }
        })
    }

    fn first_token(&self, request: u64) {
        self.router().first_token(request);
    }

    fn end(&self, request: u64) {
        self.router().end(request);
    }

    fn outstanding(&self) -> HashMap<String, (u64, u64)> {
        let router = self.router();
        router.outstanding().into_iter().map(|(name, load)| (name.to_owned(), load)).collect()
    }

    fn queued_tokens(&self, now_s: f64) -> u64 {
        self.router().queued_tokens(now_s)
    }

    /// (fixed_s, token_s, attn_s) of prefill, and the bytes a second of memory and of peers.
    fn costs(&self) -> ((f64, f64, f64), f64, f64) {
        let router = self.router();
        let costs = router.costs();
        let rate = |tier: usize| costs.tiers[tier].bytes_per_s.unwrap_or(f64::INFINITY);
        let prefill = costs.prefill;
        ((prefill.fixed_s, prefill.token_s, prefill.attn_s), rate(1), rate(3))
    }
}
