// Everything of a transformer layer but attention: norms, and matrix products with what follows.
//
// A unit includes this after the header that gives it `multiply` and `Tiles`.
// Invariants: activations live in fp32 between a product and its rounding to bf16, each row on its
// own; the sums of a norm run in one fixed order.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

constexpr int MAX_MODEL_HEAD_DIM = 128;

inline F norm_factor(const float *in, int n, float eps) {
  F even = set1(0.f), odd = set1(0.f);
  for (int i = 0; i < n; i += 2 * LANES) {
    F x = load(in + i);
    even = fma(x, x, even);
    if (i + LANES < n) {
      F y = load(in + i + LANES);
      odd = fma(y, y, odd);
    }
  }
  const float mean = sum(even + odd) / float(n);
  return set1(1.f / __builtin_sqrtf(mean + eps));
}

void rms_norm(const float *in, const float *weight, int32_t rows, int32_t n, float eps,
              uint16_t *out) {
  for (int r = 0; r < rows; r++, in += n, out += n) {
    const F factor = norm_factor(in, n, eps);
    for (int i = 0; i < n; i += LANES)
      store_bf16(out + i, load(in + i) * factor * load(weight + i));
  }
}

// Calls then(row, c) with 32 columns of the product of each row, for panels [from, to).
template <class Then>
inline void each_panel(const MkGemm &g, int from, int to, Then then) {
  alignas(64) float c[MK_ROWS * MK_PANEL];
  const Tiles tiles;
  for (int p = from; p < to; p++) {
    const uint16_t *weights = g.weights + int64_t(p) * MK_PANEL * g.k;
    for (int m = 0; m < g.rows; m += MK_ROWS) {
      const int rows = at_most(g.rows - m, MK_ROWS);
      multiply(g.a + int64_t(m) * g.k, g.k, rows, weights, g.k, c, MK_PANEL);
      for (int r = 0; r < rows; r++) then(p, m + r, c + r * MK_PANEL);
    }
  }
}

void add_product(const MkGemm *g, const float *bias, float *out, int32_t columns, int32_t from,
                 int32_t to) {
  each_panel(*g, from, to, [&](int p, int row, const float *c) {
    float *target = out + int64_t(row) * columns + p * MK_PANEL;
    for (int i = 0; i < MK_PANEL; i += LANES) {
      F v = load(c + i);
      if (bias) v = v + load(bias + p * MK_PANEL + i);
      store(target + i, load(target + i) + v);
    }
  });
}

void gated_product(const MkGemm *g, uint16_t *out, int32_t columns, int32_t from, int32_t to) {
  each_panel(*g, from, to, [&](int p, int row, const float *c) {
    const F gate = load(c), up = load(c + LANES);
    const F e = exp2v(gate * set1(-1.44269504f));
    store_bf16(out + int64_t(row) * columns + p * LANES, gate * up / (set1(1.f) + e));
  });
}

void store_product(const MkGemm *g, float *out, int32_t columns, int32_t from, int32_t to) {
  each_panel(*g, from, to, [&](int p, int row, const float *c) {
    float *target = out + int64_t(row) * columns + p * MK_PANEL;
    memcpy(target, c, at_most(columns - p * MK_PANEL, MK_PANEL) * sizeof(float));
  });
}

inline void norm_head(float *c, const float *weight, int dim, float eps) {
  const F factor = norm_factor(c, dim, eps);
  for (int d = 0; d < dim; d += LANES) store(c + d, load(c + d) * factor * load(weight + d));
}

// The rotation pairs element d with d + dim / 2. A half need not fill its last vector: lanes past
// it are computed and dropped, so c and the tables must be readable for LANES more.
inline void rotate_head(float *c, const float *cos, const float *sin, int dim) {
  const int half = dim / 2;
  for (int d = 0; d < half; d += LANES) {
    const int n = at_most(half - d, LANES);
    const F first = load(c + d), second = load(c + half + d);
    const F cs = load(cos + d), sn = load(sin + d);
    store(c + half + d, first_lanes(fma(second, cs, first * sn), n, second));
    store(c + d, first_lanes(fma(first, cs, set1(0.f) - second * sn), n, load(c + d)));
  }
}

// One head of one row: where it goes, and what is done to it on the way.
inline void place_head(float *c, const MkHeads &h, const MkPool &pool, int head, int row) {
  const int dim = pool.head_dim, kv = head - h.heads, position = h.position[row];
  const bool is_query = kv < 0, is_key = !is_query && kv < pool.kv_heads;
  if (h.bias)
    for (int d = 0; d < dim; d += LANES) store(c + d, load(c + d) + load(h.bias + head * dim + d));
  const float *norm = is_query ? h.q_norm : is_key ? h.k_norm : nullptr;
  if (norm) norm_head(c, norm, dim, h.eps);
  if (is_query || is_key) {
    const int64_t angle = int64_t(position) * (dim / 2);
    rotate_head(c, h.cos + angle, h.sin + angle, dim);
  }
  uint16_t *target;
  if (is_query) {
    target = h.query + (int64_t(row) * h.heads + head) * dim;
  } else {
    const int kv_head = is_key ? kv : kv - pool.kv_heads;
    const int64_t plane = is_key ? pool.k_offset : pool.v_offset;
    const int64_t token = position % pool.block_tokens;
    target = (uint16_t *)(pool.base + h.block[row] * pool.block_bytes + plane) +
             (token * pool.kv_heads + kv_head) * dim;
  }
  for (int d = 0; d < dim; d += LANES) store_bf16(target + d, load(c + d));
}

void project_heads(const MkGemm *g, const MkHeads *h, const MkPool *pool, int32_t from,
                   int32_t to) {
  alignas(64) float c[MK_ROWS * MAX_MODEL_HEAD_DIM + LANES];
  const int padded = (pool->head_dim + MK_PANEL - 1) / MK_PANEL * MK_PANEL;
  const Tiles tiles;
  for (int head = from; head < to; head++)
    for (int m = 0; m < g->rows; m += MK_ROWS) {
      const int rows = at_most(g->rows - m, MK_ROWS);
      for (int column = 0; column < padded; column += MK_PANEL)
        multiply(g->a + int64_t(m) * g->k, g->k, rows,
                 g->weights + (int64_t(head) * padded + column) * g->k, g->k, c + column, padded);
      for (int r = 0; r < rows; r++) place_head(c + r * padded, *h, *pool, head, m + r);
    }
}

}  // namespace
