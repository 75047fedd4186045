// Where a step's picked tokens go: op.py holds the definition.

#include "../native/simd.h"

namespace {
constexpr int64_t kHeader = 8, kSlot = 4;
}

HR_PUBLIC int32_t HR_EXPORT(step_commit)(const int32_t* words, const int64_t* token, const float* value, int32_t* tokens,
                                         int32_t* ring, int64_t num_rows, int64_t max_rows, int64_t columns,
                                         int64_t slots) {
  const int64_t section = max_rows + 8, slot = words[kSlot];
  if (num_rows > max_rows || slot < 0 || slot >= slots) return HR_BAD_SHAPE;
  const int32_t *row = words + kHeader, *position = row + section, *sample = row + 3 * section;
  for (int64_t r = 0; r < num_rows; ++r)
    if (sample[r] > 0 && (row[r] < 0 || row[r] >= max_rows || position[r] < 0 || position[r] >= columns))
      return HR_BAD_INDEX;
  int32_t *told = ring + slot * 2 * max_rows, *values = told + max_rows;
  for (int64_t r = 0; r < num_rows; ++r) {
    if (sample[r] > 0) tokens[row[r] * columns + position[r]] = int32_t(token[r]);
    told[r] = int32_t(token[r]);
    __builtin_memcpy(values + r, value + r, sizeof(float));
  }
  return HR_OK;
}
HR_REPLAYABLE(step_commit)
