// y = (x - mean) / sqrt(variance + eps) * w + b over rows of E values; optionally x is first added into a residual.

#include "../native/simd.h"

namespace {

constexpr int64_t kChunkElements = 16 * 1024;  // below that a row costs less than waking a thread
constexpr int kSums = 4;                       // a sum is one chain of dependent additions

struct Norm {
  const void* x;
  void* residual;
  const float *weight, *bias;
  void* y;
  int64_t rows, inner, heads, width, outer_stride, inner_stride, residual_stride, rows_per_chunk;
  float eps;
};

// The sum over a row of f(vector); what is no whole vector is added value by value.
template <class T, class Vector, class Value>
HR_INLINE float row_sum(const T* x, int64_t width, Vector f, Value g) {
  F sums[kSums]{};
  int64_t e = 0;
  for (; e + kSums * kLanes <= width; e += kSums * kLanes)
    HR_UNROLL for (int i = 0; i < kSums; ++i) sums[i] = sums[i] + f(load(x + e + i * kLanes));
  for (; e + kLanes <= width; e += kLanes) sums[0] = sums[0] + f(load(x + e));
  float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; e < width; ++e) total += g(to_float(x[e]));
  return total;
}

template <class T>
HR_INLINE void add_row(const T* x, T* residual, int64_t width) {
  int64_t e = 0;
  for (; e + kLanes <= width; e += kLanes) store(residual + e, load(residual + e) + load(x + e));
  if (e < width) store_part(residual + e, load_part(residual + e, width - e) + load_part(x + e, width - e), width - e);
}

template <class T>
HR_INLINE void norm_row(const Norm& p, const T* x, const float* weight, T* y) {
  const float mean = row_sum(x, p.width, [](F v) { return v; }, [](float v) { return v; }) / float(p.width);
  const float squares = row_sum(
      x, p.width, [mean](F v) { return (v - mean) * (v - mean); }, [mean](float v) { return (v - mean) * (v - mean); });
  const float scale = 1.0f / __builtin_sqrtf(squares / float(p.width) + p.eps);
  int64_t e = 0;
  for (; e + kLanes <= p.width; e += kLanes) {
    F v = (load(x + e) - mean) * scale * load(weight + e);
    store(y + e, p.bias == nullptr ? v : v + load(p.bias + e));
  }
  if (e < p.width) {
    const int64_t count = p.width - e;
    F v = (load_part(x + e, count) - mean) * scale * load_part(weight + e, count);
    store_part(y + e, p.bias == nullptr ? v : v + load_part(p.bias + e, count), count);
  }
}

template <class T>
void chunk(void* context, int64_t i) {
  const Norm& p = *static_cast<const Norm*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.rows);
  for (int64_t row = i * p.rows_per_chunk; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row / p.inner * p.outer_stride + row % p.inner * p.inner_stride;
    if (p.residual != nullptr) {
      T* residual = static_cast<T*>(p.residual) + row * p.residual_stride;
      add_row(x, residual, p.width);
      x = residual;  // as it was rounded
    }
    norm_row(p, x, p.weight + row % p.heads * p.width, static_cast<T*>(p.y) + row * p.width);
  }
}

}  // namespace

// x: row r at (r / inner) * outer_stride + (r % inner) * inner_stride elements; y contiguous. weight [heads, width], row
// r % heads for row r; bias [width] or null. residual: null, or rows that x is added into before the norm reads them.
HR_PUBLIC int32_t HR_EXPORT(layer_norm)(const void* x, void* residual, const float* weight, const float* bias, void* y,
                                        int64_t rows, int64_t inner, int64_t heads, int64_t width, int64_t outer_stride,
                                        int64_t inner_stride, int64_t residual_stride, float eps, int32_t dtype) {
  if (rows < 0 || inner < 1 || heads < 1 || width < 1) return HR_BAD_SHAPE;
  Norm p{x, residual, weight, bias, y, rows, inner, heads, width, outer_stride, inner_stride, residual_stride,
         ceil_div(kChunkElements, width), eps};
  const int64_t chunks = ceil_div(rows, p.rows_per_chunk);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(layer_norm)
