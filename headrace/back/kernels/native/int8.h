// What products with quantized weights share: activations to int8, and sums of four products of bytes.
#pragma once

#include "simd.h"

namespace {

// Round to nearest, ties to even. As an instruction where there is one: the addition below could be fused with the
// product before it, and round that product a second time less than the definition does.
HR_INLINE I round_int(F x) {
#if defined(__AVX512F__)
  return (I)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (I)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (I)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
  return (I)vcvtnq_s32_f32((float32x4_t)x);
#else
  return (I)(x + 12582912.0f) - 0x4b400000;  // |x| < 2^22
#endif
}

// Sixteen int8 values, or as many as fit a vector, to memory.
HR_INLINE void store_quantized(int8_t* to, I code) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)code));
#else
  typedef int8_t B __attribute__((vector_size(kLanes)));
  B bytes = __builtin_convertvector(code, B);
  __builtin_memcpy(to, &bytes, sizeof bytes);
#endif
}
HR_INLINE int32_t sum(I v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all += v[i];
  return all;
#endif
}
HR_INLINE I vmax(I a, I b) { return a > b ? a : b; }
HR_INLINE int32_t largest(I v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t best = v[0];
  for (int i = 1; i < kLanes; ++i) best = larger(best, v[i]);
  return best;
#endif
}

HR_INLINE I clamped(I v, int32_t low, int32_t high) {
  v = v < low ? I{} + low : v;
  return v > high ? I{} + high : v;
}
// Sizes as integers: their bits are ordered as they are, and a NaN's are above Inf's.
HR_INLINE I size_bits(F v) { return (I)v & 0x7fffffff; }
HR_INLINE float size_of(int32_t bits) {
  float size;
  __builtin_memcpy(&size, &bits, sizeof size);
  return size;
}

// count values as int8, zeros up to `padded` (at least 16). sums: of the first 16 quantized values, and of the others. A
// NaN or Inf makes the scale NaN: the row (the group) is lost, no other.
template <class T>
HR_INLINE void quantize(const T* x, int64_t count, int64_t padded, int8_t* quantized, float* scale, int32_t* sums) {
  const int64_t whole = count / kLanes * kLanes;
  I most{};
  for (int64_t k = 0; k < whole; k += kLanes) most = vmax(most, size_bits(load(x + k)));
  if (whole < count) most = vmax(most, size_bits(load_part(x + whole, count - whole)));
  const float top = size_of(largest(most));
  const bool good = top < __builtin_inff();
  const float inverse = good && top > 1e-30f ? 127.0f / top : 0.0f;
  *scale = good ? top / 127.0f : __builtin_nanf("");
  I first{}, rest{};
  auto put = [&](int64_t k, F v) {
    const I code = good ? round_int(v * inverse) : I{};
    store_quantized(quantized + k, code);
    if (k < 16) first += code;
    else rest += code;
  };
  for (int64_t k = 0; k < whole; k += kLanes) put(k, load(x + k));
  int64_t k = whole;
  if (k < count) put(k, load_part(x + k, count - k)), k += kLanes;
  for (; k < padded; k += kLanes) store_quantized(quantized + k, I{});
  sums[0] = sum(first), sums[1] = sum(rest);
}

// A row of `width` values in groups of `group` inputs, each with a scale; inputs beyond the last are 0. Two sums per group: of
// the quantized values of its first 16 inputs, and of the others.
template <class T>
HR_INLINE void quantize_groups(const T* x, int64_t width, int64_t group, int8_t* quantized, float* scales, int32_t* sums) {
  for (int64_t k = 0; k < width; k += group, quantized += group, ++scales, sums += 2) {
    if (group == 32 && width - k >= 32) quantize(x + k, 32, 32, quantized, scales, sums);  // the usual one, without loops
    else quantize(x + k, smaller(width - k, group), group, quantized, scales, sums);
  }
}

