// The matrix product on AMX tiles: 32 columns and 16 or 32 rows at a time.
//
// Invariants: K is never split and the row count never looked at except to skip the second tile
// row, so a row's sums are the same beside any other rows. Rows past the last are computed from
// padding and dropped.
#pragma once
#include "amx.h"
#include "kernels.h"
#include "vec.h"

namespace {

constexpr int AHEAD = 4096;  // bytes: decode streams weights from memory

template <bool BOTH>
inline void multiply_tiles(const uint16_t *a, int64_t lda, const uint16_t *weights, int k, float *c,
                           int64_t ldc) {
  tile_zero<0>();
  tile_zero<1>();
  if (BOTH) tile_zero<2>(), tile_zero<3>();
  for (int i = 0; i < k; i += 32) {
    const uint16_t *w = weights + i * 32;
    if (!BOTH)
      for (int line = 0; line < 2048; line += 64)
        _mm_prefetch((const char *)w + AHEAD + line, _MM_HINT_T0);
    tile_load<4>(a + i, lda * 2);
    tile_load<6>(w, 64);
    tile_multiply<0, 4, 6>();
    tile_load<7>(w + 512, 64);
    tile_multiply<1, 4, 7>();
    if (BOTH) {
      tile_load<5>(a + 16 * lda + i, lda * 2);
      tile_multiply<2, 5, 6>();
      tile_multiply<3, 5, 7>();
    }
  }
  tile_store<0>(c, ldc * 4);
  tile_store<1>(c + 16, ldc * 4);
  if (BOTH) {
    tile_store<2>(c + 16 * ldc, ldc * 4);
    tile_store<3>(c + 16 * ldc + 16, ldc * 4);
  }
}

inline void multiply(const uint16_t *a, int64_t lda, int rows, const uint16_t *weights, int k,
                     float *c, int64_t ldc) {
  if (rows > 16) multiply_tiles<true>(a, lda, weights, k, c, ldc);
  else multiply_tiles<false>(a, lda, weights, k, c, ldc);
}

}  // namespace
