// How the vector products cut their rows: passes of as many rows as the registers hold, then of
// half as many, and so on. Which pass a row falls into does not change its sums.
//
// A unit includes this after the header that gives it PASS and `multiply_rows`.
#pragma once
#include "kernels.h"

namespace {

template <int ROWS>
inline void pass(const uint16_t *a, int64_t lda, int rows, const uint16_t *weights, int k,
                 float *c, int64_t ldc) {
  int r = 0;
  for (; r + ROWS <= rows; r += ROWS)
    multiply_rows<ROWS>(a + r * lda, lda, weights, k, c + r * ldc, ldc);
  if constexpr (ROWS > 1)
    pass<ROWS / 2>(a + r * lda, lda, rows - r, weights, k, c + r * ldc, ldc);
}

inline void multiply(const uint16_t *a, int64_t lda, int rows, const uint16_t *weights, int k,
                     float *c, int64_t ldc) {
  pass<PASS>(a, lda, rows, weights, k, c, ldc);
}

}  // namespace
