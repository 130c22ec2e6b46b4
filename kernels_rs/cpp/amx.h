// AMX tiles: the five instructions, and a configuration for the length of a scope.
//
// The compiler's own intrinsics (GCC 12) do not tell it that a tile load reads memory, so it may
// move or drop the stores that fill the tile's source. These wrappers do.
#pragma once
#include <cstdint>

namespace {

template <int TILE>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// Rows of the tile lie `stride` bytes apart.
template <int TILE>
inline void tile_load(const void *from, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(stride) : "memory");
}

template <int TILE>
inline void tile_store(void *to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"(stride) : "memory");
}

// SUM[m][n] += A[m][2k] * B[k][2n] + A[m][2k + 1] * B[k][2n + 1], bf16 into fp32.
template <int SUM, int A, int B>
inline void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// Tiles of 16 rows of 64 bytes, except those in `narrow` (a bit each): 16 rows of 32 bytes, and
// those in `shallow`: 8 rows of 64 bytes. Released at the end, so that an idle thread's state
// stays small.
class Tiles {
 public:
  explicit Tiles(unsigned narrow = 0, unsigned shallow = 0) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (unsigned i = 0; i < 8; i++) {
      config.row_bytes[i] = narrow >> i & 1 ? 32 : 64;
      config.rows[i] = shallow >> i & 1 ? 8 : 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { __asm__ volatile("tilerelease"); }
  Tiles(const Tiles &) = delete;
  Tiles &operator=(const Tiles &) = delete;
};

}  // namespace
