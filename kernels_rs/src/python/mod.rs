//! The submodule `_store.cpu`: kernels for Python, with the GIL released while they run.
//!
//! Tensors come as addresses. Sizes, offsets, tokens and tables are checked; that an address holds
//! what its documented shape says is the caller's promise.

mod attention;
mod model;

use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{Error, FINGERPRINT, Isa, error::require};

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        PyValueError::new_err(error.to_string())
    }
}

/// `count` values at an address.
///
/// # Safety
/// The address holds that many, and outlives the slice unchanged.
unsafe fn values<'a, T>(address: usize, count: usize) -> Result<&'a [T], Error> {
    let size = count.checked_mul(size_of::<T>()).filter(|n| *n <= isize::MAX as usize);
    require!(
        address != 0 && address.is_multiple_of(align_of::<T>()) && size.is_some(),
        "an array of {count} has no aligned address"
    );
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(address as *const T, count) })
}

/// Adds the submodule `cpu` to the extension module.
pub fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let module = PyModule::new(parent.py(), "cpu")?;
    module.add_class::<attention::PagedAttention>()?;
    module.add_class::<model::ModelLoader>()?;
    module.add_class::<model::NativeModel>()?;
    module.add_class::<model::KvMemory>()?;
    module.add_class::<model::LayerGate>()?;
    module.add("FINGERPRINT", FINGERPRINT)?;
    module.add("ISA", Isa::best().name())?;
    let available = Isa::ALL.into_iter().filter(|isa| isa.available());
    module.add("ISAS", available.map(Isa::name).collect::<Vec<_>>())?;
    parent.add_submodule(&module)
}
