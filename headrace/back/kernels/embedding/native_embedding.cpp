// x[T,E] = rows ids[T] of a table, times a scale.

#include "../native/simd.h"

namespace {

template <class T>
int32_t rows_of(const int64_t* ids, const void* table, void* x, int64_t tokens, int64_t width, int64_t stride, float scale) {
  for (int64_t t = 0; t < tokens; ++t) {
    const T* from = static_cast<const T*>(table) + ids[t] * stride;
    T* to = static_cast<T*>(x) + t * width;
    if (scale == 1.0f) {
      __builtin_memcpy(to, from, size_t(width) * sizeof(T));
      continue;
    }
    int64_t e = 0;
    for (; e + kLanes <= width; e += kLanes) store(to + e, load(from + e) * scale);
    if (e < width) store_part(to + e, load_part(from + e, width - e) * scale, width - e);
  }
  return HR_OK;
}

}  // namespace

// A row outside the table is refused before anything is written. `stride`: elements from row to row of the table.
HR_PUBLIC int32_t HR_EXPORT(embedding)(const int64_t* ids, const void* table, void* x, int64_t tokens, int64_t rows,
                                       int64_t width, int64_t stride, float scale, int32_t dtype) {
  for (int64_t t = 0; t < tokens; ++t)
    if (ids[t] < 0 || ids[t] >= rows) return HR_BAD_INDEX;
  if (dtype == HR_BF16) return rows_of<bf16>(ids, table, x, tokens, width, stride, scale);
  if (dtype == HR_F16) return rows_of<fp16>(ids, table, x, tokens, width, stride, scale);
  if (dtype == HR_F32) return rows_of<float>(ids, table, x, tokens, width, stride, scale);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(embedding)
