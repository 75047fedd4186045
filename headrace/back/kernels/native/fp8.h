// e4m3 numbers (Micikevicius et al. 2022, section 3): sign, four bits of exponent (bias 7), three of mantissa, up to 448.
// There is no infinity; all ones would be NaN, which no code here is.
//
// All of them are bf16 numbers too. As such the upper byte is the sign and 60 plus the upper three bits of the exponent, and
// the lower one begins with the code's lower four bits; but bytes below 8 are denormal, and the numbers they stand for are
// normal in bf16: their bytes come from a table. (Moving the exponent by a product, as `load` does for floats, would not do:
// products of bf16 take denormals for 0.)
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

// kLanes bytes as whole numbers.
HR_INLINE U load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (U)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  typedef uint8_t B __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(load_raw<B>(p), U);
#endif
}

// kLanes e4m3 values as floats, exactly: exponent and mantissa where a float has them, 120 exponents too low.
HR_INLINE F load(const fp8* p) {
  const U code = load_bytes(&p->bits);
  const F size = (F)((code & 0x7f) << 20) * 0x1p120f;
  return (F)((U)size | (code & 0x80) << 24);
}

HR_INLINE float to_float(fp8 x) {
  const uint32_t bits = uint32_t(x.bits & 0x7f) << 20;
  float size;
  __builtin_memcpy(&size, &bits, 4);
  return x.bits & 0x80 ? -(size * 0x1p120f) : size * 0x1p120f;
}

// The bytes of bf16 numbers of the bytes 0 .. 15.
alignas(16) constexpr uint8_t kUpperFp8[16] = {0, 59, 59, 59, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60};
alignas(16) constexpr uint8_t kLowerFp8[16] = {0,    0,    0x80, 0xc0, 0,    0x20, 0x40, 0x60,
                                               0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};

#if defined(__GFNI__) && defined(__AVX512BW__)
// The upper and lower bytes of 64 values. Of normal ones each bit is one of the code's, or its inverse: a product of bits.
// Denormal ones are rare (below 1/28,000 of an output's largest weight), so they have a branch.
HR_INLINE void dequantize_bytes(__m512i code, __m512i& upper, __m512i& lower) {
  // A byte of these is the bit of the code that becomes a bit of the result, the highest one's first (in the lowest byte);
  // the four in the middle are the exponent's highest bit, inverted by the constant.
  upper = _mm512_gf2p8affine_epi64_epi8(code, _mm512_set1_epi64(0x1020404040404080), 0x3c);
  lower = _mm512_gf2p8affine_epi64_epi8(code, _mm512_set1_epi64(0x0000000001020408), 0);
  const __mmask64 denormal = _mm512_testn_epi8_mask(code, _mm512_set1_epi8(0x78));
  if (__builtin_expect(denormal != 0, 0)) {
    const __m512i size = _mm512_and_si512(code, _mm512_set1_epi8(7));
    const __m512i uppers = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kUpperFp8)));
    const __m512i lowers = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kLowerFp8)));
    upper = _mm512_mask_shuffle_epi8(upper, denormal, uppers, size);
    upper = _mm512_ternarylogic_epi32(upper, code, _mm512_set1_epi8(char(0x80)), 0xf8);  // upper | code & sign
    lower = _mm512_mask_shuffle_epi8(lower, denormal, lowers, size);
  }
}
#endif

// Weights, four inputs of 64 outputs at a time: 16 bytes hold the first two inputs of four outputs, then the other two, so that
// no lane moves to another when bytes become pairs of words. Where an output's inputs begin; the third is 8 bytes on.
HR_INLINE int64_t fp8_place(int64_t column) { return column / 4 * 16 + column % 4 * 2; }

// sizeof(U) bytes of such weights as pairs of bf16, one output in a lane.
HR_INLINE void dequantize_pairs(const uint8_t* p, U& first, U& second) {
#if defined(__GFNI__) && defined(__AVX512BW__)
  __m512i upper, lower;
  dequantize_bytes(_mm512_loadu_si512(p), upper, lower);
  first = (U)_mm512_unpacklo_epi8(lower, upper), second = (U)_mm512_unpackhi_epi8(lower, upper);
#elif defined(__AVX512BW__)
  const __m512i code = _mm512_loadu_si512(p), tail = _mm512_and_si512(code, _mm512_set1_epi8(15));
  const __mmask64 small = _mm512_testn_epi8_mask(code, _mm512_set1_epi8(0x70));  // of 0 .. 15, with either sign
  const __m512i uppers = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kUpperFp8)));
  const __m512i lowers = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kLowerFp8)));
  __m512i upper = _mm512_and_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi8(7));
  upper = _mm512_add_epi8(upper, _mm512_set1_epi8(60));
  upper = _mm512_mask_shuffle_epi8(upper, small, uppers, tail);
  const __m512i lower = _mm512_mask_shuffle_epi8(_mm512_slli_epi16(tail, 4), small, lowers, tail);
  upper = _mm512_ternarylogic_epi32(upper, code, _mm512_set1_epi8(char(0x80)), 0xf8);  // upper | code & sign
  first = (U)_mm512_unpacklo_epi8(lower, upper), second = (U)_mm512_unpackhi_epi8(lower, upper);
