// The C interface between the Rust driver and the kernels: plain structs, and one table of
// functions for each instruction set. `src/ffi.rs` repeats it; keep the two alike.
//
// The driver has checked every size, index and alignment that is named here. Kernels allocate
// nothing, keep no state and start no threads.
#pragma once
#include <cstddef>
#include <cstdint>

enum MkDtype : int32_t { MK_BF16 = 0, MK_F16 = 1, MK_F32 = 2 };

// Keys of one softmax block. Absolute positions, so that every caller cuts a sequence alike.
constexpr int MK_KEY_BLOCK = 256;
// Columns of one panel of packed weights.
constexpr int MK_PANEL = 32;
// Rows that a matrix product computes together; buffers are padded to a multiple of it.
constexpr int MK_ROWS = 32;

// One layer of a paged KV pool: [token][kv_head][head_dim] planes inside blocks.
struct MkPool {
  uint8_t *base;
  int64_t block_bytes, k_offset, v_offset;
  int32_t block_tokens, kv_heads, head_dim, dtype;
};

// Query columns of one KV head of one sequence. Column c is head c % group of row c / group; the
// tile holds columns [first, first + count), and row r sees the keys below visible + r.
struct MkTile {
  const void *query;  // the sequence's first row, [row][head][head_dim]
  void *out;          // alike
  const int32_t *table;
  int64_t row_elements;
  int32_t kv_head, group, first, count, visible;
};

// rows x k activations times packed weights.
struct MkGemm {
  const uint16_t *a;  // [rows padded to MK_ROWS][k]
  const uint16_t *weights;
  int32_t rows, k;
};

// What becomes of the fused query, key and value projection.
struct MkHeads {
  int32_t heads;
  float eps;
  const float *bias, *q_norm, *k_norm;  // each may be null
  const float *cos, *sin;               // [position][head_dim / 2], 16 floats beyond the last
  const int32_t *position;              // of each row
  const int32_t *block;                 // the pool block that each row's KV belongs to
  uint16_t *query;                      // [row][heads][head_dim]
};

struct MkKernels {
  // Columns that one tile may hold; a multiple of 16.
  int32_t max_columns;
  // Attention of a tile over softmax blocks [from, to), as unfinished sums in `part`:
  // ceil(count / 16) * 16 * (2 + head_dim) floats.
  void (*attend)(const MkPool *, const MkTile *, float scale, int32_t from, int32_t to,
                 float *part);
  // Adds the sums of softmax block `block` to those of the blocks before it.
  void (*merge)(const MkPool *, const MkTile *, int32_t block, const float *later, float *part);
  // Divides, rounds and writes the tile's outputs.
  void (*finish)(const MkPool *, const MkTile *, const float *part);

  void (*rms_norm)(const float *in, const float *weight, int32_t rows, int32_t n, float eps,
                   uint16_t *out);
  // Heads [from, to) of the projection: bias, norm, rotation; queries to `query`, KV to the pool.
  void (*project_heads)(const MkGemm *, const MkHeads *, const MkPool *, int32_t from, int32_t to);
  // out += product (+ bias, when not null); panels [from, to).
  void (*add_product)(const MkGemm *, const float *bias, float *out, int32_t columns, int32_t from,
                      int32_t to);
  // out = silu(gate) * up; panel p holds 16 columns of each.
  void (*gated_product)(const MkGemm *, uint16_t *out, int32_t columns, int32_t from, int32_t to);
  // out = product, without the columns that pad the last panel.
  void (*store_product)(const MkGemm *, float *out, int32_t columns, int32_t from, int32_t to);
};

extern "C" {
const MkKernels *mk_portable();
const MkKernels *mk_avx2();
const MkKernels *mk_avx512();
const MkKernels *mk_avx512_bf16();
const MkKernels *mk_amx();
}
