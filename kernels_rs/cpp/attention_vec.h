// Paged attention on vectors, for any element type: fp32 arithmetic, lanes over head_dim.
//
// Owns: the scores, the softmax and the weighted sum of one block of keys, and the merge of blocks.
// Invariants: a query's numbers depend on its own keys alone. Each block of MK_KEY_BLOCK absolute
// positions yields (max, sum, output); blocks merge in key order; keys that a query may not see
// carry a weight of exactly zero, and rows past the tile's last key are never read.
// A part is {max, sum, output[head_dim]} for each of 16 columns.
#pragma once
#include "tile.h"
#include "vec.h"

namespace {

constexpr int MAX_HEAD_DIM = 256;

inline F load_as(const void *base, int64_t i, int32_t dtype) {
  if (dtype == MK_F32) return load((const float *)base + i);
  const uint16_t *p = (const uint16_t *)base + i;
  return dtype == MK_BF16 ? load_bf16(p) : load_f16(p);
}

// Sixteen rows of one head as floats, from position `key`; rows from `end` on become zeros.
void widen_rows(const MkPool &pool, int64_t plane, const MkTile &tile, int key, int end,
                float *out) {
  const int64_t row = int64_t(pool.kv_heads) * pool.head_dim;
  const uint8_t *block = pool.base + tile.table[key / pool.block_tokens] * pool.block_bytes + plane;
  const int64_t first = key % pool.block_tokens * row + int64_t(tile.kv_head) * pool.head_dim;
  for (int r = 0; r < LANES; r++)
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

// Scores become weights in place; the block's maximum and sum go to part.
void softmax(float *scores, int seen, float *part) {
  const int padded = (seen + LANES - 1) / LANES * LANES;
  auto lanes = [&](int k) { return at_most(seen - k, LANES); };
  F top = set1(NOTHING);
  for (int k = 0; k < padded; k += LANES)
    top = max(top, first_lanes(load(scores + k), lanes(k), top));
  part[0] = largest(top);
  F m = set1(part[0]), total = set1(0.f);
  for (int k = 0; k < padded; k += LANES) {
    F e = first_lanes(exp2v(load(scores + k) - m), lanes(k), set1(0.f));
    total = total + e;
    store(scores + k, e);
  }
  for (int k = padded; k < MK_KEY_BLOCK; k += LANES) store(scores + k, set1(0.f));
  part[1] = sum(total);
}

// Two running sums, of even and odd keys: enough independent chains to fill the FMA units.
template <int VECTORS>
inline void weigh(const float *values, const float *weights, int dim, float *even, float *odd) {
  F a[VECTORS], b[VECTORS];
  for (int j = 0; j < VECTORS; j++) a[j] = load(even + j * LANES), b[j] = load(odd + j * LANES);
  for (int k = 0; k < LANES; k += 2) {
    F w = set1(weights[k]), x = set1(weights[k + 1]);
    for (int j = 0; j < VECTORS; j++) {
      a[j] = fma(load(values + k * dim + j * LANES), w, a[j]);
      b[j] = fma(load(values + (k + 1) * dim + j * LANES), x, b[j]);
    }
  }
  for (int j = 0; j < VECTORS; j++) store(even + j * LANES, a[j]), store(odd + j * LANES, b[j]);
}

// One softmax block; queries are widened and scaled by log2(e).
void attend_block(const MkPool &pool, const MkTile &tile, const float *queries, int block,
                  float *part) {
  alignas(64) float rows[LANES * MAX_HEAD_DIM];
  alignas(64) float scores[COLUMNS][MK_KEY_BLOCK];
  alignas(64) float odd[COLUMNS][MAX_HEAD_DIM];
  const int dim = pool.head_dim, first = block * MK_KEY_BLOCK, stride = 2 + dim;
  const int end = at_most(column_visible(tile, tile.count - 1), first + MK_KEY_BLOCK);
  for (int key = first; key < end; key += LANES) {
    widen_rows(pool, pool.k_offset, tile, key, end, rows);
    for (int c = 0; c < tile.count; c++)
      scores_of_16(rows, queries + c * dim, dim, scores[c] + (key - first));
  }
  for (int c = 0; c < tile.count; c++) {
    const int seen = column_visible(tile, c) - first;
    softmax(scores[c], seen < 0 ? 0 : at_most(seen, MK_KEY_BLOCK), part + c * stride);
    for (int d = 0; d < dim; d += LANES) {
      store(part + c * stride + 2 + d, set1(0.f));
      store(odd[c] + d, set1(0.f));
    }
  }
  for (int key = first; key < end; key += LANES) {
    widen_rows(pool, pool.v_offset, tile, key, end, rows);
    for (int c = 0; c < tile.count; c++) {
      const float *w = scores[c] + (key - first);
      float *even = part + c * stride + 2;
      int d = 0;
      for (; d + 4 * LANES <= dim; d += 4 * LANES) weigh<4>(rows + d, w, dim, even + d, odd[c] + d);
      for (; d < dim; d += LANES) weigh<1>(rows + d, w, dim, even + d, odd[c] + d);
    }
  }
  for (int c = 0; c < tile.count; c++)
    for (int d = 0; d < dim; d += LANES) {
      float *even = part + c * stride + 2 + d;
      store(even, load(even) + load(odd[c] + d));
    }
}

void merge(const MkPool *pool, const MkTile *tile, int32_t block, const float *later, float *part) {
  const int dim = pool->head_dim;
  for (int c = 0; c < tile->count; c++) {
    if (column_visible(*tile, c) <= block * MK_KEY_BLOCK) continue;  // it sees nothing there
    float *a = part + c * (2 + dim);
    const float *b = later + c * (2 + dim);
    const float top = a[0] > b[0] ? a[0] : b[0];
    const F x = exp2v(set1(a[0] - top)), y = exp2v(set1(b[0] - top));
    alignas(64) float sums[LANES];
    store(sums, fma(set1(b[1]), y, set1(a[1]) * x));
    for (int d = 2; d < 2 + dim; d += LANES) store(a + d, fma(load(b + d), y, load(a + d) * x));
    a[0] = top;
    a[1] = sums[0];
  }
}

void attend(const MkPool *pool, const MkTile *tile, float scale, int32_t from, int32_t to,
            float *part) {
  alignas(64) float queries[COLUMNS * MAX_HEAD_DIM];
  alignas(64) float later[COLUMNS * (2 + MAX_HEAD_DIM)];
  const int dim = pool->head_dim;
  const F factor = set1(scale * 1.44269504f);
  for (int c = 0; c < tile->count; c++)
    for (int d = 0; d < dim; d += LANES) {
      F q = load_as(tile->query, column_offset(*pool, *tile, c) + d, pool->dtype);
      store(queries + c * dim + d, q * factor);
    }
  attend_block(*pool, *tile, queries, from, part);
  for (int block = from + 1; block < to; block++) {
    attend_block(*pool, *tile, queries, block, later);
    merge(pool, tile, block, later, part);
  }
}

void finish(const MkPool *pool, const MkTile *tile, const float *part) {
  const int dim = pool->head_dim;
  for (int c = 0; c < tile->count; c++) {
    const float *p = part + c * (2 + dim);
    const int64_t at = column_offset(*pool, *tile, c);
    const F one_over = set1(1.f / p[1]);
    for (int d = 0; d < dim; d += LANES) {
      F v = load(p + 2 + d) * one_over;
      if (pool->dtype == MK_F32) store((float *)tile->out + at + d, v);
      else if (pool->dtype == MK_BF16) store_bf16((uint16_t *)tile->out + at + d, v);
      else store_f16((uint16_t *)tile->out + at + d, v);
    }
  }
}

}  // namespace
