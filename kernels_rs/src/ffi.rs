//! The C side: `cpp/kernels.h` in Rust. Keep the two alike.

use std::ffi::c_void;

/// Keys of one softmax block.
pub(crate) const KEY_BLOCK: usize = 256;
/// Queries that one call of `attend_block` may hold.
pub(crate) const MAX_QUERIES: usize = 16;
/// Largest head dimension of the vector attention.
pub(crate) const MAX_HEAD_DIM: usize = 256;

/// One layer of a paged KV pool.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PoolView {
    pub(crate) base: *const u8,
    pub(crate) block_bytes: i64,
    pub(crate) k_offset: i64,
    pub(crate) v_offset: i64,
    pub(crate) block_tokens: i32,
    pub(crate) kv_heads: i32,
    pub(crate) head_dim: i32,
    pub(crate) dtype: i32,
}

/// The functions of one instruction set.
#[repr(C)]
pub(crate) struct Kernels {
    pub(crate) widen: unsafe extern "C" fn(*const c_void, i32, i64, f32, *mut f32),
    pub(crate) attend_block: unsafe extern "C" fn(
        *const PoolView,
        *const i32,
        i32,
        *const f32,
        *const i32,
        i32,
        i32,
        *mut f32,
    ),
    pub(crate) merge_parts: unsafe extern "C" fn(*const f32, i64, i32, i32, i32, *mut c_void),
}

unsafe extern "C" {
    pub(crate) safe fn mk_portable() -> &'static Kernels;
    #[cfg(target_arch = "x86_64")]
    pub(crate) safe fn mk_avx2() -> &'static Kernels;
    #[cfg(target_arch = "x86_64")]
    pub(crate) safe fn mk_avx512() -> &'static Kernels;
}
