// The argmax of each row: the first NaN if there is one, else the lowest id among the greatest values.

#include "../native/simd.h"

namespace {

constexpr int64_t kColumns = 16 * 1024;  // of one chunk: 64 KB

struct Greedy {
  const float* x;
  int64_t columns, x_stride, chunks_per_row;
  float* parts;  // the greatest value of each chunk, or NaN
};

// Of `count` values; NaN if one of them is NaN. Four accumulators: one would wait for its own last comparison.
HR_INLINE float greatest(const float* x, int64_t count) {
  float best = x[0];
  int64_t i = 0;
  if (count >= 4 * kLanes) {
    F top[4];
    I nan{};
    for (int j = 0; j < 4; ++j) top[j] = load(x);
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
      HR_UNROLL for (int j = 0; j < 4; ++j) {
        const F v = load(x + i + j * kLanes);
        top[j] = vmax(v, top[j]);
        nan = v != v ? ~I{} : nan;
      }
    }
    const F all = vmax(vmax(top[0], top[1]), vmax(top[2], top[3]));
    for (int lane = 0; lane < kLanes; ++lane) {
      if (nan[lane]) return __builtin_nanf("");
      if (all[lane] > best) best = all[lane];
    }
  }
  for (; i < count; ++i)
    if (x[i] > best || x[i] != x[i]) best = x[i];
  return best;
}

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

// x [rows, columns] float32, row stride in elements -> ids [rows], values [rows]. first > 0: these are the columns from
// first on, and ids and values hold the choice among those before, which is kept where it is as good.
HR_PUBLIC int32_t HR_EXPORT(greedy)(const float* x, int64_t* ids, float* values, int64_t rows, int64_t columns,
                                    int64_t x_stride, int64_t first) {
  if (rows < 0 || columns < 1 || first < 0 || columns > INT32_MAX) return HR_BAD_SHAPE;
  Greedy p{x, columns, x_stride, ceil_div(columns, kColumns), nullptr};
  p.parts = static_cast<float*>(hr_scratch(rows * p.chunks_per_row * int64_t(sizeof(float))));
  if (p.parts == nullptr && rows > 0) return HR_NO_MEMORY;
  hr_parallel(chunk, &p, rows * p.chunks_per_row);
  for (int64_t row = 0; row < rows; ++row) {
    const float* values_of = x + row * x_stride;
    const int64_t at = place(values_of, p.parts + row * p.chunks_per_row, p.chunks_per_row);
    const float best = values_of[at], before = values[row];
    if (first > 0 && (before != before || (best <= before && best == best))) continue;
    ids[row] = first + at;
    values[row] = best;
  }
  return HR_OK;
}
HR_REPLAYABLE(greedy)
