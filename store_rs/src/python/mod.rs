//! The PyO3 face: `mooncake_serve._store`.
//!
//! Converts arguments, releases the GIL around every call that may wait or copy, and turns errors
//! into the classes of `mooncake_serve.errors`. No logic of its own. The stub `_store.pyi` beside
//! the Python package documents it; a test compares the two.

mod arguments;
mod client;
mod cluster;
mod engine;
mod errors;
mod hint;
mod keys;
mod lease;
mod peer;
mod reading;
mod route;
mod server;
mod shape;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
fn _store(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<client::StoreClient>()?;
    module.add_class::<cluster::ClusterIndex>()?;
    module.add_class::<cluster::ClusterView>()?;
    module.add_class::<hint::Hint>()?;
    module.add_class::<lease::Lease>()?;
    module.add_class::<peer::PeerSettings>()?;
    module.add_class::<route::Route>()?;
    module.add_class::<route::RoutePlanner>()?;
    module.add_class::<reading::Reading>()?;
    module.add_class::<server::StoreServer>()?;
    module.add_class::<shape::BlockShape>()?;
    module.add_function(wrap_pyfunction!(keys::block_keys, module)?)?;
    module.add_function(wrap_pyfunction!(keys::tenant_salt, module)?)?;
    mooncake_codec::python::register(module)?;
    mooncake_kernels::python::register(module)?;
    mooncake_policy::python::register(module)
}
