//! A native model for Python: load weights, reserve a pool, run forwards.

use std::{
    ffi::c_int,
    sync::{Arc, Mutex, PoisonError},
};

use pyo3::{exceptions::PyValueError, ffi, prelude::*};

use super::values;
use crate::{FINGERPRINT, Isa, Item, KvPool, Loader, Model, Shape};

/// Takes a model's weights one by one; see `_store.pyi`.
#[pyclass(frozen, module = "mooncake_serve._store.cpu")]
pub(super) struct ModelLoader {
    loader: Mutex<Option<Loader>>,
}

impl ModelLoader {
    fn with<T>(&self, work: impl FnOnce(&mut Loader) -> crate::Result<T>) -> PyResult<T> {
        let mut guard = self.loader.lock().unwrap_or_else(PoisonError::into_inner);
        let loader = guard.as_mut();
        let loader = loader.ok_or_else(|| PyValueError::new_err("the model is already built"))?;
        Ok(work(loader)?)
    }
}

#[pymethods]
impl ModelLoader {
    #[new]
    #[pyo3(signature = (*, layers, hidden, heads, kv_heads, head_dim, inner, vocab, max_context,
                        block_tokens, eps, tied, qkv_bias, out_bias, qk_norm, threads, isa=None))]
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools)]
    fn new(
        layers: usize,
        hidden: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        inner: usize,
        vocab: usize,
        max_context: usize,
        block_tokens: usize,
        eps: f32,
        tied: bool,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: bool,
        threads: usize,
        isa: Option<&str>,
    ) -> PyResult<Self> {
        let shape = Shape {
            layers,
            hidden,
            heads,
            kv_heads,
            head_dim,
            inner,
            vocab,
            max_context,
            block_tokens,
            eps,
            tied,
            qkv_bias,
            out_bias,
            qk_norm,
        };
        let loader = Loader::new(shape, Isa::choose(isa)?, threads)?;
        Ok(Self { loader: Mutex::new(Some(loader)) })
    }

    /// A contiguous bf16 matrix `[outputs, inputs]` of `count` elements.
    fn matrix(
        &self,
        py: Python<'_>,
        name: &str,
        layer: usize,
        address: usize,
        count: usize,
    ) -> PyResult<()> {
        // SAFETY: the caller's address holds `count` elements.
        let values = unsafe { values::<u16>(address, count)? };
        py.detach(|| self.with(|loader| loader.matrix(name, layer, values)))
    }

    /// A contiguous float32 vector, or rotation table, of `count` elements.
    fn vector(&self, name: &str, layer: usize, address: usize, count: usize) -> PyResult<()> {
        // SAFETY: the caller's address holds `count` elements.
        let values = unsafe { values::<f32>(address, count)? };
        self.with(|loader| loader.vector(name, layer, values))
    }

    /// The model; refused while a weight is missing.
    fn finish(&self) -> PyResult<NativeModel> {
        let taken = self.loader.lock().unwrap_or_else(PoisonError::into_inner).take();
        let loader = taken.ok_or_else(|| PyValueError::new_err("the model is already built"))?;
        Ok(NativeModel { model: loader.finish()? })
    }
}

/// A loaded model.
#[pyclass(frozen, module = "mooncake_serve._store.cpu")]
pub(super) struct NativeModel {
    model: Model,
}

#[pymethods]
impl NativeModel {
    /// What decides the bits: kernels and instruction set.
    #[getter]
    fn numerics_id(&self) -> String {
        format!("{FINGERPRINT}-{}", self.model.isa().name())
    }

    /// Bytes of the packed matrices.
    #[getter]
    fn weight_bytes(&self) -> usize {
        self.model.weight_bytes()
    }

    /// A zeroed pool of KV blocks, every page present.
    fn allocate_pool(&self, py: Python<'_>, blocks: usize) -> PyResult<KvMemory> {
        let pool = py.detach(|| KvPool::new(self.model.shape(), blocks))?;
        Ok(KvMemory { pool: Arc::new(pool) })
    }

    /// Items are (tokens, start, table, wants_logits); `logits` is the address of `count` floats.
    #[pyo3(signature = (pool, items, logits, count, gate=None))]
    fn forward(
        &self,
        py: Python<'_>,
        pool: &KvMemory,
        items: Vec<(Vec<u32>, usize, Vec<i32>, bool)>,
        logits: usize,
        count: usize,
        gate: Option<&LayerGate>,
    ) -> PyResult<()> {
        let items: Vec<_> = items
            .iter()
            .map(|(tokens, start, table, logits)| Item {
                tokens,
                start: *start,
                table,
                logits: *logits,
            })
            .collect();
        if count > 0 && (logits == 0 || !logits.is_multiple_of(4)) {
            return Err(PyValueError::new_err("logits have no aligned address"));
        }
        py.detach(|| {
            let logits: &mut [f32] = match count {
                0 => &mut [],
                // SAFETY: the caller's address holds `count` floats, which nobody else uses.
                _ => unsafe { std::slice::from_raw_parts_mut(logits as *mut f32, count) },
            };
            self.model.forward(&pool.pool, &items, logits, gate.map(|gate| &gate.gate))
        })?;
        Ok(())
    }
}

/// Lets a forward begin while the KV before it arrives, layer by layer.
#[pyclass(frozen, module = "mooncake_serve._store.cpu")]
pub(super) struct LayerGate {
    gate: crate::LayerGate,
}

#[pymethods]
impl LayerGate {
    #[new]
    fn new() -> Self {
        Self { gate: crate::LayerGate::default() }
    }

    /// The first `layers` layers have arrived.
    fn open(&self, layers: usize) {
        self.gate.open(layers);
    }

    /// The other layers will not arrive.
    fn fail(&self) {
        self.gate.fail();
    }

    /// Whether `fail` was called.
    #[getter]
    fn failed(&self) -> bool {
        self.gate.failed()
    }
}

/// The memory of a KV pool, as a writable buffer of bytes.
#[pyclass(frozen, module = "mooncake_serve._store.cpu")]
pub(super) struct KvMemory {
    pool: Arc<KvPool>,
}

#[pymethods]
impl KvMemory {
    /// # Safety
    /// Called by the interpreter with a buffer structure to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let pool = &slf.get().pool;
        let (address, bytes) = (pool.address(), pool.bytes() as ffi::Py_ssize_t);
        // SAFETY: the view keeps this object, and so the pool, alive; the bytes are plain data
        // whose writers the engine orders.
        let answer =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address.cast(), bytes, 0, flags) };
        if answer == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
