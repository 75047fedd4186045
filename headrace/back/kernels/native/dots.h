// Dot products of four queries and several vectors that lie anywhere.
#pragma once

#include "simd.h"

namespace {

constexpr int kSide = kRegisters >= 32 ? 4 : 2;  // vectors of one call: each query is loaded once for all of them

// out[j][h] = q[h] . x[j]. q: float32 [4, padded] with zeros behind the width. What one dot product gives does not depend on
// those beside it.
template <class T>
HR_INLINE void dots(const float* q, int64_t padded, const T* const* x, int64_t width, float (*out)[4]) {
  F sums[kSide][4]{};
  for (int64_t i = 0; i < width; i += kLanes) {
    F v[kSide];
    HR_UNROLL for (int j = 0; j < kSide; ++j) v[j] = i + kLanes <= width ? load(x[j] + i) : load_part(x[j] + i, width - i);
    HR_UNROLL for (int h = 0; h < 4; ++h) {
      const F query = load(q + h * padded + i);
      HR_UNROLL for (int j = 0; j < kSide; ++j) sums[j][h] = fma(query, v[j], sums[j][h]);
    }
  }
  HR_UNROLL for (int j = 0; j < kSide; ++j) sum4(sums[j][0], sums[j][1], sums[j][2], sums[j][3], out[j]);
}

// Calls each(i, scores of vector i with four queries) for vectors [0, count), where at(i) tells where one lies.
template <class T, class At, class Each>
HR_INLINE void each_dot(const float* q, int64_t padded, int64_t width, int64_t count, At at, Each each) {
  for (int64_t first = 0; first < count; first += kSide) {
    const T* x[kSide];
    float out[kSide][4];
    for (int j = 0; j < kSide; ++j) x[j] = first + j < count ? at(first + j) : x[0];
    dots(q, padded, x, width, out);
    for (int64_t j = 0; j < kSide && first + j < count; ++j) each(first + j, out[j]);
  }
}

}  // namespace
