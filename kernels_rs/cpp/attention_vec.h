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
constexpr int AHEAD_KEYS = 64;  // decode streams KV from memory
// Up to so many columns, to widen a row again for each costs less than to keep it widened.
constexpr int FEW = 4;

template <int32_t DTYPE>
inline F load_as(const void *base, int64_t i) {
  if constexpr (DTYPE == MK_F32) return load((const float *)base + i);
  else if constexpr (DTYPE == MK_BF16) return load_bf16((const uint16_t *)base + i);
  else return load_f16((const uint16_t *)base + i);
}

// One head's rows in one plane of the pool.
struct Source {
  const uint8_t *base;
  const int32_t *table;
  int64_t block_bytes, row;  // bytes between blocks, and between tokens
  int32_t block_tokens, row_bytes;

  Source(const MkPool &pool, const MkTile &tile, int64_t plane) {
    const int size = pool.dtype == MK_F32 ? 4 : 2;
    row_bytes = pool.head_dim * size;
    row = int64_t(pool.kv_heads) * row_bytes;
    base = pool.base + plane + int64_t(tile.kv_head) * row_bytes;
    table = tile.table;
    block_bytes = pool.block_bytes;
    block_tokens = pool.block_tokens;
  }
  const uint8_t *at(int key) const {
    return base + table[key / block_tokens] * block_bytes + key % block_tokens * row;
  }
  // Asks for sixteen rows before they are needed.
  void fetch(int key) const {
    const uint8_t *from = at(key);
    for (int r = 0; r < LANES; r++, from += row)
      for (int byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(from + byte);
  }
};

// Sixteen rows as floats, from position `key`; rows from `end` on become zeros.
template <int32_t DTYPE>
void widen_rows(const Source &source, int dim, int key, int end, float *out) {
  const uint8_t *from = source.at(key);
  const int rows = at_most(end - key, LANES);
  for (int r = 0; r < rows; r++, from += source.row, out += dim)
    for (int d = 0; d < dim; d += LANES) store(out + d, load_as<DTYPE>(from, d));
  for (int i = 0; i < (LANES - rows) * dim; i += LANES) store(out + i, set1(0.f));
}

// Where a product finds element vector d of row k: among widened rows, or in the pool.
struct Widened {
  const float *rows;
  int dim;
  F operator()(int k, int d) const { return load(rows + k * dim + d); }
};
template <int32_t DTYPE>
struct InPlace {
  const uint8_t *rows;
  int64_t row;
  F operator()(int k, int d) const { return load_as<DTYPE>(rows + k * row, d); }
};

template <class Rows>
inline void scores_of_16(Rows rows, const float *query, int dim, float *out) {
  F acc[LANES];
  for (int k = 0; k < LANES; k++) acc[k] = set1(0.f);
  for (int d = 0; d < dim; d += LANES) {
    F q = load(query + d);
    for (int k = 0; k < LANES; k++) acc[k] = fma(rows(k, d), q, acc[k]);
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
template <int VECTORS, class Rows>
inline void weigh(Rows rows, int d, const float *weights, float *even, float *odd) {
  F a[VECTORS], b[VECTORS];
  for (int j = 0; j < VECTORS; j++) {
    a[j] = load(even + d + j * LANES);
    b[j] = load(odd + d + j * LANES);
  }
  for (int k = 0; k < LANES; k += 2) {
    F w = set1(weights[k]), x = set1(weights[k + 1]);
    for (int j = 0; j < VECTORS; j++) {
      a[j] = fma(rows(k, d + j * LANES), w, a[j]);
      b[j] = fma(rows(k + 1, d + j * LANES), x, b[j]);
    }
  }
  for (int j = 0; j < VECTORS; j++) {
    store(even + d + j * LANES, a[j]);
    store(odd + d + j * LANES, b[j]);
  }
}

template <class Rows>
inline void weigh_16(Rows rows, int dim, const float *weights, float *even, float *odd) {
  int d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) weigh<4>(rows, d, weights, even, odd);
  for (; d < dim; d += LANES) weigh<1>(rows, d, weights, even, odd);
}

// One softmax block; queries are widened and scaled by log2(e). Its first touch of the KV is the
// keys', so there it asks for the values too.
template <int32_t DTYPE>
void attend_block(const MkPool &pool, const MkTile &tile, const float *queries, int block,
                  float *part) {
  alignas(64) float rows[LANES * MAX_HEAD_DIM];
  alignas(64) float scores[COLUMNS][MK_KEY_BLOCK];
  alignas(64) float odd[COLUMNS][MAX_HEAD_DIM];
  const int dim = pool.head_dim, first = block * MK_KEY_BLOCK, stride = 2 + dim;
  const int last = column_visible(tile, tile.count - 1);
  const int end = at_most(last, first + MK_KEY_BLOCK);
  const Source keys(pool, tile, pool.k_offset), values(pool, tile, pool.v_offset);
  auto each_column = [&](const Source &source, int key, auto work) {
    const bool in_place = tile.count <= FEW && key + LANES <= end;
    if (in_place) {
      const InPlace<DTYPE> from{source.at(key), source.row};
      for (int c = 0; c < tile.count; c++) work(c, from);
    } else {
      widen_rows<DTYPE>(source, dim, key, end, rows);
      for (int c = 0; c < tile.count; c++) work(c, Widened{rows, dim});
    }
  };
  for (int key = first; key < end; key += LANES) {
    if (key + AHEAD_KEYS < last) keys.fetch(key + AHEAD_KEYS);
    values.fetch(key);
    each_column(keys, key, [&](int c, auto from) {
      scores_of_16(from, queries + c * dim, dim, scores[c] + (key - first));
    });
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
    each_column(values, key, [&](int c, auto from) {
      weigh_16(from, dim, scores[c] + (key - first), part + c * stride + 2, odd[c]);
    });
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

template <int32_t DTYPE>
void attend_all(const MkPool &pool, const MkTile &tile, float scale, int from, int to,
                float *part) {
  alignas(64) float queries[COLUMNS * MAX_HEAD_DIM];
  alignas(64) float later[COLUMNS * (2 + MAX_HEAD_DIM)];
  const int dim = pool.head_dim;
  const F factor = set1(scale * 1.44269504f);
  for (int c = 0; c < tile.count; c++)
    for (int d = 0; d < dim; d += LANES) {
      F q = load_as<DTYPE>(tile.query, column_offset(pool, tile, c) + d);
      store(queries + c * dim + d, q * factor);
    }
  attend_block<DTYPE>(pool, tile, queries, from, part);
  for (int block = from + 1; block < to; block++) {
    attend_block<DTYPE>(pool, tile, queries, block, later);
    merge(&pool, &tile, block, later, part);
  }
}

void attend(const MkPool *pool, const MkTile *tile, float scale, int32_t from, int32_t to,
            float *part) {
  switch (pool->dtype) {
    case MK_BF16: return attend_all<MK_BF16>(*pool, *tile, scale, from, to, part);
    case MK_F16: return attend_all<MK_F16>(*pool, *tile, scale, from, to, part);
    default: return attend_all<MK_F32>(*pool, *tile, scale, from, to, part);
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
