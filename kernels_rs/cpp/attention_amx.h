// Paged attention on AMX tiles, for bf16 pools: 16 query columns against 32 keys at a time.
//
// Scores are computed transposed, [key][column], so that the softmax runs down the lanes; the
// weights then are an AMX B operand as they stand, and the values must be transposed, [dim][key],
// once for all tiles of columns that share a KV head.
// Invariants: as in attention_vec.h. A masked key's weight is set to zero, not left to underflow,
// and values past the last key any column sees are zeros, so that stale bytes cannot reach a sum.
// A part is, for each 16 columns, {max[16], sum[16], output[head_dim][16]}.
#pragma once
#include "amx.h"
#include "tile.h"
#include "vec.h"

namespace {

constexpr int STEP = 32;     // keys that one A or B tile of weights spans
constexpr int TILES = 16;    // tiles of 16 columns that share the transposed values
constexpr int MAX_COLUMNS = TILES * COLUMNS;
constexpr int SCORES = MK_KEY_BLOCK * COLUMNS;  // of one tile of columns

inline int round_up(int n, int step) { return (n + step - 1) / step * step; }

// 0, 16, 1, 17 …: the low and the high half of a register, element by element.
alignas(64) constexpr uint16_t INTERLEAVE[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                 21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// 2^x for weights that become bf16 at once: within 1e-4, exactly 0 far below.
inline __m512 exp2_weight(__m512 x) {
  __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  __m512 p = _mm512_set1_ps(7.8024523e-2f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.2606716e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9583356e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9992520e-1f));
  return _mm512_scalef_ps(p, x);
}

inline void transpose_16x16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 8; i++) {
    const int at = i / 4 * 8 + i % 4;
    t[at] = _mm512_shuffle_i32x4(r[at], r[at + 4], 0x88);
    t[at + 4] = _mm512_shuffle_i32x4(r[at], r[at + 4], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// One sequence's KV head: where its rows are.
struct Source {
  const uint8_t *base;
  const int32_t *table;
  int64_t block_bytes, row;  // row: elements between tokens
  int block_tokens;
  const uint16_t *at(int key) const {
    return (const uint16_t *)(base + table[key / block_tokens] * block_bytes) +
           key % block_tokens * row;
  }
};

inline Source source(const MkPool &pool, const MkTile &tile, int64_t plane) {
  const int64_t head = int64_t(tile.kv_head) * pool.head_dim * 2;
  return {pool.base + plane + head, tile.table, pool.block_bytes,
          int64_t(pool.kv_heads) * pool.head_dim, pool.block_tokens};
}

// Asks for 32 rows before they are needed.
template <int D>
inline void fetch(const Source &source, int key) {
  const char *row = (const char *)source.at(key);
  for (int i = 0; i < STEP; i++, row += source.row * 2)
    for (int d = 0; d < D * 2; d += 64) _mm_prefetch(row + d, _MM_HINT_T0);
}

// The values of positions [first, end) as A tiles [step][dim / 16][16 dims][32 keys]; zeros from
// `end` on. This is the first touch of the block's KV, so it asks for the values to come (up to
// position `last`) and for the keys, which the scores want next.
template <int D>
void transpose_values(const Source &keys, const Source &values, int first, int end, int last,
                      uint16_t *out) {
  const __m512i mix = _mm512_load_si512(INTERLEAVE);
  for (int key = first; key < end; key += STEP) {
    const uint16_t *v = values.at(key);
    const int rows = end - key;
    if (key + 2 * STEP < last) fetch<D>(values, key + 2 * STEP);
    fetch<D>(keys, key);
    for (int d = 0; d < D; d += 16, out += 16 * STEP) {
      __m512i r[16];
      for (int i = 0; i < 16; i++) {  // pairs of keys, side by side for each dim
        const uint16_t *p = v + 2 * i * values.row + d;
        __m256i a = _mm256_setzero_si256(), b = a;
        if (2 * i < rows) a = _mm256_loadu_si256((const __m256i *)p);
        if (2 * i + 1 < rows) b = _mm256_loadu_si256((const __m256i *)(p + values.row));
        r[i] = _mm512_permutexvar_epi16(mix, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
      }
      transpose_16x16(r);
      for (int i = 0; i < 16; i++) _mm512_store_si512(out + i * STEP, r[i]);
    }
  }
}

// Scores of `keys` keys against one or two tiles of 16 columns, [tile][key][column]. A pair shares
// every load of a key: what limits this is the way from the second-level cache.
template <int D, bool PAIR>
void score(const Source &source, int first, int keys, const uint32_t *query, float *scores) {
  constexpr int DIMS = D % 32 ? 16 : 32;  // of one operand tile: a head must be whole tiles
  const Tiles tiles(DIMS == 16 ? 1u << 4 : 0, DIMS == 16 ? 3u << 5 : 0);
  const int64_t row = source.row * 2;
  for (int k = 0; k < keys; k += STEP) {
    const uint16_t *low = source.at(first + k), *high = low + 16 * source.row;
    tile_zero<0>();
    tile_zero<1>();
    if (PAIR) tile_zero<2>();
    if (PAIR) tile_zero<3>();
    for (int d = 0; d < D; d += DIMS) {
      tile_load<5>(query + d * 8, 64);
      tile_load<4>(low + d, row);
      tile_multiply<0, 4, 5>();
      if (PAIR) tile_load<6>(query + D * 8 + d * 8, 64);
      if (PAIR) tile_multiply<2, 4, 6>();
      tile_load<4>(high + d, row);
      tile_multiply<1, 4, 5>();
      if (PAIR) tile_multiply<3, 4, 6>();
    }
    float *out = scores + k * COLUMNS;
    tile_store<0>(out, 64);
    tile_store<1>(out + 16 * COLUMNS, 64);
    if (PAIR) tile_store<2>(out + SCORES, 64);
    if (PAIR) tile_store<3>(out + SCORES + 16 * COLUMNS, 64);
  }
}

// Scores become bf16 weights in place, [pair of keys][column][2]; maximum and sum go to part.
inline void weights(float *scores, int first, int keys, __m512i visible, float scale, float *part) {
  const __m512i mix = _mm512_load_si512(INTERLEAVE);
  uint32_t *out = (uint32_t *)scores;  // half as large: writes never overtake reads
  const __m512 factor = _mm512_set1_ps(scale), nothing = _mm512_set1_ps(NOTHING);
  const int sure = _mm512_reduce_min_epi32(visible) - first;  // keys that every column sees
  const int whole = sure < 0 ? 0 : sure < keys ? sure / 4 * 4 : keys;
  auto hidden = [&](int k) {
    return _mm512_cmple_epi32_mask(visible, _mm512_set1_epi32(first + k));
  };
  for (int k = whole; k < keys; k++)
    _mm512_mask_store_ps(scores + k * COLUMNS, hidden(k), nothing);
  __m512 top[4], total[4];
  for (int i = 0; i < 4; i++) top[i] = nothing, total[i] = _mm512_setzero_ps();
  for (int k = 0; k < keys; k += 4)
    for (int i = 0; i < 4; i++)
      top[i] = _mm512_max_ps(top[i], _mm512_load_ps(scores + (k + i) * COLUMNS));
  __m512 m = _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
  m = _mm512_mul_ps(m, factor);
  for (int k = 0; k < keys; k += 4) {
    __m512 e[4];
    for (int i = 0; i < 4; i++) {
      const __m512 s = _mm512_load_ps(scores + (k + i) * COLUMNS);
      e[i] = exp2_weight(_mm512_fmsub_ps(s, factor, m));
      if (k >= whole) e[i] = _mm512_mask_mov_ps(e[i], hidden(k + i), _mm512_setzero_ps());
      total[i] = _mm512_add_ps(total[i], e[i]);
    }
    for (int i = 0; i < 4; i += 2) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(e[i + 1], e[i]);
      _mm512_store_si512(out + (k + i) * 8, _mm512_permutexvar_epi16(mix, both));
    }
  }
  _mm512_storeu_ps(part, m);
  const __m512 low = _mm512_add_ps(total[0], total[1]), high = _mm512_add_ps(total[2], total[3]);
  _mm512_storeu_ps(part + 16, _mm512_add_ps(low, high));
}

// output[dim][column] = values times weights, for one or two tiles of columns.
template <int D, bool PAIR>
void weigh(const uint16_t *values, const float *scores, int keys, float *out, float *out_second) {
  const Tiles tiles;
  for (int d = 0; d < D; d += 32) {
    const bool both = d + 16 < D;
    tile_zero<0>();
    tile_zero<1>();
    if (PAIR) tile_zero<2>();
    if (PAIR) tile_zero<3>();
    for (int k = 0; k < keys; k += STEP) {
      const uint16_t *v = values + (k * D + d * STEP);
      const float *w = scores + k * COLUMNS / 2;
      tile_load<5>(w, 64);
      tile_load<4>(v, 64);
      tile_multiply<0, 4, 5>();
      if (PAIR) tile_load<6>(w + SCORES, 64);
      if (PAIR) tile_multiply<2, 4, 6>();
      if (!both) continue;
      tile_load<7>(v + 16 * STEP, 64);
      tile_multiply<1, 7, 5>();
      if (PAIR) tile_multiply<3, 7, 6>();
    }
    tile_store<0>(out + d * COLUMNS, 64);
    if (PAIR) tile_store<2>(out_second + d * COLUMNS, 64);
    if (!both) continue;
    tile_store<1>(out + (d + 16) * COLUMNS, 64);
    if (PAIR) tile_store<3>(out_second + (d + 16) * COLUMNS, 64);
  }
}

// a += b for the columns that see softmax block `block`.
inline void merge_columns(int dim, __mmask16 seen, const float *b, float *a) {
  const F ma = load(a), mb = load(b), top = max(ma, mb);
  const F x = exp2v(ma - top), y = exp2v(mb - top);
  _mm512_mask_storeu_ps(a, seen, top.v);
  for (int i = 1; i < 2 + dim; i++)
    _mm512_mask_storeu_ps(a + i * 16, seen,
                          fma(load(b + i * 16), y, load(a + i * 16) * x).v);
}

inline __m512i visible_of(const MkTile &tile, int column) {
  alignas(64) int32_t v[COLUMNS];
  for (int c = 0; c < COLUMNS; c++)
    v[c] = column_visible(tile, at_most(column + c, tile.count - 1));
  return _mm512_load_si512(v);
}

inline __mmask16 seen_mask(const MkTile &tile, int column, int block) {
  return _mm512_cmpgt_epi32_mask(visible_of(tile, column), _mm512_set1_epi32(block * MK_KEY_BLOCK));
}

// Queries of 16 columns as a B operand: [pair of dims][column].
template <int D>
void gather_queries(const MkPool &pool, const MkTile &tile, int column, uint32_t *out) {
  for (int c = 0; c < COLUMNS; c++) {
    const int at = at_most(column + c, tile.count - 1);
    const uint16_t *q = (const uint16_t *)tile.query + column_offset(pool, tile, at);
    for (int d = 0; d < D; d += 2) memcpy(out + d * 8 + c, q + d, 4);
  }
}

// Buffers of one attend call; on the stack, so that kernels keep no state.
template <int D>
struct Workspace {
  alignas(64) uint32_t queries[TILES][D * 8];
  alignas(64) uint16_t values[MK_KEY_BLOCK * D];
  alignas(64) float scores[2 * SCORES];
  alignas(64) float later[2][COLUMNS * (2 + D)];
};

// One or two tiles of columns from `column` on, over softmax block `block`.
template <int D, bool PAIR>
void attend_columns(const MkTile &tile, const Source &keys, Workspace<D> &work, int column,
                    int block, float scale, bool fresh, float *part) {
  constexpr int PART = COLUMNS * (2 + D);
  const int first = block * MK_KEY_BLOCK;
  const int seen = column_visible(tile, at_most(column + (PAIR ? 2 : 1) * COLUMNS, tile.count) - 1);
  const int count = round_up(at_most(seen, first + MK_KEY_BLOCK) - first, STEP);
  float *a = fresh ? part : work.later[0], *b = fresh ? part + PART : work.later[1];
  score<D, PAIR>(keys, first, count, work.queries[column / COLUMNS], work.scores);
  weights(work.scores, first, count, visible_of(tile, column), scale, a);
  if (PAIR)
    weights(work.scores + SCORES, first, count, visible_of(tile, column + COLUMNS), scale, b);
  weigh<D, PAIR>(work.values, work.scores, count, a + 2 * COLUMNS, b + 2 * COLUMNS);
  if (fresh) return;
  merge_columns(D, seen_mask(tile, column, block), a, part);
  if (PAIR) merge_columns(D, seen_mask(tile, column + COLUMNS, block), b, part + PART);
}

template <int D>
void attend_all(const MkPool &pool, const MkTile &tile, float scale, int from, int to,
                float *part) {
  Workspace<D> work;
  const Source keys = source(pool, tile, pool.k_offset);
  const Source values = source(pool, tile, pool.v_offset);
  const int last = column_visible(tile, tile.count - 1);
  scale *= 1.44269504f;
  for (int c = 0; c < tile.count; c += COLUMNS)
    gather_queries<D>(pool, tile, c, work.queries[c / COLUMNS]);
  for (int block = from; block < to; block++) {
    const int first = block * MK_KEY_BLOCK, end = at_most(last, first + MK_KEY_BLOCK);
    transpose_values<D>(keys, values, first, end, last, work.values);
    for (int c = 0; c < tile.count; c += 2 * COLUMNS) {
      const bool pair = c + COLUMNS < tile.count;
      const int after = at_most(c + (pair ? 2 : 1) * COLUMNS, tile.count);
      if (column_visible(tile, after - 1) <= first) continue;  // no column of it sees the block
      float *sums = part + c * (2 + D);
      if (pair) attend_columns<D, true>(tile, keys, work, c, block, scale, block == from, sums);
      else attend_columns<D, false>(tile, keys, work, c, block, scale, block == from, sums);
    }
  }
}

void attend(const MkPool *pool, const MkTile *tile, float scale, int32_t from, int32_t to,
            float *part) {
  switch (pool->head_dim) {
    case 64: return attend_all<64>(*pool, *tile, scale, from, to, part);
    case 80: return attend_all<80>(*pool, *tile, scale, from, to, part);
    case 96: return attend_all<96>(*pool, *tile, scale, from, to, part);
    case 128: return attend_all<128>(*pool, *tile, scale, from, to, part);
    default: __builtin_trap();  // the driver admits these four alone
  }
}

void merge(const MkPool *pool, const MkTile *tile, int32_t block, const float *later, float *part) {
  const int dim = pool->head_dim;
  for (int c = 0; c < tile->count; c += COLUMNS)
    merge_columns(dim, seen_mask(*tile, c, block), later + c * (2 + dim), part + c * (2 + dim));
}

void finish(const MkPool *pool, const MkTile *tile, const float *part) {
  const int dim = pool->head_dim;
  for (int first = 0; first < tile->count; first += COLUMNS) {
    const float *p = part + first * (2 + dim);
    const F one_over = set1(1.f) / load(p + 16);
    for (int d = 0; d < dim; d += 16) {
      __m512i r[16];
      for (int i = 0; i < 16; i++)
        r[i] = _mm512_castps_si512((load(p + (2 + d + i) * 16) * one_over).v);
      transpose_16x16(r);
      for (int c = 0; c < at_most(tile->count - first, COLUMNS); c++) {
        uint16_t *out = (uint16_t *)tile->out + column_offset(*pool, *tile, first + c) + d;
        store_bf16(out, {_mm512_castsi512_ps(r[c])});
      }
    }
  }
}

}  // namespace
