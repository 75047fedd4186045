// y = x / sqrt(mean(x^2) + eps) * w over rows of E values; optionally x is first added into a residual, and y, rounded to its
// type as ever, becomes int8 before it leaves the first-level cache (rms_norm_quantized).

#include "../native/int8.h"

namespace {

constexpr int64_t kChunkElements = 16 * 1024;  // below that a row costs less than waking a thread

struct Norm {
  const void* x;
  void* residual;
  const float* weight;
  void* y;
  int64_t rows, inner, width, outer_stride, inner_stride, residual_stride, rows_per_chunk;
  float eps;
  // Of rms_norm_quantized, which writes no y:
  int8_t* quantized;
  float* scales;
  int32_t* sums;
  int64_t quantized_stride, group;  // group 0: one scale a row
  float x_scale, x_zero;            // of all rows; 0: each has its own scale
};

template <class T>
HR_INLINE F load_some(const T* p, int64_t count) { return count >= kLanes ? load(p) : load_part(p, count); }
template <class T>
HR_INLINE void store_some(T* p, F v, int64_t count) {
  if (count >= kLanes) store(p, v);
  else store_part(p, v, count);
}

// Rows normed side by side: a sum of squares is one chain of dependent additions, and a row's is longer than all else.
constexpr int kRows = 4;

// Where a row is read, what it is added into first (where that is asked for), where it is written.
template <class T>
struct Row {
  const T* x;
  T* residual;
  T* y;
};

template <class T, int R, bool kAdd>
HR_INLINE void norm_rows(const Norm& p, const Row<T>* rows) {
  const int64_t whole = p.width / kLanes * kLanes;
  F squares[kRows]{};
  auto add = [&](int64_t e, int64_t count) {
    HR_UNROLL for (int r = 0; r < R; ++r) {
      F v = load_some(rows[r].x + e, count);
      if constexpr (kAdd) {
        T* sum = rows[r].residual + e;
        store_some(sum, load_some(sum, count) + v, count);
        v = load_some(sum, count);  // as it was rounded
      }
      squares[r] = fma(v, v, squares[r]);
    }
  };
  for (int64_t e = 0; e < whole; e += kLanes) add(e, kLanes);
  if (whole < p.width) add(whole, p.width - whole);
  float scales[kRows];
  sum4(squares[0], squares[1], squares[2], squares[3], scales);
  HR_UNROLL for (int r = 0; r < R; ++r) scales[r] = 1.0f / __builtin_sqrtf(scales[r] / float(p.width) + p.eps);
  auto put = [&](int64_t e, int64_t count) {
    const F weight = load_some(p.weight + e, count);
    HR_UNROLL for (int r = 0; r < R; ++r) {
      const T* from = kAdd ? rows[r].residual : rows[r].x;
      store_some(rows[r].y + e, load_some(from + e, count) * scales[r] * weight, count);
    }
  };
  for (int64_t e = 0; e < whole; e += kLanes) put(e, kLanes);
  if (whole < p.width) put(whole, p.width - whole);
}

// Rows [first, first + R). y: where they go, `y_stride` apart.
template <class T, int R>
HR_INLINE void norm_from(const Norm& p, int64_t first, T* y, int64_t y_stride) {
  Row<T> rows[R];
  for (int r = 0; r < R; ++r) {
    const int64_t row = first + r;
    rows[r].x = static_cast<const T*>(p.x) + row / p.inner * p.outer_stride + row % p.inner * p.inner_stride;
    rows[r].residual = p.residual == nullptr ? nullptr : static_cast<T*>(p.residual) + row * p.residual_stride;
    rows[r].y = y + r * y_stride;
  }
  if (p.residual == nullptr) norm_rows<T, R, false>(p, rows);
  else norm_rows<T, R, true>(p, rows);
}

template <class T>
void chunk(void* context, int64_t i) {
  const Norm& p = *static_cast<const Norm*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.rows);
  int64_t row = i * p.rows_per_chunk;
  for (; row + kRows <= end; row += kRows) norm_from<T, kRows>(p, row, static_cast<T*>(p.y) + row * p.width, p.width);
  for (; row < end; ++row) norm_from<T, 1>(p, row, static_cast<T*>(p.y) + row * p.width, p.width);
}

