// Rows of x, normed or as they are, into columns of a wider tensor: op.py holds the definition.

#include "../native/simd.h"

namespace {

constexpr int64_t kChunkElements = 16 * 1024;

struct Columns {
  const void *x, *added;  // added: null, or what is added to x first; rows as x has
  const float* weight;    // null: as they are
  void* out;
  int64_t rows, width, x_row, added_row, out_row, rows_per_chunk;
  float eps;
};

template <class T>
void put_rows(void* context, int64_t i) {
  const Columns& p = *static_cast<const Columns*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.rows);
  for (int64_t r = i * p.rows_per_chunk; r < end; ++r) {
    const T* from = static_cast<const T*>(p.x) + r * p.x_row;
    T* to = static_cast<T*>(p.out) + r * p.out_row;
    if (p.added) {
      const T* more = static_cast<const T*>(p.added) + r * p.added_row;
      for (int64_t e = 0; e < p.width; e += kLanes) {
        const int64_t n = smaller<int64_t>(p.width - e, kLanes);
        store_part(to + e, load_part(from + e, n) + load_part(more + e, n), n);
      }
      from = to;
    }
    if (!p.weight) {
      if (from != to) __builtin_memcpy(to, from, size_t(p.width) * sizeof(T));
      continue;
    }
    F squares{};
    for (int64_t e = 0; e < p.width; e += kLanes) {
      const F v = load_part(from + e, smaller<int64_t>(p.width - e, kLanes));
      squares = fma(v, v, squares);
    }
    const float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(p.width) + p.eps);
    for (int64_t e = 0; e < p.width; e += kLanes) {
      const int64_t n = smaller<int64_t>(p.width - e, kLanes);
      store_part(to + e, load_part(from + e, n) * scale * load_part(p.weight + e, n), n);
    }
  }
}

}  // namespace

HR_PUBLIC int32_t HR_EXPORT(norm_columns)(const void* x, const void* added, const float* weight, void* out, int64_t rows,
                                          int64_t width, int64_t x_row, int64_t added_row, int64_t out_row, float eps,
                                          int32_t dtype) {
  if (width < 1 || out_row < width) return HR_BAD_SHAPE;
  Columns p{x, added, weight, out, rows, width, x_row, added_row, out_row, ceil_div(kChunkElements, width), eps};
  const int64_t chunks = ceil_div(rows, p.rows_per_chunk);
  if (dtype == HR_BF16) hr_parallel(put_rows<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(put_rows<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(put_rows<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(norm_columns)
