// The matrix product on fused multiply-adds, for CPUs without bf16 arithmetic.
//
// Invariants: a row's sums run over k in order, one fused multiply-add each, whatever other rows
// are computed beside it; AVX-512, AVX2 and portable units agree bit for bit.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

// How many rows share a pass over the weights: as many as the registers hold.
#if defined(__AVX512F__)
constexpr int PASS = 8;
#else
constexpr int PASS = 2;
#endif
constexpr int AHEAD = 2048;  // elements

inline float low_half(uint32_t pair) {
  pair <<= 16;
  float f;
  memcpy(&f, &pair, 4);
  return f;
}
inline float high_half(uint32_t pair) {
  pair &= 0xffff0000u;
  float f;
  memcpy(&f, &pair, 4);
  return f;
}

template <int ROWS, bool FIRST>
inline void multiply_rows(const uint16_t *a, int64_t lda, const uint16_t *weights, int k, float *c,
                          int64_t ldc) {
  F acc[ROWS][2];
  for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = set1(0.f);
  for (int i = 0; i < k; i += 2) {
    // A 32 x 32 square holds two tiles of [16 pairs][16 columns][2].
    const uint16_t *w = weights + i / 32 * 1024 + i % 32 * 16;
    if (FIRST) {  // the weights come from memory
      __builtin_prefetch(w + AHEAD);
      __builtin_prefetch(w + AHEAD + 512);
    }
    const Pairs left = load_pairs(w), right = load_pairs(w + 512);
    for (int r = 0; r < ROWS; r++) {
      uint32_t pair;
      memcpy(&pair, a + r * lda + i, 4);
      const F low = set1(low_half(pair)), high = set1(high_half(pair));
      acc[r][0] = fma(high, left.second, fma(low, left.first, acc[r][0]));
      acc[r][1] = fma(high, right.second, fma(low, right.first, acc[r][1]));
    }
  }
  for (int r = 0; r < ROWS; r++) {
    store(c + r * ldc, acc[r][0]);
    store(c + r * ldc + 16, acc[r][1]);
  }
}

}  // namespace

#include "rows.h"
