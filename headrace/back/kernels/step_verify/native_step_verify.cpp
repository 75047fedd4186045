// Which drafts stand: op.py holds the definition.

#include "../native/simd.h"

namespace {
constexpr int64_t kHeader = 8, kRows = 0, kSlot = 4;
constexpr int32_t kUndrafted = -1, kRejected = -2;
}  // namespace

HR_PUBLIC int32_t HR_EXPORT(step_verify)(const int32_t* words, const int64_t* token, const float* value, int32_t* tokens,
                                         int32_t* length, const int32_t* count, int32_t* ring, int64_t num_tokens,
                                         int64_t max_rows, int64_t columns, int64_t slots, int64_t width) {
  const int64_t section = max_rows + 8, slot = words[kSlot], rows = words[kRows];
  if (rows < 0 || rows > max_rows || num_tokens > width || slot < 0 || slot >= slots) return HR_BAD_SHAPE;
  const int32_t *row = words + kHeader, *kv_len = row + section, *start = kv_len + section;
  const auto first_position = [&](int64_t r) {
    const int64_t bound = int64_t(kv_len[r]) - (start[r + 1] - start[r]), newest = int64_t(length[row[r]]) - 1;
    return newest < bound ? newest : bound;
  };
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t num = int64_t(start[r + 1]) - start[r];
    if (row[r] < 0 || row[r] >= max_rows || start[r] < 0 || num < 1 || start[r + 1] > num_tokens) return HR_BAD_INDEX;
    const int64_t first = first_position(r);
    if (first < 0 || first + num >= columns) return HR_BAD_INDEX;
  }
  int32_t* sampled = ring + slot * 2 * width;
  for (int64_t t = 0; t < num_tokens; ++t) sampled[t] = kUndrafted;
  __builtin_memcpy(sampled + width, value, size_t(num_tokens) * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t num = int64_t(start[r + 1]) - start[r], first = first_position(r);
    const int64_t proposed = count[row[r]] < num - 1 ? count[row[r]] : num - 1;
    int32_t* drafts = tokens + row[r] * columns + first + 1;
    bool stands = true;
    int64_t accepted = 0;
    for (int64_t i = 0; i <= proposed || i == 0; ++i) {
      if (!stands) {
        sampled[start[r] + i] = kRejected;
        continue;
      }
      const int32_t chosen = int32_t(token[start[r] + i]);
      stands = i < proposed && drafts[i] == chosen;
      drafts[i] = sampled[start[r] + i] = chosen;
      ++accepted;
    }
    length[row[r]] = int32_t(first + 1 + accepted);
  }
  return HR_OK;
}
HR_REPLAYABLE(step_verify)
