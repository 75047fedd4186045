// The argmax of each row: the first NaN if there is one, else the lowest id among the greatest values.

#include "../native/top.h"

namespace {

constexpr int64_t kColumns = 16 * 1024;  // of one chunk: 64 KB

struct Greedy {
  const float* x;
  int64_t columns, x_stride, chunks_per_row;
  float* parts;  // the greatest value of each chunk, or NaN
};

void chunk(void* context, int64_t i) {
  const Greedy& p = *static_cast<const Greedy*>(context);
  const int64_t row = i / p.chunks_per_row, first = i % p.chunks_per_row * kColumns;
  p.parts[i] = greatest(p.x + row * p.x_stride + first, smaller(kColumns, p.columns - first));
}

// The winning chunk of a row is read once more, for the place of its value.
HR_INLINE int64_t place(const float* x, const float* parts, int64_t chunks) {
  int64_t best = 0;
  for (int64_t i = 1; i < chunks && parts[best] == parts[best]; ++i)
    if (parts[i] > parts[best] || parts[i] != parts[i]) best = i;
  int64_t id = best * kColumns;
  const float value = parts[best];
  while (value == value ? x[id] != value : x[id] == x[id]) ++id;
  return id;
}

}  // namespace

// x [rows, columns] float32, row stride in elements -> ids [rows], values [rows].
HR_PUBLIC int32_t HR_EXPORT(greedy)(const float* x, int64_t* ids, float* values, int64_t rows, int64_t columns,
                                    int64_t x_stride) {
  if (rows < 0 || columns < 1 || columns > INT32_MAX) return HR_BAD_SHAPE;
  Greedy p{x, columns, x_stride, ceil_div(columns, kColumns), nullptr};
  p.parts = static_cast<float*>(hr_scratch(rows * p.chunks_per_row * int64_t(sizeof(float))));
  if (p.parts == nullptr && rows > 0) return HR_NO_MEMORY;
  hr_parallel(chunk, &p, rows * p.chunks_per_row);
  for (int64_t row = 0; row < rows; ++row) {
    ids[row] = place(x + row * x_stride, p.parts + row * p.chunks_per_row, p.chunks_per_row);
    values[row] = x[row * x_stride + ids[row]];
  }
  return HR_OK;
}
HR_REPLAYABLE(greedy)
