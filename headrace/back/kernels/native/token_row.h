// Which row of a step a query token belongs to, for kernels that work a token at a time.
#pragma once

#include "simd.h"

namespace {

// row: -1 of padding; position: its place in the row's sequence.
struct TokenPlace {
  int64_t row, position;
};

// start [rows + 1]: first query token of each row; length [rows]: tokens in its cache, the step's own among them.
HR_INLINE TokenPlace token_place(const int32_t* start, const int32_t* length, int64_t rows, int64_t token) {
  if (token >= start[rows]) return {-1, 0};
  int64_t low = 0, high = rows;  // start[low] <= token < start[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (start[middle] <= token) low = middle;
    else high = middle;
  }
  return {low, length[low] - (start[low + 1] - token)};
}

// Whether every row with queries has them, its tokens and its blocks within bounds. group: blocks behind the last whole group of
// so many tokens are not asked for.
HR_INLINE bool rows_fit(const int32_t* start, const int32_t* length, const int32_t* table, int64_t rows, int64_t table_stride,
                        int64_t tokens, int64_t block_tokens, int64_t num_blocks, int64_t group = 1) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t queries = start[r + 1] - start[r], blocks = ceil_div(length[r] / group * group, block_tokens);
    if (start[r] < 0 || queries < 0 || start[r + 1] > tokens) return false;
    if (queries == 0) continue;
    if (length[r] < queries || blocks > table_stride) return false;
    for (int64_t b = 0; b < blocks; ++b)
      if (table[r * table_stride + b] < 0 || table[r * table_stride + b] >= num_blocks) return false;
  }
  return true;
}

}  // namespace
