// e4m3 numbers (Micikevicius et al. 2022, section 3): sign, four bits of exponent (bias 7), three of mantissa, up to 448.
// There is no infinity; all ones would be NaN, which no code here is.
#pragma once

#include "simd.h"

namespace {

struct fp8 {
  uint8_t bits;
};
template <class S>
constexpr bool kIsFp8 = false;
template <>
constexpr bool kIsFp8<fp8> = true;

constexpr float kMostFp8 = 448.0f;

// kLanes codes as floats, exactly: exponent and mantissa where a float has them, 120 exponents too low.
HR_INLINE F load(const fp8* p) {
#if defined(__AVX512F__)
  const U code = (U)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  const U code = (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  typedef uint8_t B __attribute__((vector_size(kLanes)));
  const U code = __builtin_convertvector(load_raw<B>(p), U);
#endif
  const F size = (F)((code & 0x7f) << 20) * 0x1p120f;
  return (F)((U)size | (code & 0x80) << 24);
}

// Floats of at most 448 as codes: to nearest, ties to even.
HR_INLINE U to_fp8(F v) {
  const U bits = (U)v, size = bits & 0x7fffffff;
  const U normal = (size + 0x7ffff + (size >> 20 & 1) - 0x3c000000) >> 20;
  const U denormal = (U)((F)size + 16384.0f) - 0x46800000;  // the sum rounds to units of 2^-9
  return ((I)size < 0x3c800000 ? denormal : normal) | (bits >> 24 & 0x80);
}

// count values as codes of their largest, and the scale; a NaN or Inf makes it NaN. Writes whole vectors.
template <class T>
HR_INLINE void quantize_fp8(const T* x, int64_t count, fp8* codes, float* scale) {
  F most{};
  I finite = most == 0.0f;
  for (int64_t k = 0; k < count; k += kLanes) {
    const F v = load_part(x + k, smaller<int64_t>(count - k, kLanes));
    const F size = (F)((U)v & 0x7fffffffu);
    most = select(size > most, size, most);
    finite &= size < __builtin_inff();
  }
  bool good = true;
  for (int i = 0; i < kLanes; ++i) good = good && finite[i];
  const float top = largest(most);
  const F inverse = splat(good && top > 1e-30f ? kMostFp8 / top : 0.0f);
  *scale = good ? top / kMostFp8 : __builtin_nanf("");
  for (int64_t k = 0; k < count; k += kLanes) {
    F v = load_part(x + k, smaller<int64_t>(count - k, kLanes)) * inverse;
    v = good ? vmax(splat(-kMostFp8), vmin(splat(kMostFp8), v)) : F{};
    const U code = to_fp8(v);
    typedef uint8_t B __attribute__((vector_size(kLanes)));
    const B bytes = __builtin_convertvector(code, B);
    __builtin_memcpy(codes + k, &bytes, sizeof bytes);
  }
}

}  // namespace
