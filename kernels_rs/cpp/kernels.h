// The C interface between the Rust driver and the kernels: plain structs, one table of functions
// for each instruction set. The driver has checked every size, index and alignment named here.
#pragma once
#include <cstddef>
#include <cstdint>

enum MkDtype : int32_t { MK_BF16 = 0, MK_F16 = 1, MK_F32 = 2 };

// Keys of one softmax block. Absolute positions, so every caller cuts a sequence alike.
constexpr int MK_KEY_BLOCK = 256;
// Queries that one call of attend_block may hold.
constexpr int MK_MAX_QUERIES = 16;

// One layer of a paged KV pool: [token][kv_head][head_dim] planes inside blocks.
struct MkPool {
  const uint8_t *base;
  int64_t block_bytes, k_offset, v_offset;
  int32_t block_tokens;  // a multiple of 16
  int32_t kv_heads, head_dim, dtype;
};

struct MkKernels {
  // out[i] = elements of `in` times `scale`, as float.
  void (*widen)(const void *in, int32_t dtype, int64_t n, float scale, float *out);
  // Attention of `queries` (float, scaled by log2(e), [queries][head_dim]) of one KV head over the
  // keys of softmax block `block`, of which query i sees positions below visible[i].
  // part: per query {max, sum, output[head_dim]}.
  void (*attend_block)(const MkPool *pool, const int32_t *table, int32_t kv_head,
                       const float *queries, const int32_t *visible, int32_t count, int32_t block,
                       float *part);
  // Merge `blocks` parts, `stride` floats apart, in order, and round into `out`.
  void (*merge_parts)(const float *parts, int64_t stride, int32_t blocks, int32_t head_dim,
                      int32_t dtype, void *out);
};

extern "C" {
const MkKernels *mk_portable();
const MkKernels *mk_avx2();
const MkKernels *mk_avx512();
}
