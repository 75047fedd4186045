// The argmax of each row in one pass: the first NaN if there is one, else the lowest id among the greatest values.

#include "../native/simd.h"

namespace {

constexpr int64_t kColumns = 32 * 1024;  // of one chunk: 128 KB, some 5 us

struct Best {
  float value;
  int64_t id;
};

struct Greedy {
  const float* x;
  int64_t rows, columns, x_stride, chunks_per_row;
  Best* parts;
};

HR_INLINE Best first_nan(const float* x, int64_t first) {
  while (x[first] == x[first]) ++first;
  return {x[first], first};
}

// Of the columns [first, end), first < end.
HR_INLINE Best best_of(const float* x, int64_t first, int64_t end) {
  Best best{x[first], first};
  int64_t i = first;
  if (end - first >= kLanes) {
    F top = load(x + i);
    I at{}, step{}, nan = top != top;
    for (i += kLanes; i + kLanes <= end; i += kLanes) {
      const F v = load(x + i);
      const I greater = v > top;
      step += kLanes;
      top = select(greater, v, top);
      at = (step & greater) | (at & ~greater);
      nan |= v != v;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (nan[lane]) return first_nan(x, first);
      const int64_t id = first + at[lane] + lane;
      if (lane == 0 || top[lane] > best.value || (top[lane] == best.value && id < best.id)) best = {top[lane], id};
    }
  }
  if (best.value != best.value) return best;
  for (; i < end; ++i) {
    if (x[i] != x[i]) return {x[i], i};
    if (x[i] > best.value) best = {x[i], i};
  }
  return best;
}

void chunk(void* context, int64_t i) {
  const Greedy& p = *static_cast<const Greedy*>(context);
  const int64_t row = i / p.chunks_per_row, first = i % p.chunks_per_row * kColumns;
  p.parts[i] = best_of(p.x + row * p.x_stride, first, smaller(first + kColumns, p.columns));
}

}  // namespace

// x [rows, columns] float32, row stride in elements -> ids [rows], values [rows].
HR_PUBLIC int32_t HR_EXPORT(greedy)(const float* x, int64_t* ids, float* values, int64_t rows, int64_t columns,
                                    int64_t x_stride) {
  if (rows < 0 || columns < 1 || columns > INT32_MAX) return HR_BAD_SHAPE;
  Greedy p{x, rows, columns, x_stride, ceil_div(columns, kColumns), nullptr};
  p.parts = static_cast<Best*>(hr_scratch(rows * p.chunks_per_row * int64_t(sizeof(Best))));
  if (p.parts == nullptr && rows > 0) return HR_NO_MEMORY;
  hr_parallel(chunk, &p, rows * p.chunks_per_row);
  for (int64_t row = 0; row < rows; ++row) {
    const Best* parts = p.parts + row * p.chunks_per_row;
    Best best = parts[0];
    for (int64_t i = 1; i < p.chunks_per_row && best.value == best.value; ++i)
      if (parts[i].value > best.value || parts[i].value != parts[i].value) best = parts[i];
    ids[row] = best.id;
    values[row] = best.value;
  }
  return HR_OK;
}
