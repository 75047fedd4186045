// How the results of panels with a scale per output leave a product: gated, with the bias, in the type of y.
#pragma once

#include "activation.h"

namespace {

constexpr int64_t kPanel = 64;  // outputs
constexpr int kVectors = 4;     // of outputs at once

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

// v, which `ups` are gated by if there is an activation, to outputs n .. of row m.
template <class Y, class P>
HR_INLINE void put_vectors(const P& p, int64_t m, int64_t n, F (&v)[kVectors], const F (&ups)[kVectors]) {
  if (p.activation >= 0) HR_UNROLL for (int c = 0; c < kVectors; ++c) v[c] = gate(p.activation, v[c], ups[c]);
  if (p.N - n < kVectors * kLanes) {
    HR_UNROLL for (int c = 0; c < kVectors; ++c) put_row<Y>(p, m, n + c * kLanes, v[c]);
    return;
  }
  const Y* bias = static_cast<const Y*>(p.bias);
  Y* y = static_cast<Y*>(p.y) + m * p.y_stride + (n - p.y_first);
  if (bias != nullptr) HR_UNROLL for (int c = 0; c < kVectors; ++c) v[c] += load(bias + n + c * kLanes);
  HR_UNROLL for (int c = 0; c < kVectors; ++c) store(y + c * kLanes, v[c]);
}

// Rows [m, m + rows) of panel j (64 floats each, and of the panel it gates if there is an activation) to y.
template <class Y, class P>
HR_INLINE void put_panel(const P& p, int64_t j, int64_t m, int64_t rows, const float* results, const float* ups) {
  for (int64_t i = 0; i < rows * kPanel; i += kVectors * kLanes) {
    F v[kVectors], u[kVectors] = {};
    HR_UNROLL for (int c = 0; c < kVectors; ++c) v[c] = load_raw<F>(results + i + c * kLanes);
    if (p.activation >= 0) HR_UNROLL for (int c = 0; c < kVectors; ++c) u[c] = load_raw<F>(ups + i + c * kLanes);
    put_vectors<Y>(p, m + i / kPanel, j * kPanel + i % kPanel, v, u);
  }
}

}  // namespace
