// Sixteen floats as one value, with the same bits on every instruction set.
//
// Owns: the type F and its operations, chosen by the flags of the unit that includes it: AVX-512
// (one register), AVX2 (two), portable (an array; the compiler vectorises it, and the tests use it
// as the oracle).
// Invariants: only correctly rounded operations (no rcp14, no rsqrt14), fused multiply-add only
// where it is written, sums over lanes in one fixed tree. So a unit's results do not depend on the
// CPU that runs it, and the three versions agree bit for bit.
// Everything has internal linkage: units of different flags must never share a function.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;

inline int at_most(int n, int limit) { return n < limit ? n : limit; }

inline float bf16_to_float(uint16_t h) {
  uint32_t bits = uint32_t(h) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t float_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);  // keep a NaN a NaN
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct F {
  __m512 v;
};
inline F load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, F a) { _mm512_storeu_ps(p, a.v); }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F first_lanes(F a, int n, F other) {  // lanes below n from a, the rest from other
  return {_mm512_mask_mov_ps(other.v, __mmask16((1u << n) - 1), a.v)};
}
inline F scale_by_power(F p, F magic) {  // p * 2^n, n in the low bits of magic
  __m512i n = _mm512_slli_epi32(_mm512_castps_si512(magic.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), n))};
}
inline F load_bf16(const uint16_t *p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// Elements 0, 2, 4 … and 1, 3, 5 … of 32.
struct Pairs {
  F first, second;
};
inline Pairs load_pairs(const uint16_t *p) {
  __m512i both = _mm512_loadu_si512(p);
  __m512i high = _mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000u)));
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))}, {_mm512_castsi512_ps(high)}};
}
inline F load_f16(const uint16_t *p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))};
}
inline void store_f16(uint16_t *p, F a) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
#if defined(__AVX512BF16__)
inline void store_bf16(uint16_t *p, F a) {
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a.v));
}
#else
inline void store_bf16(uint16_t *p, F a) {
  __m512i bits = _mm512_castps_si512(a.v), high = _mm512_srli_epi32(bits, 16);
  __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  __m512i out = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, quiet);
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(out));
}
#endif
// Lane i of the result is the sum of the lanes of a[i], folded at distances 8, 4, 2, 1.
inline F sum_each(const F (&a)[LANES]) {
  __m512 four[4];
  for (int j = 0; j < 4; j++) {
    __m512 eight[2];
    for (int h = 0; h < 2; h++) {
      __m512 x = a[j + 8 * h].v, y = a[j + 8 * h + 4].v;
      eight[h] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    }
    four[j] = _mm512_add_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88),
                            _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));
  }
  __m512 two[2];
  for (int h = 0; h < 2; h++) {
    __m512d x = _mm512_castps_pd(four[2 * h]), y = _mm512_castps_pd(four[2 * h + 1]);
    two[h] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                           _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  return {_mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88),
                        _mm512_shuffle_ps(two[0], two[1], 0xdd))};
}

#elif defined(__AVX2__)

