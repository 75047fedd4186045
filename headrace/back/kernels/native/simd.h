// Vectors of floats and the bf16 dot product, for one instruction set per translation unit.
//
// Written with the compiler's vector extensions: the same text becomes AVX-512, AVX2, SSE2 or NEON code. Intrinsics stand
// only where the extension has no word for the instruction (bf16 dot and conversion, masked loads, the transposing sum).
#pragma once

#include <cstdint>
#include <cstring>

#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define HR_JOIN2(a, b) a##_##b
#define HR_JOIN(a, b) HR_JOIN2(a, b)
// The exported name of a kernel in this instruction set: hr_linear_avx2 ...
#define HR_EXPORT(name) HR_JOIN(hr_##name, HR_ISA)
#define HR_INLINE static inline __attribute__((always_inline))
#define HR_UNROLL _Pragma("GCC unroll 32")

// Beside kernel `name`: the same with its arguments in 8-byte slots, in order, as a recorded step holds them, and a letter for
// the type of each, which its wrapper's own are compared with (library.py).
#define HR_REPLAYABLE(name) \
  HR_PUBLIC int32_t HR_JOIN(hr_slots_##name, HR_ISA)(const uint64_t* slots) { return from_slots(HR_EXPORT(name), slots); } \
  HR_PUBLIC const char* HR_JOIN(hr_types_##name, HR_ISA)() { return letters_of(HR_EXPORT(name)); }

namespace {

template <int... I>
struct Places {};
template <int N, int... I>
struct Counted : Counted<N - 1, N - 1, I...> {};
template <int... I>
struct Counted<0, I...> {
  using type = Places<I...>;
};
template <class A>
HR_INLINE A slot_as(uint64_t slot) {
  A a;
  __builtin_memcpy(&a, &slot, sizeof a);  // the low bytes: both machines we build for are little-endian
  return a;
}
template <class... A, int... I>
HR_INLINE int32_t call_with(int32_t (*kernel)(A...), const uint64_t* slots, Places<I...>) {
  return kernel(slot_as<A>(slots[I])...);
}
template <class... A>
HR_INLINE int32_t from_slots(int32_t (*kernel)(A...), const uint64_t* slots) {
  return call_with(kernel, slots, typename Counted<sizeof...(A)>::type{});
}

template <class A>
constexpr char kLetter = '?';
template <class A>
constexpr char kLetter<A*> = 'P';
template <>
constexpr char kLetter<int64_t> = 'q';
template <>
constexpr char kLetter<int32_t> = 'i';
template <>
constexpr char kLetter<float> = 'f';
template <>
constexpr char kLetter<double> = 'd';
template <class... A>
HR_INLINE const char* letters_of(int32_t (*)(A...)) {
  static constexpr char letters[] = {kLetter<A>..., 0};
  return letters;
}

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
// Vector registers decide how large a tile of accumulators may be.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class V, class T>
HR_INLINE V load_raw(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// The first n elements at p, zeros after; never touches p[n].
template <class V, class T>
HR_INLINE V load_raw_part(const T* p, int64_t n) {
  V v{};
#if defined(__AVX512BW__)
  if constexpr (sizeof(V) == 64 && sizeof(T) == 4)
    return (V)_mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1), p);
  if constexpr (sizeof(V) == 64 && sizeof(T) == 2)
    return (V)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
#endif
  __builtin_memcpy(&v, p, size_t(n) * sizeof(T));
  return v;
}

HR_INLINE F splat(float x) { return x - F{}; }
// a * b + c, rounded once where the instruction set has such an instruction. The compiler is not left
// the choice (-ffp-contract=off): it fuses in one tile and not in the next, and rows would depend on how they are tiled.
HR_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
HR_INLINE F fma(F a, float b, F c) { return fma(a, splat(b), c); }
HR_INLINE F fma(F a, float b, float c) { return fma(a, splat(b), splat(c)); }
HR_INLINE F select(I mask, F yes, F no) { return mask ? yes : no; }
// The larger, the smaller; b's NaN wins, a's does not.
HR_INLINE F vmax(F a, F b) { return select(a > b, a, b); }
HR_INLINE F vmin(F a, F b) { return select(a < b, a, b); }
template <class T>
HR_INLINE T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
HR_INLINE T larger(T a, T b) { return a > b ? a : b; }
HR_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

HR_INLINE float to_float(float x) { return x; }
HR_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
HR_INLINE void put(float* p, float x) { *p = x; }
HR_INLINE void put(bf16* p, float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  p->bits = x != x ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Halves to floats, exactly.
HR_INLINE F widen_half(H h) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (F)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
  return (F)vcvt_f32_f16((float16x4_t)h);
#else
  U bits = __builtin_convertvector(h, U);
  U size = (bits & 0x7fff) << 13;
  // The exponent moves from 15 to 127 by a product, which makes normal numbers of denormals too.
  F v = (F)size * 0x1p112f;
  U special = (U)((I)size >= 0x0f800000) & 0x7f800000;  // Inf and NaN keep their mantissa
  return (F)((U)v | special | (bits & 0x8000) << 16);
#endif
}
// Floats to halves: to nearest, ties to even.
HR_INLINE H narrow_half(F v) {
#if defined(__AVX512F__)
  return (H)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (H)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (H)vcvt_f16_f32((float32x4_t)v);
#else
  U bits = (U)v, sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  U normal = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
  U denormal = (U)((F)size + 0.5f) - 0x3f000000;  // the sum rounds to units of 2^-24
  U half = (I)size < 0x38800000 ? denormal : normal;
  half = (I)size >= 0x477ff000 ? U{} + 0x7c00 : half;
  half = (I)size > 0x7f800000 ? U{} + 0x7e00 : half;
  return __builtin_convertvector(half | sign, H);
#endif
}

HR_INLINE float to_float(fp16 x) {
  H h{};
  h[0] = x.bits;
  return widen_half(h)[0];
}
HR_INLINE void put(fp16* p, float x) { p->bits = narrow_half(x - F{})[0]; }

// kLanes elements as floats.
HR_INLINE F load(const float* p) { return load_raw<F>(p); }
HR_INLINE F load(const fp16* p) { return widen_half(load_raw<H>(p)); }
// As intrinsics, here and below: the compiler's own conversion of 16 halves goes by way of two shorter vectors, five
// instructions for one, and that of bytes lane by lane.
HR_INLINE F load(const bf16* p) {
#if defined(__AVX512F__)
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)load_raw<H>(p)), 16);
#elif defined(__AVX2__)
  return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)load_raw<H>(p)), 16);
