//! Paged attention for an engine that keeps its own tensors.

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

use pyo3::{exceptions::PyValueError, prelude::*};

use super::values;
use crate::{Dtype, Error, FINGERPRINT, Geometry, Isa, Pool, Span, attention, error::require};

/// Teams of the stateless functions, one for each thread count that was asked for.
static TEAMS: LazyLock<Mutex<HashMap<usize, Arc<Pool>>>> = LazyLock::new(Mutex::default);

fn team(threads: usize) -> Result<Arc<Pool>, Error> {
    require!((1..=256).contains(&threads), "threads {threads} is not between 1 and 256");
    let mut teams = TEAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(team) = teams.get(&threads) {
        return Ok(Arc::clone(team));
    }
    let team = Arc::new(Pool::new(threads)?);
    teams.insert(threads, Arc::clone(&team));
    Ok(team)
}

/// A pool's layer and the attention that reads it; the same for every call of one layer.
#[pyclass(frozen, module = "mooncake_serve._store.cpu")]
pub(super) struct PagedAttention {
    geometry: Geometry,
    isa: Isa,
    team: Arc<Pool>,
}

#[pymethods]
impl PagedAttention {
    #[new]
    #[pyo3(signature = (*, heads, kv_heads, head_dim, block_tokens, blocks, block_bytes, dtype,
                        scale, threads, isa=None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        block_tokens: usize,
        blocks: usize,
        block_bytes: usize,
        dtype: &str,
        scale: f32,
        threads: usize,
        isa: Option<&str>,
    ) -> PyResult<Self> {
        let dtype = Dtype::parse(dtype)?;
        let geometry = Geometry {
            heads,
            kv_heads,
            head_dim,
            block_tokens,
            blocks,
            block_bytes,
            k_offset: 0,
            v_offset: 0,
            dtype,
            scale,
        };
        geometry.check()?;
        Ok(Self { geometry, isa: Isa::choose(isa)?, team: team(threads)? })
    }

    /// What decides the bits: kernels and instruction set.
    #[getter]
    fn numerics_id(&self) -> String {
        format!("{FINGERPRINT}-{}", self.isa.name())
    }

    /// One query row for each sequence; see `_store.pyi`.
    #[pyo3(signature = (*, query, out, pool, k_offset, v_offset, tables, table_width, lengths,
                        rows))]
    #[allow(clippy::too_many_arguments)]
    fn decode(
        &self,
        py: Python<'_>,
        query: usize,
        out: usize,
        pool: usize,
        k_offset: usize,
        v_offset: usize,
        tables: usize,
        table_width: usize,
        lengths: usize,
        rows: usize,
    ) -> PyResult<()> {
        if rows == 0 {
            return Ok(());
        }
        require_addresses(&[query, out, pool])?;
        let entries = rows.checked_mul(table_width).filter(|n| *n > 0 && *n <= 1 << 31);
        let Some(entries) = entries else {
            return Err(PyValueError::new_err("the tables are empty or too large"));
        };
        // SAFETY: the caller's addresses hold what the documented shapes say.
        let (tables, lengths) =
            unsafe { (values::<i32>(tables, entries)?, values::<i32>(lengths, rows)?) };
        let spans: Vec<_> = std::iter::zip(lengths, tables.chunks_exact(table_width))
            .enumerate()
            .map(|(row, (&length, table))| Span {
                table,
                first_row: row,
                rows: 1,
                visible: usize::try_from(length).unwrap_or(0),
            })
            .collect();
        self.attend(py, &spans, query, out, pool, k_offset, v_offset)
    }

    /// The rows of one sequence's chunk, causal; see `_store.pyi`.
    #[pyo3(signature = (*, query, out, pool, k_offset, v_offset, table, table_width, start, rows))]
    #[allow(clippy::too_many_arguments)]
    fn prefill(
        &self,
        py: Python<'_>,
        query: usize,
        out: usize,
        pool: usize,
        k_offset: usize,
        v_offset: usize,
        table: usize,
        table_width: usize,
        start: usize,
        rows: usize,
    ) -> PyResult<()> {
        if rows == 0 {
            return Ok(());
        }
        require_addresses(&[query, out, pool])?;
        if start > 1 << 30 || rows > 1 << 30 {
            return Err(PyValueError::new_err("start or rows is too large"));
        }
        // SAFETY: the caller's address holds `table_width` entries.
        let table = unsafe { values::<i32>(table, table_width)? };
        let span = Span { table, first_row: 0, rows, visible: start + 1 };
        self.attend(py, &[span], query, out, pool, k_offset, v_offset)
    }
}

impl PagedAttention {
    #[allow(clippy::too_many_arguments)]
    fn attend(
        &self,
        py: Python<'_>,
        spans: &[Span<'_>],
        query: usize,
        out: usize,
        pool: usize,
        k_offset: usize,
        v_offset: usize,
    ) -> PyResult<()> {
        let geometry = Geometry { k_offset, v_offset, ..self.geometry };
        py.detach(|| {
            let (query, out) = (query as *const c_void, out as *mut c_void);
            // SAFETY: the caller's addresses hold what the documented shapes say.
            unsafe {
                attention::attend(
                    &geometry,
                    spans,
                    query,
                    out,
                    pool as *const u8,
                    self.isa,
                    &self.team,
                )
            }
        })?;
        Ok(())
    }
}

fn require_addresses(addresses: &[usize]) -> Result<(), Error> {
    require!(addresses.iter().all(|a| *a != 0), "a null address");
    Ok(())
}
