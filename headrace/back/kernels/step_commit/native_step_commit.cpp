// Where a step's sampled tokens go: op.py holds the definition.

#include "../native/simd.h"

namespace {
constexpr int64_t kHeader = 8, kSlot = 4;
}

HR_PUBLIC int32_t HR_EXPORT(step_commit)(const int32_t* words, const int64_t* token, const float* value, int32_t* tokens,
                                         int32_t* length, int32_t* ring, int64_t num_rows, int64_t max_rows,
                                         int64_t columns, int64_t slots, int64_t width) {
  const int64_t section = max_rows + 8, slot = words[kSlot];
  if (num_rows > max_rows || num_rows > width || slot < 0 || slot >= slots) return HR_BAD_SHAPE;
  const int32_t *row = words + kHeader, *kv_len = row + section, *start = kv_len + section, *sample = start + section;
  const auto position = [&](int64_t r) {
    const int64_t queries = start[r + 1] - start[r], bound = kv_len[r] - queries;
    if (length == nullptr || queries == 0) return bound + queries;
    const int64_t newest = int64_t(length[row[r]]) - 1;
    return (newest < bound ? newest : bound) + queries;
  };
  for (int64_t r = 0; r < num_rows; ++r) {
    if (sample[r] <= 0) continue;
    if (row[r] < 0 || row[r] >= max_rows) return HR_BAD_INDEX;
    const int64_t at = position(r);
    if (at < 0 || at >= columns) return HR_BAD_INDEX;
  }
  int32_t *sampled = ring + slot * 2 * width, *values = sampled + width;
  for (int64_t r = 0; r < num_rows; ++r) {
    if (sample[r] > 0) {
      const int64_t at = position(r);
      tokens[row[r] * columns + at] = int32_t(token[r]);
      if (length != nullptr) length[row[r]] = int32_t(at + 1);
    }
    sampled[r] = int32_t(token[r]);
    __builtin_memcpy(values + r, value + r, sizeof(float));
  }
  return HR_OK;
}
HR_REPLAYABLE(step_commit)
