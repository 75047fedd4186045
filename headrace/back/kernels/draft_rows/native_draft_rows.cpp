// What a drafter reads of rows and leaves in them: op.py holds the definitions.

#include "../native/simd.h"

namespace {

// A row of the step and its query tokens.
struct Row {
  int64_t row, first, num;
};

HR_INLINE bool row_at(const int32_t* row, const int32_t* start, int64_t r, int64_t rows, int64_t queries, Row* out) {
  *out = {row[r], start[r], int64_t(start[r + 1]) - start[r]};
  return out->row >= 0 && out->row < rows && (out->num < 1 || (out->first >= 0 && out->first + out->num <= queries));
}

}  // namespace

HR_PUBLIC int32_t HR_EXPORT(draft_follow)(const int32_t* row, const int32_t* start, const int64_t* position, const int32_t* tokens,
                                          int64_t* token, int64_t num_rows, int64_t num_tokens, int64_t rows, int64_t columns,
                                          int64_t shift) {
  for (int64_t t = 0; t < num_tokens; ++t) token[t] = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    Row one;
    if (!row_at(row, start, r, rows, num_tokens, &one)) return HR_BAD_INDEX;
    for (int64_t t = one.first; t < one.first + one.num; ++t) {
      const int64_t column = position[t] + shift;
      if (column >= 0 && column < columns) token[t] = tokens[one.row * columns + column];
    }
  }
  return HR_OK;
}
HR_REPLAYABLE(draft_follow)

HR_PUBLIC int32_t HR_EXPORT(draft_keep)(const int32_t* row, const int32_t* start, const int64_t* position, const int32_t* length,
                                        const uint8_t* hidden, uint8_t* state, int64_t num_rows, int64_t num_tokens,
                                        int64_t num_hidden, int64_t rows, int64_t row_bytes) {
  const bool per_row = num_hidden != num_tokens;
  if (per_row && num_hidden != num_rows) return HR_BAD_SHAPE;
  for (int64_t r = 0; r < num_rows; ++r) {
    Row one;
    if (!row_at(row, start, r, rows, num_tokens, &one)) return HR_BAD_INDEX;
    if (one.num < 1) continue;
    const int64_t behind = int64_t(length[one.row]) - 2 - position[one.first];
    const int64_t at = per_row ? r : one.first + smaller(larger<int64_t>(behind, 0), one.num - 1);
    __builtin_memcpy(state + one.row * row_bytes, hidden + at * row_bytes, size_t(row_bytes));
  }
  return HR_OK;
}
HR_REPLAYABLE(draft_keep)

HR_PUBLIC int32_t HR_EXPORT(draft_take)(const int32_t* row, const uint8_t* state, uint8_t* hidden, int64_t num_rows, int64_t rows,
                                        int64_t row_bytes) {
  for (int64_t r = 0; r < num_rows; ++r) {
    if (row[r] < 0 || row[r] >= rows) return HR_BAD_INDEX;
    __builtin_memcpy(hidden + r * row_bytes, state + row[r] * row_bytes, size_t(row_bytes));
  }
  return HR_OK;
}
HR_REPLAYABLE(draft_take)

HR_PUBLIC int32_t HR_EXPORT(draft_put)(const int32_t* row, const int32_t* start, const int64_t* token, const int64_t* offset,
                                       const int32_t* length, int32_t* tokens, int64_t num_rows, int64_t rows, int64_t columns,
                                       int64_t vocabulary, int64_t draft) {
  for (int64_t r = 0; r < num_rows; ++r) {
    if (row[r] < 0 || row[r] >= rows || (offset && (token[r] < 0 || token[r] >= vocabulary))) return HR_BAD_INDEX;
    const int64_t wanted = int64_t(start[r + 1]) - start[r] - 1, column = int64_t(length[row[r]]) + draft - 1;
    if (draft <= wanted && column < columns)
      tokens[row[r] * columns + column] = int32_t(token[r] + (offset ? offset[token[r]] : 0));
  }
  return HR_OK;
}
HR_REPLAYABLE(draft_put)

HR_PUBLIC int32_t HR_EXPORT(draft_inputs)(const int32_t* row, const int32_t* start, const int32_t* length, const int32_t* tokens,
                                          const int32_t* blocks, int64_t* token, int64_t* position, int64_t* slots, int32_t* kv_len,
                                          int32_t* tables, int64_t num_rows, int64_t rows, int64_t columns, int64_t groups,
                                          int64_t width, int64_t block_tokens, int64_t pass, int64_t shift) {
  for (int64_t r = 0; r < num_rows; ++r) {
    if (row[r] < 0 || row[r] >= rows) return HR_BAD_INDEX;
    const int64_t wanted = int64_t(start[r + 1]) - start[r] - 1, column = int64_t(length[row[r]]) - 1 + pass;
    const int64_t place = column - shift;
    const bool live = pass < wanted && place >= 0 && column < columns && place / block_tokens < width;
    token[r] = live ? tokens[row[r] * columns + column] : 0;
    position[r] = live ? place : 0;
    kv_len[r] = live ? int32_t(place + 1) : 1;
    for (int64_t g = 0; g < groups; ++g) {
      const int32_t* own = blocks + (g * rows + row[r]) * width;
      slots[g * num_rows + r] = live ? int64_t(own[place / block_tokens]) * block_tokens + place % block_tokens : 0;
      __builtin_memcpy(tables + (g * num_rows + r) * width, own, size_t(width) * sizeof(int32_t));
    }
  }
  return HR_OK;
}
HR_REPLAYABLE(draft_inputs)

HR_PUBLIC int32_t HR_EXPORT(draft_block)(const int32_t* row, const int32_t* start, const int32_t* length, const int32_t* tokens,
                                         const int32_t* blocks, int64_t* token, int64_t* position, int64_t* slots, int32_t* kv_len,
                                         int32_t* tables, int64_t num_rows, int64_t places, int64_t rows, int64_t columns,
                                         int64_t groups, int64_t width, int64_t block_tokens, int64_t mask, int64_t more) {
  const int64_t all = num_rows * places;
  for (int64_t r = 0; r < num_rows; ++r) {
    if (row[r] < 0 || row[r] >= rows) return HR_BAD_INDEX;
    const int64_t wanted = int64_t(start[r + 1]) - start[r] - 1, newest = int64_t(length[row[r]]) - 1;
    const int64_t most = smaller(columns, width * block_tokens);
    const int64_t end = wanted > 0 && newest >= 0 ? smaller(newest + wanted + more, most) : 0;
    for (int64_t i = 0; i < places; ++i) {
      const int64_t at = i * num_rows + r, place = newest + i;
      const bool live = newest >= 0 && place < end;
      token[at] = !live ? 0 : i ? mask : tokens[row[r] * columns + newest];
      position[at] = live ? place : 0;
      kv_len[at] = !live ? 1 : int32_t(more ? end : place + 1);
      for (int64_t g = 0; g < groups; ++g) {
        const int32_t* own = blocks + (g * rows + row[r]) * width;
        slots[g * all + at] = live ? int64_t(own[place / block_tokens]) * block_tokens + place % block_tokens : 0;
        __builtin_memcpy(tables + (g * all + at) * width, own, size_t(width) * sizeof(int32_t));
      }
    }
  }
  return HR_OK;
}
HR_REPLAYABLE(draft_block)
