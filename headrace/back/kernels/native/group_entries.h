// Entries of groups of neighbouring positions: one lies in the block of its group's last position, or has a block to itself
// where groups are larger than a block.
#pragma once

#include "token_row.h"

namespace {

struct Entries {
  const int32_t* table;
  int64_t table_stride, num_blocks, block_stride, group, size;  // size: positions that a block of entries stands for
};

HR_INLINE Entries entries_of(const int32_t* table, int64_t table_stride, int64_t num_blocks, int64_t block_stride,
                             int64_t group, int64_t block_tokens) {
  return {table, table_stride, num_blocks, block_stride, group, larger(group, block_tokens)};
}

// Whether groups divide blocks or are whole blocks, and the rows' blocks of entries are within bounds.
HR_INLINE bool entries_fit(const Entries& e, const int32_t* start, const int32_t* length, int64_t rows, int64_t tokens,
                           int64_t block_tokens) {
  if (e.group < 1 || (e.group % block_tokens && block_tokens % e.group)) return false;
  return rows_fit(start, length, e.table, rows, e.table_stride, tokens, e.size, e.num_blocks, e.group);
}

// The entry of a row's group in a cache of entries of so many elements.
template <class T>
HR_INLINE T* entry_at(const Entries& e, T* cache, int64_t row, int64_t group, int64_t width) {
  const int64_t last = (group + 1) * e.group - 1;
  return cache + e.table[row * e.table_stride + last / e.size] * e.block_stride + last % e.size / e.group * width;
}

}  // namespace
