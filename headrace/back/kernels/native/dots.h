// Dot products of four queries and several vectors that lie anywhere.
#pragma once

#include "simd.h"

namespace {

constexpr int kSide = kRegisters >= 32 ? 4 : 2;  // vectors of one call: each query is loaded once for all of them

// As what queries of vectors of T are kept: bfloat16 where there is an instruction for its products, else float32.
template <class T>
struct QueryOf {
  using type = float;
};
#if defined(__AVX512BF16__)
template <>
struct QueryOf<bf16> {
  using type = bf16;
};
#endif
template <class T>
using Query = typename QueryOf<T>::type;

// Elements between queries of this width: zeros stand behind each.
HR_INLINE int64_t query_stride(int64_t width) { return ceil_div(width, 2 * kLanes) * 2 * kLanes; }

template <class T>
HR_INLINE void keep_query(Query<T>* to, const T* from, int64_t width, int64_t stride) {
  for (int64_t i = 0; i < width; ++i) put(to + i, to_float(from[i]));
  for (int64_t i = width; i < stride; ++i) put(to + i, 0.0f);
}

// out[j][h] = q[h] . x[j]. q: [4, stride], as keep_query leaves them. What one dot product gives does not depend on those beside
// it.
template <class T>
HR_INLINE void dots(const float* q, int64_t stride, const T* const* x, int64_t width, float (*out)[4]) {
  F sums[kSide][4]{};
  for (int64_t i = 0; i < width; i += kLanes) {
    F v[kSide];
    HR_UNROLL for (int j = 0; j < kSide; ++j) v[j] = i + kLanes <= width ? load(x[j] + i) : load_part(x[j] + i, width - i);
    HR_UNROLL for (int h = 0; h < 4; ++h) {
      const F query = load(q + h * stride + i);
      HR_UNROLL for (int j = 0; j < kSide; ++j) sums[j][h] = fma(query, v[j], sums[j][h]);
    }
  }
  HR_UNROLL for (int j = 0; j < kSide; ++j) sum4(sums[j][0], sums[j][1], sums[j][2], sums[j][3], out[j]);
}
HR_INLINE void dots(const bf16* q, int64_t stride, const bf16* const* x, int64_t width, float (*out)[4]) {
  constexpr int64_t step = Dot<bf16>::step;
  F sums[kSide][4]{};
  for (int64_t i = 0; i < width; i += step) {
    U v[kSide];
    HR_UNROLL for (int j = 0; j < kSide; ++j)
      v[j] = i + step <= width ? load_raw<U>(x[j] + i) : load_raw_part<U>(x[j] + i, width - i);
    HR_UNROLL for (int h = 0; h < 4; ++h) {
      const U query = load_raw<U>(q + h * stride + i);
      HR_UNROLL for (int j = 0; j < kSide; ++j) sums[j][h] = Dot<bf16>::add(sums[j][h], query, v[j]);
    }
  }
  HR_UNROLL for (int j = 0; j < kSide; ++j) sum4(sums[j][0], sums[j][1], sums[j][2], sums[j][3], out[j]);
}

// Calls each(i, scores of vector i with four queries) for vectors [0, count), where at(i) tells where one lies.
template <class T, class At, class Each>
HR_INLINE void each_dot(const Query<T>* q, int64_t stride, int64_t width, int64_t count, At at, Each each) {
  for (int64_t first = 0; first < count; first += kSide) {
    const T* x[kSide];
    float out[kSide][4];
    for (int j = 0; j < kSide; ++j) x[j] = first + j < count ? at(first + j) : x[0];
    dots(q, stride, x, width, out);
    for (int64_t j = 0; j < kSide && first + j < count; ++j) each(first + j, out[j]);
  }
}

}  // namespace