#elif defined(__AVX2__)
  const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i tail = _mm256_and_si256(code, _mm256_set1_epi8(15));
  const __m256i small = _mm256_cmpeq_epi8(_mm256_and_si256(code, _mm256_set1_epi8(0x70)), _mm256_setzero_si256());
  const __m256i uppers = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kUpperFp8)));
  const __m256i lowers = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kLowerFp8)));
  __m256i upper = _mm256_and_si256(_mm256_srli_epi16(code, 4), _mm256_set1_epi8(7));
  upper = _mm256_add_epi8(upper, _mm256_set1_epi8(60));
  upper = _mm256_blendv_epi8(upper, _mm256_shuffle_epi8(uppers, tail), small);
  const __m256i lower = _mm256_blendv_epi8(_mm256_slli_epi16(tail, 4), _mm256_shuffle_epi8(lowers, tail), small);
  upper = _mm256_or_si256(upper, _mm256_and_si256(code, _mm256_set1_epi8(char(0x80))));
  first = (U)_mm256_unpacklo_epi8(lower, upper), second = (U)_mm256_unpackhi_epi8(lower, upper);
#elif defined(__aarch64__)
  const uint8x16_t code = vld1q_u8(p), tail = vandq_u8(code, vdupq_n_u8(15));
  const uint8x16_t small = vceqzq_u8(vandq_u8(code, vdupq_n_u8(0x70)));
  uint8x16_t upper = vaddq_u8(vandq_u8(vshrq_n_u8(code, 4), vdupq_n_u8(7)), vdupq_n_u8(60));
  upper = vbslq_u8(small, vqtbl1q_u8(vld1q_u8(kUpperFp8), tail), upper);
  const uint8x16_t lower = vbslq_u8(small, vqtbl1q_u8(vld1q_u8(kLowerFp8), tail), vshlq_n_u8(tail, 4));
  upper = vorrq_u8(upper, vandq_u8(code, vdupq_n_u8(0x80)));
  first = (U)vzip1q_u8(lower, upper), second = (U)vzip2q_u8(lower, upper);
#else
  for (int i = 0; i < kLanes; ++i) {
    uint32_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const uint8_t* quantized = p + i / 4 * 16 + j * 8 + i % 4 * 2;
      uint32_t bits[2];
      for (int k = 0; k < 2; ++k) {
        const float value = to_float(fp8{quantized[k]});
        __builtin_memcpy(&bits[k], &value, 4);
      }
      pair[j] = bits[0] >> 16 | bits[1];
    }
    first[i] = pair[0], second[i] = pair[1];
  }
#endif
}

// Floats of at most 448 as e4m3 values: to nearest, ties to even.
HR_INLINE U to_fp8(F v) {
  const U bits = (U)v, size = bits & 0x7fffffff;
  const U normal = (size + 0x7ffff + (size >> 20 & 1) - 0x3c000000) >> 20;
  const U denormal = (U)((F)size + 16384.0f) - 0x46800000;  // the sum rounds to units of 2^-9
  return ((I)size < 0x3c800000 ? denormal : normal) | (bits >> 24 & 0x80);
}

// count values in units of their largest, which becomes `top_code`, and the scale; a NaN or Inf makes it NaN. `fixed`: in
// units of this scale instead, where it is not 0; larger ones become `top_code`. Writes whole vectors.
template <class T, class Round>
HR_INLINE void quantize_bytes(const T* x, int64_t count, uint8_t* quantized, float* scale, float top_code, Round round,
                              float fixed = 0) {
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
  const float usual = top > 1e-30f ? top_code / top : 0.0f, unit = fixed > 0 ? fixed : top / top_code;
  const F inverse = splat(!good ? 0.0f : fixed > 0 ? 1.0f / fixed : usual);
  *scale = good ? unit : __builtin_nanf("");
  for (int64_t k = 0; k < count; k += kLanes) {
    F v = load_part(x + k, smaller<int64_t>(count - k, kLanes)) * inverse;
    v = good ? vmax(splat(-top_code), vmin(splat(top_code), v)) : F{};
    const U code = round(v);
    typedef uint8_t B __attribute__((vector_size(kLanes)));
    const B bytes = __builtin_convertvector(code, B);
    __builtin_memcpy(quantized + k, &bytes, sizeof bytes);
  }
}
template <class T>
HR_INLINE void quantize_fp8(const T* x, int64_t count, fp8* quantized, float* scale, float fixed) {
  quantize_bytes(x, count, &quantized->bits, scale, kMostFp8, to_fp8, fixed);
}

}  // namespace
