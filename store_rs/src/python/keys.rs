//! Block keys from Python token ids.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::key;

/// Keys of the full blocks of `token_ids`.
#[pyfunction]
pub(super) fn block_keys<'py>(
    py: Python<'py>,
    namespace: &str,
    tenant_salt: &[u8],
    token_ids: &Bound<'py, PyAny>,
    block_tokens: usize,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    if block_tokens == 0 {
        return Err(PyValueError::new_err("block_tokens must be at least 1"));
    }
    let tokens = tokens(token_ids)?;
    let keys = py.detach(|| key::block_keys(namespace, tenant_salt, &tokens, block_tokens));
    Ok(keys.iter().map(|key| PyBytes::new(py, key)).collect())
}

/// Salt of a tenant's keys, derived from the cluster's secret.
#[pyfunction]
pub(super) fn tenant_salt<'py>(
    py: Python<'py>,
    cluster_secret: &[u8],
    tenant: &str,
) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &key::tenant_salt(cluster_secret, tenant))
}

fn tokens(object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let Ok(buffer) = PyUntypedBuffer::get(object) else {
        return object.extract().map_err(|error| {
            let message = format!("token_ids must be integers from 0 to 2^32-1: {error}");
            PyValueError::new_err(message)
        });
    };
    let py = object.py();
    // An empty buffer may point anywhere, which the typed views below refuse as misaligned.
    if buffer.item_count() == 0 {
        return Ok(Vec::new());
    }
    if let Ok(tokens) = buffer.as_typed::<u32>() {
        return tokens.to_vec(py);
    }
    if let Ok(tokens) = buffer.as_typed::<i32>() {
        return tokens.to_vec(py)?.into_iter().map(in_range).collect();
    }
    if let Ok(tokens) = buffer.as_typed::<i64>() {
        return tokens.to_vec(py)?.into_iter().map(in_range).collect();
    }
    let format = buffer.format().to_string_lossy().into_owned();
    Err(PyTypeError::new_err(format!(
        "token_ids hold {format:?}; use 32-bit or 64-bit integers or a sequence of int"
    )))
}

fn in_range(token: impl TryInto<u32> + Copy + std::fmt::Display) -> PyResult<u32> {
    token
        .try_into()
        .map_err(|_| PyValueError::new_err(format!("token id {token} is outside 0 to 2^32-1")))
}
