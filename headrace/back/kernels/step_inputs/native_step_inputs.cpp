// From the host's message to the inputs of a step: op.py holds the layout and the definition.

#include "../native/simd.h"

namespace {

constexpr int64_t kHeader = 8;
enum Word : int64_t { ROWS = 0, TOKENS = 1, UPDATES = 3 };

struct Step {
  const int32_t *words, *row, *kv_len, *start;
  const int32_t* length;  // of each row on the device, or null: kv_len is exact
  const int32_t* cross;   // tokens in each row's cross caches, or null: their span
  const int32_t* tokens;
  const int64_t* group;  // [groups, 2]: tokens of a block, and of an encoder's longest output (0: it grows with the row)
  int64_t token_columns, max_rows, columns, groups;
};

// Position of a row's first query token; kv_len is an upper bound where lengths are there.
HR_INLINE int64_t first_position(const Step& p, int64_t r) {
  const int64_t queries = p.start[r + 1] - p.start[r], bound = p.kv_len[r] - queries;
  if (p.length == nullptr || queries == 0) return bound;
  const int64_t newest = int64_t(p.length[p.row[r]]) - 1;
  return newest < bound ? newest : bound;
}

// Block table entries of the message, into the tables of all groups; false for a place outside.
HR_INLINE bool update(const Step& p, int32_t* blocks, int64_t groups, int64_t most) {
  const int64_t count = p.words[UPDATES], entries = groups * (p.max_rows + 1) * p.columns;
  if (count < 0 || count > most) return false;
  const int32_t* pairs = p.words + kHeader + 4 * (p.max_rows + 8);
  for (int64_t i = 0; i < count; ++i) {
    if (pairs[2 * i] < 0 || pairs[2 * i] >= entries) return false;
    blocks[pairs[2 * i]] = pairs[2 * i + 1];
  }
  return true;
}

// The tokens of the step's row r in a group, of which it has `length` of its own.
HR_INLINE int64_t in_group(const Step& p, int64_t g, int64_t r, int64_t length) {
  const int64_t span = p.group[2 * g + 1];
  if (span == 0 || length == 0) return length;
  return p.cross == nullptr ? span : smaller<int64_t>(p.cross[p.row[r]], span);
}

HR_INLINE bool sound(const Step& p, int64_t rows, int64_t tokens) {
  if (p.words[ROWS] < 0 || p.words[ROWS] > rows || p.words[TOKENS] < 0 || p.words[TOKENS] > tokens) return false;
  for (int64_t r = 0; r < p.words[ROWS]; ++r) {
    const int64_t length = p.kv_len[r], queries = p.start[r + 1] - p.start[r];
    if (p.row[r] < 0 || p.row[r] > p.max_rows || queries < 0 || queries > length || p.start[r] < 0) return false;
    if (p.start[r + 1] > p.words[TOKENS] || length > p.token_columns || first_position(p, r) < 0) return false;
    for (int64_t g = 0; g < p.groups; ++g)
      if (const int64_t here = in_group(p, g, r, length); here < 0 || here > p.columns * p.group[2 * g]) return false;
  }
  return true;
}

}  // namespace

HR_PUBLIC int32_t HR_EXPORT(step_inputs)(const int32_t* words, const int32_t* tokens, int32_t* blocks, int64_t* token_ids,
                                         int64_t* positions, int64_t* slots, int32_t* tables, int64_t* last,
                                         const int32_t* length, const int32_t* cross, int32_t* kv_len_out,
                                         int32_t* lengths_out,
                                         const int64_t* group, int64_t max_rows, int64_t token_columns, int64_t groups,
                                         int64_t columns, int64_t num_tokens, int64_t num_rows, int64_t most_updates) {
  const int64_t section = max_rows + 8;
  if (max_rows < 1 || num_rows > section - 1) return HR_BAD_SHAPE;
  for (int64_t g = 0; g < groups; ++g)
    if (group[2 * g] < 1 || group[2 * g + 1] < 0) return HR_BAD_SHAPE;
  const int32_t* row = words + kHeader;
  const Step p{words, row, row + section, row + 2 * section, length, cross,
               tokens, group, token_columns, max_rows, columns, groups};
  if (!sound(p, num_rows, num_tokens) || !update(p, blocks, groups, most_updates)) return HR_BAD_INDEX;
  for (int64_t r = 0; r < num_rows; ++r) {
    const bool real = r < words[ROWS];
    const int64_t first = p.start[r], end = real ? p.start[r + 1] : first;
    const int64_t position = real ? first_position(p, r) : 0, length_now = real ? position + end - first : 0;
    if (kv_len_out != nullptr) kv_len_out[r] = int32_t(length_now);
    for (int64_t t = first; t < end; ++t) {
      positions[t] = position + t - first;
      token_ids[t] = tokens[p.row[r] * token_columns + positions[t]];
    }
    last[r] = larger<int64_t>(p.start[r + 1] - 1, 0);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t block_tokens = group[2 * g], here = in_group(p, g, r, length_now), used = ceil_div(here, block_tokens);
      if (lengths_out != nullptr) lengths_out[g * num_rows + r] = int32_t(here);
      const int32_t* from = blocks + (g * (max_rows + 1) + p.row[r]) * columns;
      __builtin_memcpy(tables + (g * num_rows + r) * columns, from, size_t(used) * sizeof(int32_t));
      for (int64_t t = first; t < end; ++t)
        slots[g * num_tokens + t] =
            group[2 * g + 1] > 0 ? 0
                                 : int64_t(from[positions[t] / block_tokens]) * block_tokens + positions[t] % block_tokens;
    }
  }
  for (int64_t t = words[TOKENS]; t < num_tokens; ++t) {
    token_ids[t] = positions[t] = 0;
    for (int64_t g = 0; g < groups; ++g) slots[g * num_tokens + t] = 0;
  }
  return HR_OK;
}
HR_REPLAYABLE(step_inputs)
