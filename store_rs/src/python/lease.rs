//! `Lease`: a read-only buffer over one block's bytes in the arena.

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::shape::{BlockShape, CODECS};
use crate::client;
use crate::key::Key;

/// A leased block; the lease ends at `release`, at the end of `with`, or with the object.
#[pyclass(module = "mooncake_serve._store", frozen)]
pub(super) struct Lease {
    key: Key,
    nbytes: usize,
    held: Mutex<Option<Arc<client::Lease>>>,
    exports: AtomicUsize,
}

impl Lease {
    /// None if the block's header is damaged; it is then dropped from the store.
    pub(super) fn new(key: Key, lease: client::Lease) -> Option<Self> {
        let nbytes = lease.raw_bytes().ok()?;
        let held = Mutex::new(Some(Arc::new(lease)));
        Some(Self { key, nbytes, held, exports: AtomicUsize::new(0) })
    }

    fn held(&self) -> MutexGuard<'_, Option<Arc<client::Lease>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn form(&self) -> PyResult<(crate::wire::BlockShape, u8)> {
        let damaged = |_| PyValueError::new_err("the block is damaged; the store drops it");
        self.readable()?.form().map_err(damaged)
    }

    /// The lease, if it still holds and this process may read it.
    fn readable(&self) -> PyResult<Arc<client::Lease>> {
        let lease = self.held().clone();
        let lease = lease.ok_or_else(|| PyValueError::new_err("this lease was released"))?;
        if lease.is_forked() {
            return Err(PyValueError::new_err("a lease does not survive a fork; lease again"));
        }
        Ok(lease)
    }
}

#[pymethods]
impl Lease {
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.key)
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    fn __len__(&self) -> usize {
        self.nbytes
    }

    /// Shape of the block.
    #[getter]
    fn shape(&self) -> PyResult<BlockShape> {
        BlockShape::checked(self.form()?.0)
    }

    /// How the block is stored.
    #[getter]
    fn codec(&self) -> PyResult<&'static str> {
        let codec = self.form()?.1;
        Ok(CODECS.get(usize::from(codec)).copied().unwrap_or("unknown"))
    }

    /// True if every byte matches its checksum; if not, the store drops the block.
    fn verify(&self, py: Python<'_>) -> PyResult<bool> {
        let lease = self.readable()?;
        Ok(py.detach(|| lease.verify().is_ok()))
    }

    /// End the lease. Once is enough; more is harmless. Fails while views exist.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        if self.exports.load(Ordering::Acquire) > 0 {
            return Err(PyBufferError::new_err(
                "views of this lease exist; release or delete them first",
            ));
        }
        let lease = self.held().take();
        py.detach(|| drop(lease));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.release(py)
    }

    /// # Safety
    /// Called by the interpreter with a valid view.
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let lease = this.readable()?;
        let refuse = |why: &str| Err(PyBufferError::new_err(why.to_owned()));
        let bytes = match lease.payload() {
            Ok(Some(bytes)) => bytes,
            Ok(None) => {
                return refuse("the block is stored coded, so no view of it exists; use read_into");
            }
            Err(_) => return refuse("the block is damaged; the store drops it"),
        };
        // SAFETY: `view` is valid by the protocol. The bytes stay leased while the view lives: it
        // holds a reference to `slf`, whose `release` refuses while `exports` is above 0. The view
        // is read-only, so the mutable pointer is never written through.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                bytes.as_ptr().cast_mut().cast(),
                bytes.len() as ffi::Py_ssize_t,
                1,
                flags,
            )
        };
        if filled != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        this.exports.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// # Safety
    /// Called by the interpreter, once for each view that `__getbuffer__` filled.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.fetch_sub(1, Ordering::AcqRel);
    }
}
