// The activations of MLPs.
#pragma once

#include "simd.h"

namespace {

enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4 };

// erf(x) by Abramowitz & Stegun 7.1.26; absolute error below 2e-7.
HR_INLINE F verf(F x) {
  F sign = select(x < 0.0f, splat(-1.0f), splat(1.0f));
  F z = x * sign;
  F t = 1.0f / (1.0f + 0.3275911f * z);
  F p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  return sign * (1.0f - p * t * vexp(-z * z));
}

template <int A>
HR_INLINE F activate(F x) {
  if (A == SILU) return x * vsigmoid(x);
  if (A == GELU) return 0.5f * x * (1.0f + verf(x * 0.70710678118654752f));
  if (A == GELU_TANH) return 0.5f * x * (1.0f + vtanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  const F rectified = select(x < 0.0f, F{}, x);
  return A == RELU2 ? rectified * rectified : rectified;
}

// act(gate) * up; the activation is the same for a whole call.
HR_INLINE F gate(int32_t activation, F gate, F up) {
  if (activation == SILU) return activate<SILU>(gate) * up;
  if (activation == GELU) return activate<GELU>(gate) * up;
  if (activation == GELU_TANH) return activate<GELU_TANH>(gate) * up;
  if (activation == RELU2) return activate<RELU2>(gate) * up;
  return activate<RELU>(gate) * up;
}

}  // namespace