template <class T>
void quantized_chunk(void* context, int64_t i) {
  const Norm& p = *static_cast<const Norm*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.rows), groups = p.group > 0 ? ceil_div(p.width, p.group) : 1;
  T* y = static_cast<T*>(hr_scratch(kRows * p.width * int64_t(sizeof(T)), 1));
  if (y == nullptr) __builtin_trap();
  for (int64_t row = i * p.rows_per_chunk; row < end;) {
    const int count = end - row < kRows ? 1 : kRows;
    if (count == kRows) norm_from<T, kRows>(p, row, y, p.width);
    else norm_from<T, 1>(p, row, y, p.width);
    for (int r = 0; r < count; ++r, ++row) {
      int8_t* quantized = p.quantized + row * p.quantized_stride;
      const T* from = y + r * p.width;
      if (p.group > 0) quantize_groups(from, p.width, p.group, quantized, p.scales + row * groups, p.sums + row * groups * 2);
      else if (p.x_scale != 0)
        quantize_fixed(from, p.width, ceil_div(p.width, int64_t(64)) * 64, p.x_scale, p.x_zero, quantized, p.scales + row,
                       p.sums + row);
      else quantize_row(from, p.width, quantized, p.scales + row, p.sums + row);
    }
  }
}

}  // namespace

// x: row r at (r / inner) * outer_stride + (r % inner) * inner_stride elements; y contiguous. residual: null, or rows
// that x is added into (rounded to the dtype) before the norm reads them.
HR_PUBLIC int32_t HR_EXPORT(rms_norm)(const void* x, void* residual, const float* weight, void* y, int64_t rows,
                                      int64_t inner, int64_t width, int64_t outer_stride, int64_t inner_stride,
                                      int64_t residual_stride, float eps, int32_t dtype) {
  if (rows < 0 || inner < 1 || width < 1) return HR_BAD_SHAPE;
  Norm p{x, residual, weight, y, rows, inner, width, outer_stride, inner_stride, residual_stride,
         ceil_div(kChunkElements, width), eps, nullptr, nullptr, nullptr, 0, 0, 0, 0};
  const int64_t chunks = ceil_div(rows, p.rows_per_chunk);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(rms_norm)

// The same as int8 rows, as GEMMs with quantized weights read them: quantized [rows, quantized_stride], of which the inputs
// up to whole groups (group 0: up to a multiple of 64) are written; scales [rows, groups]; sums [rows, groups, 2] (group 0:
// [rows]), see quantize_groups. x_scale: of all rows, with x_zero added to their integers (0: each has its own; none with groups). x: row r at
// r * x_stride elements.
HR_PUBLIC int32_t HR_EXPORT(rms_norm_quantized)(const void* x, void* residual, const float* weight, int8_t* quantized, float* scales,
                                                int32_t* sums, int64_t rows, int64_t width, int64_t x_stride,
                                                int64_t residual_stride, int64_t quantized_stride, int64_t group, float eps,
                                                float x_scale, float x_zero, int32_t dtype) {
  if (rows < 0 || width < 1 || group < 0 || group % 32 || (group > 0 && x_scale != 0)) return HR_BAD_SHAPE;
  const int64_t unit = group > 0 ? group : 64;
  if (quantized_stride < ceil_div(width, unit) * unit) return HR_BAD_SHAPE;
  Norm p{x, residual, weight, nullptr, rows, 1, width, x_stride, 0, residual_stride, ceil_div(kChunkElements, width), eps,
         quantized, scales, sums, quantized_stride, group, x_scale, x_zero};
  const int64_t chunks = ceil_div(rows, p.rows_per_chunk);
  if (dtype == HR_BF16) hr_parallel(quantized_chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(quantized_chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(quantized_chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(rms_norm_quantized)
