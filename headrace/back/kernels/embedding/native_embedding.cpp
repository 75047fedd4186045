// x[T,E] = rows ids[T] of a table, in bytes.

#include "../native/simd.h"

// A row outside the table is refused before anything is written.
HR_PUBLIC int32_t HR_EXPORT(embedding)(const int64_t* ids, const char* table, char* x, int64_t tokens, int64_t rows,
                                       int64_t row_bytes, int64_t stride_bytes) {
  for (int64_t t = 0; t < tokens; ++t)
    if (ids[t] < 0 || ids[t] >= rows) return HR_BAD_INDEX;
  for (int64_t t = 0; t < tokens; ++t)
    __builtin_memcpy(x + t * row_bytes, table + ids[t] * stride_bytes, size_t(row_bytes));
  return HR_OK;
}
HR_REPLAYABLE(embedding)
