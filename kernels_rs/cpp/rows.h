// How the vector products cut their rows: passes of as many rows as the registers hold, then of
// half as many, and so on. Which pass a row falls into does not change its sums.
//
// A unit includes this after the header that gives it PASS and `multiply_rows`.
#pragma once
#include "kernels.h"

namespace {

// FIRST: no pass has brought the weights into the cache yet.
template <int ROWS, bool FIRST>
inline void pass(const uint16_t *a, int64_t lda, int rows, const uint16_t *weights, int k,
                 float *c, int64_t ldc) {
  if (rows >= ROWS) {
    multiply_rows<ROWS, FIRST>(a, lda, weights, k, c, ldc);
    pass<ROWS, false>(a + ROWS * lda, lda, rows - ROWS, weights, k, c + ROWS * ldc, ldc);
  } else if constexpr (ROWS > 1) {
    pass<ROWS / 2, FIRST>(a, lda, rows, weights, k, c, ldc);
  }
}

inline void multiply(const uint16_t *a, int64_t lda, int rows, const uint16_t *weights, int k,
                     float *c, int64_t ldc) {
  pass<PASS, true>(a, lda, rows, weights, k, c, ldc);
}

}  // namespace
