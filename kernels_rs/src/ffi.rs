//! The C side: `cpp/kernels.h` in Rust. Keep the two alike.

use std::ffi::c_void;

/// Keys of one softmax block.
pub(crate) const KEY_BLOCK: usize = 256;
/// Columns that attention computes together.
pub(crate) const COLUMNS: usize = 16;
/// Largest head dimension of the vector attention.
pub(crate) const MAX_HEAD_DIM: usize = 256;
/// Columns of one panel of packed weights.
pub(crate) const PANEL: usize = 32;
/// Rows that a matrix product computes together.
pub(crate) const ROWS: usize = 32;

/// One layer of a paged KV pool.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PoolView {
    pub(crate) base: *mut u8,
    pub(crate) block_bytes: i64,
    pub(crate) k_offset: i64,
    pub(crate) v_offset: i64,
    pub(crate) block_tokens: i32,
    pub(crate) kv_heads: i32,
    pub(crate) head_dim: i32,
    pub(crate) dtype: i32,
}

/// Query columns of one KV head of one sequence.
#[repr(C)]
pub(crate) struct TileView {
    pub(crate) query: *const c_void,
    pub(crate) out: *mut c_void,
    pub(crate) table: *const i32,
    pub(crate) row_elements: i64,
    pub(crate) kv_head: i32,
    pub(crate) group: i32,
    pub(crate) first: i32,
    pub(crate) count: i32,
    pub(crate) visible: i32,
}

/// rows x k activations times packed weights.
#[repr(C)]
pub(crate) struct Gemm {
    pub(crate) a: *const u16,
    pub(crate) weights: *const u16,
    pub(crate) rows: i32,
    pub(crate) k: i32,
}

/// What becomes of the fused query, key and value projection.
#[repr(C)]
pub(crate) struct Heads {
    pub(crate) heads: i32,
    pub(crate) eps: f32,
    pub(crate) bias: *const f32,
    pub(crate) q_norm: *const f32,
    pub(crate) k_norm: *const f32,
    pub(crate) cos: *const f32,
    pub(crate) sin: *const f32,
    pub(crate) position: *const i32,
    pub(crate) block: *const i32,
    pub(crate) query: *mut u16,
}

type Product<Out> = unsafe extern "C" fn(*const Gemm, *mut Out, i32, i32, i32);

/// The functions of one instruction set.
#[repr(C)]
pub(crate) struct Kernels {
    pub(crate) max_columns: i32,
    pub(crate) attend:
        unsafe extern "C" fn(*const PoolView, *const TileView, f32, i32, i32, *mut f32),
    pub(crate) merge:
        unsafe extern "C" fn(*const PoolView, *const TileView, i32, *const f32, *mut f32),
    pub(crate) finish: unsafe extern "C" fn(*const PoolView, *const TileView, *const f32),
    pub(crate) rms_norm: unsafe extern "C" fn(*const f32, *const f32, i32, i32, f32, *mut u16),
    pub(crate) project_heads:
        unsafe extern "C" fn(*const Gemm, *const Heads, *const PoolView, i32, i32),
    pub(crate) add_product: unsafe extern "C" fn(*const Gemm, *const f32, *mut f32, i32, i32, i32),
    pub(crate) gated_product: Product<u16>,
    pub(crate) store_product: Product<f32>,
}

unsafe extern "C" {
    pub(crate) safe fn mk_portable() -> &'static Kernels;
}

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    pub(crate) safe fn mk_avx2() -> &'static Kernels;
    pub(crate) safe fn mk_avx512() -> &'static Kernels;
    pub(crate) safe fn mk_avx512_bf16() -> &'static Kernels;
    pub(crate) safe fn mk_amx() -> &'static Kernels;
}
