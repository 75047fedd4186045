// The layer norm of one head at the end of RWKV's recurrences.
#pragma once

#include "simd.h"

namespace {

// x[0 .. size) becomes (x - mean) / sqrt(variance + eps) * weight + bias; x has room for whole vectors.
HR_INLINE void head_norm(float* x, int64_t size, const float* weight, const float* bias, float eps) {
  F sums{}, squares{};
  for (int64_t e = 0; e < size; e += kLanes) sums = sums + load_part(x + e, smaller(int64_t(kLanes), size - e));
  const float mean = sum(sums) / float(size);
  int64_t e = 0;
  for (; e + kLanes <= size; e += kLanes) {
    const F centred = load(x + e) - mean;
    squares = fma(centred, centred, squares);
  }
  float total = sum(squares);
  for (; e < size; ++e) total += (x[e] - mean) * (x[e] - mean);
  const float factor = 1.0f / __builtin_sqrtf(total / float(size) + eps);
  for (e = 0; e < size; e += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), size - e);
    const F normed = (load_part(x + e, count) - mean) * factor;
    store_part(x + e, fma(normed, load_part(weight + e, count), load_part(bias + e, count)), count);
  }
}

}  // namespace
