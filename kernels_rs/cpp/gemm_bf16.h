// The matrix product on AVX-512-BF16: vdpbf16ps adds two products to each fp32 lane.
//
// Invariants: a row's sums run over pairs of k in order, whatever other rows are computed beside
// it. The instruction rounds its own way, so these bits differ from the other units'.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

constexpr int PASS = 8;
constexpr int AHEAD = 2048;  // elements

template <int ROWS, bool FIRST>
inline void multiply_rows(const uint16_t *a, int64_t lda, const uint16_t *weights, int k, float *c,
                          int64_t ldc) {
  __m512 acc[ROWS][2];
  for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int i = 0; i < k; i += 2) {
    // A 32 x 32 square holds two tiles of [16 pairs][16 columns][2].
    const uint16_t *w = weights + i / 32 * 1024 + i % 32 * 16;
    if (FIRST) {  // the weights come from memory
      __builtin_prefetch(w + AHEAD);
      __builtin_prefetch(w + AHEAD + 512);
    }
    const __m512bh left = (__m512bh)_mm512_loadu_si512(w);
    const __m512bh right = (__m512bh)_mm512_loadu_si512(w + 512);
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      memcpy(&pair, a + r * lda + i, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], both, left);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], both, right);
    }
  }
  for (int r = 0; r < ROWS; r++) {
    _mm512_storeu_ps(c + r * ldc, acc[r][0]);
    _mm512_storeu_ps(c + r * ldc + 16, acc[r][1]);
  }
}

}  // namespace

#include "rows.h"