struct F {
  __m256 lo, hi;
};
inline F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, F a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F operator+(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F fma(F a, F b, F c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline __m256 first_half(__m256 a, int n, __m256 other) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
  return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(below));
}
inline F first_lanes(F a, int n, F other) {
  return {first_half(a.lo, n, other.lo), first_half(a.hi, n - 8, other.hi)};
}
inline __m256 power_half(__m256 p, __m256 magic) {
  __m256i n = _mm256_slli_epi32(_mm256_castps_si256(magic), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n));
}
inline F scale_by_power(F p, F magic) {
  return {power_half(p.lo, magic.lo), power_half(p.hi, magic.hi)};
}
inline __m256 bf16_half(const uint16_t *p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F load_bf16(const uint16_t *p) { return {bf16_half(p), bf16_half(p + 8)}; }
struct Pairs {
  F first, second;
};
inline Pairs load_pairs(const uint16_t *p) {
  const __m256i mask = _mm256_set1_epi32(int(0xffff0000u));
  __m256i lo = _mm256_loadu_si256((const __m256i *)p);
  __m256i hi = _mm256_loadu_si256((const __m256i *)(p + 16));
  auto floats = [](__m256i bits) { return _mm256_castsi256_ps(bits); };
  return {{floats(_mm256_slli_epi32(lo, 16)), floats(_mm256_slli_epi32(hi, 16))},
          {floats(_mm256_and_si256(lo, mask)), floats(_mm256_and_si256(hi, mask))}};
}
inline F load_f16(const uint16_t *p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
inline void store_f16(uint16_t *p, F a) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_bf16(uint16_t *p, F a) {
  alignas(64) float lanes[LANES];
  store(lanes, a);
  for (int i = 0; i < LANES; i++) p[i] = float_to_bf16(lanes[i]);
}
inline F sum_each(const F (&a)[LANES]) {
  __m256 half[2];
  for (int h = 0; h < 2; h++) {
    __m256 four[4];
    for (int j = 0; j < 4; j++) {
      const F &x = a[8 * h + j], &y = a[8 * h + j + 4];
      __m256 p = _mm256_add_ps(x.lo, x.hi), q = _mm256_add_ps(y.lo, y.hi);
      four[j] = _mm256_add_ps(_mm256_permute2f128_ps(p, q, 0x20),
                              _mm256_permute2f128_ps(p, q, 0x31));
    }
    __m256 two[2];
    for (int i = 0; i < 2; i++) {
      __m256d x = _mm256_castps_pd(four[2 * i]), y = _mm256_castps_pd(four[2 * i + 1]);
      two[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                             _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    half[h] = _mm256_add_ps(_mm256_shuffle_ps(two[0], two[1], 0x88),
                            _mm256_shuffle_ps(two[0], two[1], 0xdd));
  }
  return {half[0], half[1]};
}

#else

struct F {
  float v[LANES];
};
#define EACH_LANE for (int i = 0; i < LANES; i++)
inline F load(const float *p) { F r; memcpy(r.v, p, sizeof r.v); return r; }
inline void store(float *p, F a) { memcpy(p, a.v, sizeof a.v); }
inline F set1(float x) { F r; EACH_LANE r.v[i] = x; return r; }
inline F operator+(F a, F b) { EACH_LANE a.v[i] += b.v[i]; return a; }
inline F operator-(F a, F b) { EACH_LANE a.v[i] -= b.v[i]; return a; }
inline F operator*(F a, F b) { EACH_LANE a.v[i] *= b.v[i]; return a; }
inline F operator/(F a, F b) { EACH_LANE a.v[i] /= b.v[i]; return a; }
inline F fma(F a, F b, F c) { EACH_LANE a.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return a; }
inline F max(F a, F b) { EACH_LANE a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F min(F a, F b) { EACH_LANE a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F first_lanes(F a, int n, F other) {
  EACH_LANE a.v[i] = i < n ? a.v[i] : other.v[i];
  return a;
}
inline F scale_by_power(F p, F magic) {
  uint32_t bits[LANES], n[LANES];
  memcpy(bits, p.v, sizeof bits);
  memcpy(n, magic.v, sizeof n);
  EACH_LANE bits[i] += n[i] << 23;
  memcpy(p.v, bits, sizeof bits);
  return p;
}
inline F load_bf16(const uint16_t *p) { F r; EACH_LANE r.v[i] = bf16_to_float(p[i]); return r; }
struct Pairs {
  F first, second;
};
inline Pairs load_pairs(const uint16_t *p) {
  Pairs r;
  EACH_LANE r.first.v[i] = bf16_to_float(p[2 * i]), r.second.v[i] = bf16_to_float(p[2 * i + 1]);
  return r;
}
inline F load_f16(const uint16_t *p) {
  _Float16 h[LANES];
  memcpy(h, p, sizeof h);
  F r;
  EACH_LANE r.v[i] = float(h[i]);
  return r;
}
inline void store_f16(uint16_t *p, F a) {
  _Float16 h[LANES];
  EACH_LANE h[i] = _Float16(a.v[i]);
  memcpy(p, h, sizeof h);
}
inline void store_bf16(uint16_t *p, F a) { EACH_LANE p[i] = float_to_bf16(a.v[i]); }
inline F sum_each(const F (&a)[LANES]) {
  F r;
  for (int k = 0; k < LANES; k++) {
    F t = a[k];
    for (int d = LANES / 2; d; d /= 2)
      for (int i = 0; i < d; i++) t.v[i] += t.v[i + d];
    r.v[k] = t.v[0];
  }
  return r;
}
#undef EACH_LANE

#endif

inline float sum(F a) {
  alignas(64) float v[LANES];
  store(v, a);
  for (int d = LANES / 2; d; d /= 2)
    for (int i = 0; i < d; i++) v[i] += v[i + d];
  return v[0];
}

inline float largest(F a) {
  alignas(64) float v[LANES];
  store(v, a);
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// 2^x within 2e-7 for x in [-125, 126]; x is clamped to that. exp2v(0) is exactly 1.
inline F exp2v(F x) {
  x = min(max(x, set1(-125.f)), set1(126.f));
  const F round = set1(12582912.f);  // 1.5 * 2^23: the sum's low bits are round(x)
  F magic = x + round, f = x - (magic - round);
  F p = set1(1.54035304e-4f);
  p = fma(p, f, set1(1.33335581e-3f));
  p = fma(p, f, set1(9.61812911e-3f));
  p = fma(p, f, set1(5.55041087e-2f));
  p = fma(p, f, set1(2.40226507e-1f));
  p = fma(p, f, set1(6.93147181e-1f));
  p = fma(p, f, set1(1.f));
  return scale_by_power(p, magic);
}

}  // namespace
