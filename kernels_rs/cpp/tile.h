// What the columns of an attention tile are.
#pragma once
#include "kernels.h"

namespace {

constexpr int COLUMNS = 16;           // columns that are computed together
constexpr float NOTHING = -1e30f;     // the score of a key that a column may not see

// Where a column's query and output are, in elements from the sequence's first row.
inline int64_t column_offset(const MkPool &pool, const MkTile &tile, int column) {
  const int c = tile.first + column, head = tile.kv_head * tile.group + c % tile.group;
  return c / tile.group * tile.row_elements + int64_t(head) * pool.head_dim;
}

// How many keys a column sees.
inline int column_visible(const MkTile &tile, int column) {
  return tile.visible + (tile.first + column) / tile.group;
}

}  // namespace
