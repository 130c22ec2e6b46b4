// Paged attention on vectors, for any element type: fp32 arithmetic, lanes over head_dim.
//
// Owns: the scores, the softmax and the weighted sum of one block of keys, and the merge of blocks.
// Invariants: a query's numbers depend on its own keys alone. Each block of MK_KEY_BLOCK absolute
// positions yields (max, sum, output); blocks merge in key order; keys a query may not see carry a
// weight of exactly zero, and their bytes cannot reach it.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

constexpr int MAX_HEAD_DIM = 256;
constexpr float NOTHING = -1e30f;

inline F load_as(const void *base, int64_t i, int32_t dtype) {
  if (dtype == MK_F32) return load((const float *)base + i);
  const uint16_t *p = (const uint16_t *)base + i;
  return dtype == MK_BF16 ? load_bf16(p) : load_f16(p);
}

inline int element_bytes(int32_t dtype) { return dtype == MK_F32 ? 4 : 2; }

void widen(const void *in, int32_t dtype, int64_t n, float scale, float *out) {
  for (int64_t i = 0; i < n; i += LANES) store(out + i, load_as(in, i, dtype) * set1(scale));
}

// Rows [key, key + rows) of one head as floats; rows from `end` on become zeros.
void widen_rows(const MkPool &pool, int64_t plane, const int32_t *table, int kv_head, int key,
                int rows, int end, float *out) {
  const int64_t row = int64_t(pool.kv_heads) * pool.head_dim;
  const uint8_t *block = pool.base + table[key / pool.block_tokens] * pool.block_bytes + plane;
  const int64_t first = (key % pool.block_tokens) * row + int64_t(kv_head) * pool.head_dim;
  for (int r = 0; r < rows; r++)
    for (int d = 0; d < pool.head_dim; d += LANES)
      store(out + r * pool.head_dim + d,
            key + r < end ? load_as(block, first + r * row + d, pool.dtype) : set1(0.f));
}

void scores_of_16(const float *keys, const float *query, int dim, float *out) {
  F acc[LANES];
  for (int k = 0; k < LANES; k++) acc[k] = set1(0.f);
  for (int d = 0; d < dim; d += LANES) {
    F q = load(query + d);
    for (int k = 0; k < LANES; k++) acc[k] = fma(load(keys + k * dim + d), q, acc[k]);
  }
  store(out, sum_each(acc));
}

// Scores become weights in place; returns through part the block's maximum and sum.
void softmax(float *scores, int seen, float *part) {
  const int padded = (seen + LANES - 1) / LANES * LANES;
  F top = set1(NOTHING);
  for (int k = 0; k < padded; k += LANES)
    top = max(top, first_lanes(load(scores + k), seen - k < LANES ? seen - k : LANES, top));
  part[0] = largest(top);
  F m = set1(part[0]), total = set1(0.f);
  for (int k = 0; k < padded; k += LANES) {
    F e = exp2v(load(scores + k) - m);
    e = first_lanes(e, seen - k < LANES ? seen - k : LANES, set1(0.f));
    total = total + e;
    store(scores + k, e);
  }
  for (int k = padded; k < MK_KEY_BLOCK; k += LANES) store(scores + k, set1(0.f));
  part[1] = sum(total);
}

// Two running sums, of even and odd keys: enough independent chains to fill the FMA units.
template <int VECTORS>
inline void weigh(const float *values, const float *weights, int rows, int dim, float *even,
                  float *odd) {
  F a[VECTORS], b[VECTORS];
  for (int j = 0; j < VECTORS; j++) a[j] = load(even + j * LANES), b[j] = load(odd + j * LANES);
  for (int k = 0; k < rows; k += 2) {
    F w = set1(weights[k]), x = set1(weights[k + 1]);
    for (int j = 0; j < VECTORS; j++) {
      a[j] = fma(load(values + k * dim + j * LANES), w, a[j]);
      b[j] = fma(load(values + (k + 1) * dim + j * LANES), x, b[j]);
    }
  }
  for (int j = 0; j < VECTORS; j++) store(even + j * LANES, a[j]), store(odd + j * LANES, b[j]);
}

void attend_block(const MkPool *pool, const int32_t *table, int32_t kv_head, const float *queries,
                  const int32_t *visible, int32_t count, int32_t block, float *part) {
  alignas(64) float rows[LANES * MAX_HEAD_DIM];
  alignas(64) float scores[MK_MAX_QUERIES][MK_KEY_BLOCK];
  alignas(64) float odd[MK_MAX_QUERIES][MAX_HEAD_DIM];
  const int dim = pool->head_dim, first = block * MK_KEY_BLOCK;
  int end = first;
  for (int q = 0; q < count; q++) end = visible[q] > end ? visible[q] : end;
  end = end < first + MK_KEY_BLOCK ? end : first + MK_KEY_BLOCK;
  for (int key = first; key < end; key += LANES) {
    widen_rows(*pool, pool->k_offset, table, kv_head, key, LANES, end, rows);
    for (int q = 0; q < count; q++)
      scores_of_16(rows, queries + q * dim, dim, scores[q] + (key - first));
  }
  for (int q = 0; q < count; q++) {
    float *p = part + q * (2 + dim);
    int seen = visible[q] - first;
    softmax(scores[q], seen < 0 ? 0 : seen < MK_KEY_BLOCK ? seen : MK_KEY_BLOCK, p);
    for (int d = 0; d < dim; d += LANES) store(p + 2 + d, set1(0.f)), store(odd[q] + d, set1(0.f));
  }
  for (int key = first; key < end; key += LANES) {
    widen_rows(*pool, pool->v_offset, table, kv_head, key, LANES, end, rows);
    for (int q = 0; q < count; q++) {
      const float *w = scores[q] + (key - first);
      float *even = part + q * (2 + dim) + 2;
      int d = 0;
      for (; d + 4 * LANES <= dim; d += 4 * LANES) weigh<4>(rows + d, w, LANES, dim, even + d, odd[q] + d);
      for (; d < dim; d += LANES) weigh<1>(rows + d, w, LANES, dim, even + d, odd[q] + d);
    }
  }
  for (int q = 0; q < count; q++)
    for (int d = 0; d < dim; d += LANES) {
      float *even = part + q * (2 + dim) + 2 + d;
      store(even, load(even) + load(odd[q] + d));
    }
}

void merge_parts(const float *parts, int64_t stride, int32_t blocks, int32_t dim, int32_t dtype,
                 void *out) {
  alignas(64) float acc[MAX_HEAD_DIM];
  float top = parts[0], total = parts[1];
  memcpy(acc, parts + 2, dim * sizeof(float));
  for (int b = 1; b < blocks; b++) {
    const float *p = parts + b * stride;
    float m = p[0] > top ? p[0] : top;
    F x = exp2v(set1(top - m)), y = exp2v(set1(p[0] - m));
    alignas(64) float xs[LANES], ys[LANES];
    store(xs, x), store(ys, y);
    total = __builtin_fmaf(p[1], ys[0], total * xs[0]);
    for (int d = 0; d < dim; d += LANES)
      store(acc + d, fma(load(p + 2 + d), y, load(acc + d) * x));
    top = m;
  }
  F one_over = set1(1.f / total);
  for (int d = 0; d < dim; d += LANES) {
    F v = load(acc + d) * one_over;
    if (dtype == MK_F32) store((float *)out + d, v);
    else if (dtype == MK_BF16) store_bf16((uint16_t *)out + d, v);
    else store_f16((uint16_t *)out + d, v);
  }
}

}  // namespace
