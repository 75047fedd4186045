// How the results of panels with a scale per output leave a product: gated, with the bias, in the type of y.
#pragma once

#include "activation.h"

namespace {

constexpr int64_t kPanel = 64;  // outputs

// v to outputs n .. of row m. P: the product's call as data; y begins with output y_first.
template <class Y, class P>
HR_INLINE void put_row(const P& p, int64_t m, int64_t n, F v) {
  const int64_t count = smaller<int64_t>(p.N - n, kLanes);
  if (count <= 0) return;
  const Y* bias = static_cast<const Y*>(p.bias);
  Y* y = static_cast<Y*>(p.y) + m * p.y_stride + (n - p.y_first);
  if (count == kLanes) {
    if (bias != nullptr) v += load(bias + n);
    store(y, v);
  } else {
    if (bias != nullptr) v += load_part(bias + n, count);
    store_part(y, v, count);
  }
}

// Rows [m, m + rows) of panel j (64 floats each, and of the panel it gates if there is an activation) to y.
template <class Y, class P>
HR_INLINE void put_panel(const P& p, int64_t j, int64_t m, int64_t rows, const float* results, const float* ups) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t column = 0; column < kPanel; column += kLanes) {
      F v = load_raw<F>(results + i * kPanel + column);
      if (p.activation >= 0) v = gate(p.activation, v, load_raw<F>(ups + i * kPanel + column));
      put_row<Y>(p, m + i, j * kPanel + column, v);
    }
}

}  // namespace
