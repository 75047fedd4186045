// The inner product tile shared by linear layers and attention scores: MB rows of x against NB rows of w along K.
//
// Both operands are read where they lie (row-major, K contiguous). Each of the MB * NB results has an accumulator of its
// own that runs along K in one fixed order: a result does not depend on how many other rows are computed beside it.
#pragma once

#include "simd.h"

namespace {

template <class T, int MB, int NB>
HR_INLINE void dot_tile(const T* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t K, float out[MB][(NB + 3) / 4 * 4]) {
  using D = Dot<T>;
  using V = typename D::V;
  F acc[MB][(NB + 3) / 4 * 4] = {};
  int64_t k = 0;
  for (; k + D::step <= K; k += D::step) {
    V b[NB];
    HR_UNROLL for (int n = 0; n < NB; ++n) b[n] = load_raw<V>(w + n * w_stride + k);
    HR_UNROLL for (int m = 0; m < MB; ++m) {
      V a = load_raw<V>(x + m * x_stride + k);
      HR_UNROLL for (int n = 0; n < NB; ++n) acc[m][n] = D::add(acc[m][n], a, b[n]);
    }
  }
  if (k < K) {
    V b[NB];
    HR_UNROLL for (int n = 0; n < NB; ++n) b[n] = load_raw_part<V>(w + n * w_stride + k, K - k);
    HR_UNROLL for (int m = 0; m < MB; ++m) {
      V a = load_raw_part<V>(x + m * x_stride + k, K - k);
      HR_UNROLL for (int n = 0; n < NB; ++n) acc[m][n] = D::add(acc[m][n], a, b[n]);
    }
  }
  HR_UNROLL for (int m = 0; m < MB; ++m)
    HR_UNROLL for (int n = 0; n < NB; n += 4)
      sum4(acc[m][n], acc[m][n + 1], acc[m][n + 2], acc[m][n + 3], &out[m][n]);
}

}  // namespace