#else
  return (F)(__builtin_convertvector(load_raw<H>(p), U) << 16);
#endif
}
HR_INLINE F load(const int8_t* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(__aarch64__)
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return (F)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#else
  typedef int8_t B __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(load_raw<B>(p), F);
#endif
}
HR_INLINE void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
HR_INLINE void store(fp16* p, F v) {
  H h = narrow_half(v);
  __builtin_memcpy(p, &h, sizeof h);
}
HR_INLINE void store(bf16* p, F v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);  // the same rounding; denormals become 0
#else
  U bits = (U)v;
  U even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  U nan = bits >> 16 | 0x40;
  H h = __builtin_convertvector(v != v ? nan : even, H);
#endif
  __builtin_memcpy(p, &h, sizeof h);
}
// The first n (at most kLanes) elements; zeros after.
template <class T>
HR_INLINE F load_part(const T* p, int64_t n) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 1) {
    const __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), p);
    return load(reinterpret_cast<const T*>(&bytes));
  }
  if constexpr (sizeof(T) == 4) return load_raw_part<F>(p, n);
  const __m256i half = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
  return load(reinterpret_cast<const T*>(&half));
#else
  T part[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) part[i] = p[i];
  return load(part);
#endif
}
template <class T>
HR_INLINE void store_part(T* p, F v, int64_t n) {
  T part[kLanes];
  store(part, v);
#if defined(__AVX512BW__)
  const __mmask16 mask = (__mmask16)((1u << n) - 1);
  if (sizeof(T) == 4) _mm512_mask_storeu_epi32(p, mask, _mm512_loadu_si512(part));
  else _mm256_mask_storeu_epi16(p, mask, _mm256_loadu_si256((const __m256i*)part));
#else
  for (int64_t i = 0; i < n; ++i) p[i] = part[i];
#endif
}

HR_INLINE float sum(F v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}
HR_INLINE float largest(F v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}
// out[i] = the sum of v[i]'s lanes. One transposing tree for four sums: 13 instructions instead of 32.
HR_INLINE void sum4(F a, F b, F c, F d, float* out) {
#if defined(__AVX512F__)
  __m512 x = (__m512)a, y = (__m512)b, z = (__m512)c, w = (__m512)d;
  __m512 xy = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  __m512 zw = _mm512_add_ps(_mm512_unpacklo_ps(z, w), _mm512_unpackhi_ps(z, w));
  __m512d p = _mm512_castps_pd(xy), q = _mm512_castps_pd(zw);
  __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
  __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b), cd = _mm256_hadd_ps((__m256)c, (__m256)d);
  __m256 all = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

// How an element type takes part in a dot product: `step` elements per vector, products summed in float32.
template <class T>
struct Dot;

template <>
struct Dot<float> {
  using V = F;
  static constexpr int step = kLanes;
  HR_INLINE F add(F acc, V a, V b) { return fma(a, b, acc); }
};

template <>
struct Dot<bf16> {
  using V = U;
  static constexpr int step = 2 * kLanes;
  // The bf16 instruction adds both products of a pair in one go and flushes denormals; elsewhere two FMAs on the
  // upper and the lower half of each lane.
  HR_INLINE F add(F acc, V a, V b) {
#if defined(__AVX512BF16__)
    return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (F)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    acc = fma((F)(a << 16), (F)(b << 16), acc);
    return fma((F)(a & 0xffff0000u), (F)(b & 0xffff0000u), acc);
#endif
  }
};

template <>
struct Dot<fp16> {
  using V = H;
  static constexpr int step = kLanes;
  HR_INLINE F add(F acc, V a, V b) { return fma(widen_half(a), widen_half(b), acc); }
};

// e^x, saturating at x = 88.7; below -87.3 the result is 0; NaN stays. Cephes' polynomial; relative error below 2e-7.
HR_INLINE F vexp(F x) {
  F low = splat(-87.33654f);
  I tiny = x < low;
  x = vmin(splat(88.72283f), vmax(low, x));
  F n = fma(x, 1.44269504088896341f, 12582912.0f);  // 1.5 * 2^23: rounds to an integer
  I k = (I)n - 0x4b400000;
  n -= 12582912.0f;
  F r = fma(n, -0.693359375f, x);
  r = fma(n, 2.12194440e-4f, r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  // 2^k in two factors: k may be 128.
  I half = k >> 1;
  F first = (F)((half + 127) << 23), second = (F)((k - half + 127) << 23);
  return select(tiny, F{}, p * first * second);
}

HR_INLINE F vsigmoid(F x) { return 1.0f / (1.0f + vexp(-x)); }
// tanh by e^-2|x|: exact signs, 1 at large |x|.
HR_INLINE F vtanh(F x) {
  F e = vexp(-2.0f * select(x < 0.0f, -x, x));
  F t = (1.0f - e) / (1.0f + e);
  return select(x < 0.0f, -t, t);
}

}  // namespace