// The same with a scale that is given, and what is added to the integers, whatever the row: values beyond their range become
// the largest or the smallest one, -128.
template <class T>
HR_INLINE void quantize_fixed(const T* x, int64_t count, int64_t padded, float fixed, float zero, int8_t* quantized,
                              float* scale, int32_t* all) {
  I most{}, sums{};
  auto put = [&](int64_t k, F v) {
    const I size = size_bits(v);
    most = vmax(most, size);
    v = select(size < 0x7f800000, v, F{}) / splat(fixed) + splat(zero);
    return round_int(vmax(splat(-128), vmin(splat(127), v)));
  };
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    const I code = put(k, load(x + k));
    store_quantized(quantized + k, code), sums += code;
  }
  if (k < count) {
    alignas(64) int32_t integers[kLanes];
    I code = put(k, load_part(x + k, count - k));
    __builtin_memcpy(integers, &code, sizeof code);
    for (int64_t i = count - k; i < kLanes; ++i) integers[i] = 0;
    __builtin_memcpy(&code, integers, sizeof code);
    store_quantized(quantized + k, code), sums += code, k += kLanes;
  }
  for (; k < padded; k += kLanes) store_quantized(quantized + k, I{});
  *scale = size_of(largest(most)) < __builtin_inff() ? fixed : __builtin_nanf("");
  *all = sum(sums);
}

// A row with one scale and one sum; quantized values up to a whole tile of inputs are 0.
template <class T>
HR_INLINE void quantize_row(const T* x, int64_t width, int8_t* quantized, float* scale, int32_t* sum) {
  int32_t sums[2];
  quantize(x, width, ceil_div(width, int64_t(64)) * 64, quantized, scale, sums);
  *sum = sums[0] + sums[1];
}

// Bytes from row to row of int8 values: rows a power of two apart would share the sets of the first-level cache, so one
// line more.
HR_INLINE int64_t quantized_stride(int64_t inputs) { return ceil_div(inputs, int64_t(64)) * 64 + 64; }

HR_INLINE I broadcast(const int8_t* four) {
  int32_t v;
  __builtin_memcpy(&v, four, 4);
  return I{} + v;
}

// acc[lane] += the sum over 4 bytes of w (unsigned) * x (signed). Small: w is below 16. Where the instruction set has no
// such product, int8 values are turned signed first and need no compensation (kOffset8 is 0). Full: x may be -128, which
// has no opposite in a byte.
#if defined(__AVX512VNNI__)
constexpr int32_t kOffset8 = 128;
HR_INLINE I dot8(I acc, I w, I x, bool = false) { return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x); }
HR_INLINE I dot4(I acc, I w, I x) { return dot8(acc, w, x); }
#elif defined(__AVX512BW__)
constexpr int32_t kOffset8 = 0;
HR_INLINE I dot4(I acc, I w, I x) {
  __m512i pairs = _mm512_maddubs_epi16((__m512i)w, (__m512i)x);
  return acc + (I)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
HR_INLINE I words(I acc, __m512i w, __m512i x) { return acc + (I)_mm512_madd_epi16(w, x); }
HR_INLINE I dot8(I acc, I w, I x, bool full = false) {
  __m512i s = (__m512i)(w ^ (int32_t)0x80808080), v = (__m512i)x;
  if (full) {
    acc = words(acc, _mm512_srai_epi16(s, 8), _mm512_srai_epi16(v, 8));
    return words(acc, _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8), _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8));
  }
  v = _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(s), _mm512_setzero_si512(), v);
  return dot4(acc, (I)_mm512_abs_epi8(s), (I)v);  // at most 128 and 127: pairs stay below 2^15
}
#elif defined(__AVX2__)
constexpr int32_t kOffset8 = 0;
HR_INLINE I dot4(I acc, I w, I x) {
  __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);
  return acc + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
HR_INLINE I words(I acc, __m256i w, __m256i x) { return acc + (I)_mm256_madd_epi16(w, x); }
HR_INLINE I dot8(I acc, I w, I x, bool full = false) {
  __m256i s = (__m256i)(w ^ (int32_t)0x80808080), v = (__m256i)x;
  if (full) {
    acc = words(acc, _mm256_srai_epi16(s, 8), _mm256_srai_epi16(v, 8));
    return words(acc, _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8));
  }
  return dot4(acc, (I)_mm256_abs_epi8(s), (I)_mm256_sign_epi8(v, s));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int32_t kOffset8 = 0;
HR_INLINE I dot4(I acc, I w, I x) { return (I)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)x); }
HR_INLINE I dot8(I acc, I w, I x, bool = false) { return dot4(acc, w ^ (int32_t)0x80808080, x); }
#else
constexpr int32_t kOffset8 = 0;
HR_INLINE I dot4(I acc, I w, I x) {
  HR_UNROLL for (int b = 0; b < 4; ++b) acc += ((w << (24 - 8 * b)) >> 24) * ((x << (24 - 8 * b)) >> 24);
  return acc;
}
HR_INLINE I dot8(I acc, I w, I x, bool = false) { return dot4(acc, w ^ (int32_t)0x80808080, x); }
#endif

}  // namespace
