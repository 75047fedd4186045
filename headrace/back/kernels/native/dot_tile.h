// The inner product tile shared by linear layers and attention scores: MB rows of x against NB rows of w along K.
//
// w is read where it lies (row-major, K contiguous). x comes as a panel: the rows' vectors side by side, zero-padded
// along K. (Rows a power of two apart would otherwise fall into the same few sets of the first-level cache.) Each of the
// MB * NB results has an accumulator of its own that runs along K in one fixed order: a result does not depend on how many
// other rows are computed beside it.
#pragma once

#include "simd.h"

namespace {

// Weight rows per tile: as many as leave 4 rows of accumulators in registers.
constexpr int kTileRows = 4;
constexpr int kTileColumns = kRegisters == 32 ? 6 : 2;

template <class T>
HR_INLINE int64_t panel_bytes(int64_t rows, int64_t K) {
  return rows * ceil_div(K, Dot<T>::step) * int64_t(sizeof(F));
}

// One vector of length K as row m of a panel of `rows` rows.
template <class T>
HR_INLINE void fill_panel_row(const T* x, int64_t K, int64_t m, int64_t rows, char* panel) {
  using V = typename Dot<T>::V;
  constexpr int step = Dot<T>::step;
  for (int64_t k = 0; k < K; k += step) {
    V v = k + step <= K ? load_raw<V>(x + k) : load_raw_part<V>(x + k, K - k);
    __builtin_memcpy(panel + (k / step * rows + m) * int64_t(sizeof v), &v, sizeof v);
  }
}

// out[m][n] for MB rows of the panel and NB rows of w. `next`: where `PF` cache lines per step of K are fetched ahead.
template <class T, int MB, int NB, int PF>
HR_INLINE void dot_tile(const char* panel, const T* w, int64_t w_stride, int64_t K, const char* next,
                        float out[MB][(NB + 3) / 4 * 4]) {
  using D = Dot<T>;
  using V = typename D::V;
  F acc[MB][(NB + 3) / 4 * 4] = {};
  const char* a = panel;
  int64_t k = 0;
  for (; k + D::step <= K; k += D::step, a += MB * sizeof(V), next += PF * 64) {
    V b[NB];
    HR_UNROLL for (int n = 0; n < NB; ++n) b[n] = load_raw<V>(w + n * w_stride + k);
    HR_UNROLL for (int i = 0; i < PF; ++i) __builtin_prefetch(next + i * 64, 0, 2);
    HR_UNROLL for (int m = 0; m < MB; ++m) {
      V x = load_raw<V>(a + m * sizeof(V));
      HR_UNROLL for (int n = 0; n < NB; ++n) acc[m][n] = D::add(acc[m][n], x, b[n]);
    }
  }
  if (k < K) {
    V b[NB];
    HR_UNROLL for (int n = 0; n < NB; ++n) b[n] = load_raw_part<V>(w + n * w_stride + k, K - k);
    HR_UNROLL for (int m = 0; m < MB; ++m) {
      V x = load_raw<V>(a + m * sizeof(V));
      HR_UNROLL for (int n = 0; n < NB; ++n) acc[m][n] = D::add(acc[m][n], x, b[n]);
    }
  }
  HR_UNROLL for (int m = 0; m < MB; ++m)
    HR_UNROLL for (int n = 0; n < NB; n += 4)
      sum4(acc[m][n], acc[m][n + 1], acc[m][n + 2], acc[m][n + 3], &out[m][n]);
}

}  // namespace
