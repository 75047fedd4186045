// Forms of KV caches beside int8 and e4m3 (fp8.h): e5m2, read a value at a time as those are, and 4-bit numbers, whole ones
// and e2m1, which are dequantized a tile of tokens at a time.
#pragma once

#include "fp8.h"
#include "paged_attention.h"

namespace {

// Sign, five bits of exponent (bias 15), two of mantissa: the upper byte of an fp16 number. Up to 57344.
struct e5m2 {
  uint8_t bits;
};
constexpr float kMostE5m2 = 57344.0f;

HR_INLINE F load(const e5m2* p) {
  const U code = load_bytes(&p->bits);
  const F size = (F)((code & 0x7f) << 21) * 0x1p112f;
  return (F)((U)size | (code & 0x80) << 24);
}

// Floats of at most 57344 as e5m2 values: to nearest, ties to even.
HR_INLINE U to_e5m2(F v) {
  const U bits = (U)v, size = bits & 0x7fffffff;
  const U normal = (size + 0xfffff + (size >> 21 & 1) - 0x38000000) >> 21;
  const U denormal = (U)((F)size + 128.0f) - 0x43000000;  // the sum rounds to units of 2^-16
  return ((I)size < 0x38800000 ? denormal : normal) | (bits >> 24 & 0x80);
}

// As quantize_fp8.
template <class T>
HR_INLINE void quantize_e5m2(const T* x, int64_t count, uint8_t* quantized, float* scale) {
  quantize_bytes(x, count, quantized, scale, kMostE5m2, to_e5m2);
}

// Two numbers 0 .. 15 in a byte, of dimension i (lower half) and head_dim / 2 + i. Where other forms have a token's scale, it
// has two fp16: scale and smallest value; a lost token has NaN there.
struct nibbles {
  uint8_t bits;
};
// NVFP4: e2m1 numbers placed likewise, then an e4m3 scale for each 16 dimensions, in units of the token's float32 scale.
struct e2m1 {
  uint8_t bits;
};
constexpr int64_t kShared = 16;
template <class S>
constexpr bool kIsE2m1 = false;
template <>
constexpr bool kIsE2m1<e2m1> = true;

// Whole numbers of 4 bits, as nibbles, or of 3 of a head that was rotated first (an orthogonal transform spreads what stands out
// over all dimensions): of 3 bits the lower two of dimensions i, head_dim / 4 + i, ... in byte i, then the third of dimensions i,
// head_dim / 8 + i, ... in byte i of the rest.
struct rotated4 {
  uint8_t bits;
};
struct rotated3 {
  uint8_t bits;
};
// The same with indices of levels for normal values, in units of the head's root mean square (quantized.py).
struct levels4 {
  uint8_t bits;
};
struct levels3 {
  uint8_t bits;
};
template <class S>
constexpr bool kIsLevelled = false;
template <>
constexpr bool kIsLevelled<levels4> = true;
template <>
constexpr bool kIsLevelled<levels3> = true;
template <class S>
constexpr bool kIsRotated = kIsLevelled<S>;
template <>
constexpr bool kIsRotated<rotated4> = true;
template <>
constexpr bool kIsRotated<rotated3> = true;
template <class S>
constexpr bool kIs3Bits = false;
template <>
constexpr bool kIs3Bits<rotated3> = true;
template <>
constexpr bool kIs3Bits<levels3> = true;

// Levels that lose least of normal values (Max 1960), and the midpoints of the magnitudes.
alignas(64) constexpr float kNormal4[16] = {-2.73259f, -2.06902f, -1.61805f, -1.25623f, -0.94234f, -0.65676f, -0.38807f, -0.1284f,
                                            0.1284f,   0.38807f,  0.65676f,  0.94234f,  1.25623f,  1.61805f,  2.06902f,  2.73259f};
alignas(64) constexpr float kNormal3[16] = {-2.15195f, -1.34391f, -0.75601f, -0.24509f, 0.24509f, 0.75601f, 1.34391f, 2.15195f};
constexpr float kSteps4[7] = {0.258235f, 0.522415f, 0.79955f, 1.099285f, 1.43714f, 1.843535f, 2.400805f};
constexpr float kSteps3[3] = {0.50055f, 1.04996f, 1.74793f};

// What kLanes numbers stand for, in units of the scale.
template <class S>
HR_INLINE F meant(U numbers) {
  if constexpr (!kIsLevelled<S>) return __builtin_convertvector((I)numbers, F);
  constexpr const float* levels = kIs3Bits<S> ? kNormal3 : kNormal4;
#if defined(__AVX512F__)
  return (F)_mm512_permutexvar_ps((__m512i)numbers, _mm512_load_ps(levels));
#else
  F values;
  for (int i = 0; i < kLanes; ++i) values[i] = levels[numbers[i]];
  return values;
#endif
}

template <class S>
constexpr bool kByTile = kIsRotated<S>;
template <>
constexpr bool kByTile<nibbles> = true;
template <>
constexpr bool kByTile<e2m1> = true;
template <class S>
constexpr bool kInTiles = !kIsRotated<S>;  // whether matrix tiles read it
template <>
constexpr bool kInTiles<e5m2> = false;
template <>
constexpr bool kInTiles<nibbles> = false;
template <>
constexpr bool kInTiles<e2m1> = false;

// Bytes of a token's head but for its scale.
template <class S>
HR_INLINE int64_t value_bytes(int64_t head_dim) {
  if (!kByTile<S>) return head_dim;
  if (kIs3Bits<S>) return head_dim / 8 * 3;
  return head_dim / 2 + (kIsE2m1<S> ? ceil_div(head_dim, kShared) : 0);
}

// Butterflies of neighbours H apart, within vectors.
template <int H>
HR_INLINE void neighbours(float* x, int64_t n) {
  if constexpr (H < kLanes) for (int64_t k = 0; k < n; k += kLanes) {
    const F v = load(x + k);
    F to;
    HR_UNROLL for (int i = 0; i < kLanes; ++i) to[i] = (i & H) ? v[i ^ H] - v[i] : v[i] + v[i ^ H];
    store(x + k, to);
  }
}

// n values (a power of two, at least 16) by the Hadamard matrix over the root of n: its own inverse.
HR_INLINE void hadamard(float* x, int64_t n) {
  neighbours<1>(x, n), neighbours<2>(x, n), neighbours<4>(x, n), neighbours<8>(x, n);
  for (int64_t h = kLanes; h < n; h *= 2)
    for (int64_t first = 0; first < n; first += 2 * h)
      for (int64_t k = first; k < first + h; k += kLanes) {
        const F a = load(x + k), b = load(x + k + h);
        store(x + k, a + b), store(x + k + h, a - b);
      }
  const F scale = splat(float(1.0 / __builtin_sqrt(double(n))));
  for (int64_t k = 0; k < n; k += kLanes) store(x + k, load(x + k) * scale);
}
// Fixed signs, so that no direction that models favour stays as it is.
HR_INLINE void flip(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) if (uint32_t(i) * 0x9e3779b1u >> 31) x[i] = -x[i];
}
template <class T>
HR_INLINE void rotate(const T* x, int64_t n, float* to) {
  for (int64_t k = 0; k < n; k += kLanes) store(to + k, load(x + k));
  flip(to, n), hadamard(to, n);
}
HR_INLINE void rotate_back(float* x, int64_t n) { hadamard(x, n), flip(x, n); }

// head_dim (even, at most 256) values as numbers 0 .. MOST, and their scale and smallest value in the four bytes of `slot`.
template <int MOST, class T>
HR_INLINE void whole_numbers(const T* x, int64_t head_dim, uint8_t* numbers, float* slot) {
  alignas(64) float wide[256 + 16];
  const int64_t whole = ceil_div(head_dim, kLanes) * kLanes;
  for (int64_t k = 0; k < head_dim; k += kLanes) store(wide + k, load_part(x + k, smaller<int64_t>(head_dim - k, kLanes)));
  for (int64_t k = head_dim; k < whole; ++k) wide[k] = wide[0];
  F low = load(wide), high = low;
  I finite = low == low;
  for (int64_t k = 0; k < whole; k += kLanes) {
    const F v = load(wide + k);
    low = select(v < low, v, low), high = select(v > high, v, high);
    finite &= (F)((U)v & 0x7fffffffu) < __builtin_inff();
  }
  bool good = true;
  for (int i = 0; i < kLanes; ++i) good = good && finite[i];
  const float least = -largest(-low), most = largest(high);
  fp16 pair[2];
  put(pair, (most - least) / float(MOST)), put(pair + 1, least);
  const float scale = to_float(pair[0]), base = to_float(pair[1]);
  good = good && scale < __builtin_inff() && base < __builtin_inff() && base > -__builtin_inff();
  *slot = __builtin_nanf("");
  if (good) __builtin_memcpy(slot, pair, 4);
  const F inverse = splat(good && scale > 0 ? 1.0f / scale : 0.0f);
  typedef uint8_t B __attribute__((vector_size(kLanes)));
  for (int64_t k = 0; k < whole; k += kLanes) {
    F v = good ? (load(wide + k) - base) * inverse : F{};
    v = vmax(F{}, vmin(splat(float(MOST)), v)) + 12582912.0f;  // 1.5 x 2^23: the sum rounds to whole numbers, ties to even
    const B bytes = __builtin_convertvector((U)v & 15, B);
    __builtin_memcpy(numbers + k, &bytes, sizeof bytes);
  }
}
template <class T>
HR_INLINE void quantize_nibbles(const T* x, int64_t head_dim, uint8_t* quantized, float* slot) {
  alignas(64) uint8_t numbers[256 + 16];
  whole_numbers<15>(x, head_dim, numbers, slot);
  for (int64_t i = 0; i < head_dim / 2; ++i) quantized[i] = uint8_t(numbers[i] | numbers[head_dim / 2 + i] << 4);
}
// head_dim (a power of two from 16 on) values of a rotated head as indices of levels.
template <class S>
HR_INLINE void nearest_levels(const float* x, int64_t head_dim, uint8_t* numbers, float* slot) {
  constexpr int most = kIs3Bits<S> ? 3 : 7;
  constexpr const float* steps = kIs3Bits<S> ? kSteps3 : kSteps4;
  constexpr const float* levels = kIs3Bits<S> ? kNormal3 : kNormal4;
  F squares{};
  for (int64_t k = 0; k < head_dim; k += kLanes) squares += load(x + k) * load(x + k);
  const float total = sum(squares);
  fp16 pair[2];
  put(pair, float(__builtin_sqrtf(total / float(head_dim))));
  const float root = to_float(pair[0]);
  const bool good = root < __builtin_inff();
  const float inverse = good && root > 0 ? 1.0f / root : 0.0f;
  float meaning = 0;
  for (int64_t k = 0; k < head_dim; ++k) {
    const float u = __builtin_fabsf(x[k] * inverse);
    int place = 0;
    for (int i = 0; i < most; ++i) place += u > steps[i];
    const int number = !good ? 0 : x[k] < 0 ? most - place : most + 1 + place;
    numbers[k] = uint8_t(number);
    meaning += levels[number] * levels[number];
  }
  put(pair, float(__builtin_sqrtf(total / meaning))), put(pair + 1, 0.0f);
  *slot = __builtin_nanf("");
  if (good) __builtin_memcpy(slot, pair, 4);
}
template <class S, class T>
HR_INLINE void quantize_rotated(const T* x, int64_t head_dim, uint8_t* quantized, float* slot) {
  alignas(64) float wide[256];
  rotate(x, head_dim, wide);
  alignas(64) uint8_t numbers[256 + 16];
  if constexpr (kIsLevelled<S>) nearest_levels<S>(wide, head_dim, numbers, slot);
  else whole_numbers<kIs3Bits<S> ? 7 : 15>(wide, head_dim, numbers, slot);
  if constexpr (!kIs3Bits<S>) {
    for (int64_t i = 0; i < head_dim / 2; ++i) quantized[i] = uint8_t(numbers[i] | numbers[head_dim / 2 + i] << 4);
    return;
  }
  __builtin_memset(quantized, 0, size_t(value_bytes<S>(head_dim)));
  const int64_t quarter = head_dim / 4, eighth = head_dim / 8;
  for (int64_t q = 0; q < 4; ++q)
    for (int64_t i = 0; i < quarter; ++i) quantized[i] |= uint8_t((numbers[q * quarter + i] & 3) << 2 * q);
  for (int64_t j = 0; j < 8; ++j)
    for (int64_t i = 0; i < eighth; ++i) quantized[quarter + i] |= uint8_t(numbers[j * eighth + i] >> 2 << j);
}

// The same as e2m1 numbers, to nearest, ties to even; zeros where a group's scale is 0.
template <class T>
HR_INLINE void quantize_e2m1(const T* x, int64_t head_dim, uint8_t* quantized, float* slot) {
  alignas(64) float wide[256 + 16], group_sizes[256 / kShared + 16];
  alignas(64) uint8_t numbers[256 + 16];
  const int64_t groups = ceil_div(head_dim, kShared), half = head_dim / 2;
  for (int64_t k = 0; k < groups * kShared; k += kLanes)
    store(wide + k, k < head_dim ? load_part(x + k, smaller<int64_t>(head_dim - k, kLanes)) : F{});
  F most{};
  I finite = most == 0.0f;
  for (int64_t g = 0; g < groups; ++g) {
    F top{};
    for (int64_t k = g * kShared; k < (g + 1) * kShared; k += kLanes) {
      const F size = (F)((U)load(wide + k) & 0x7fffffffu);
      top = select(size > top, size, top);
      finite &= size < __builtin_inff();
    }
    most = select(top > most, top, most), group_sizes[g] = largest(top);
  }
  bool good = true;
  for (int i = 0; i < kLanes; ++i) good = good && finite[i];
  const float top = largest(most), outer = top / (6 * kMostFp8);
  const float inverse = good && top > 1e-30f ? kMostFp8 / top : 0.0f;
  *slot = good ? outer : __builtin_nanf("");
  typedef uint8_t B __attribute__((vector_size(kLanes)));
  for (int64_t g = 0; g < groups; g += kLanes) {
    const F v = good ? load(group_sizes + g) * inverse : F{};
    const B group_scales = __builtin_convertvector(to_fp8(vmin(splat(kMostFp8), v)), B);
    for (int64_t i = 0; i < kLanes && g + i < groups; ++i) quantized[half + g + i] = group_scales[i];
  }
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = to_float(fp8{quantized[half + g]}) * outer;
    const F unit = splat(good && scale > 0 ? 1.0f / scale : 0.0f);
    for (int64_t k = g * kShared; k < (g + 1) * kShared; k += kLanes) {
      const F v = good ? load(wide + k) : F{}, size = (F)((U)v & 0x7fffffffu) * unit;
      const I place = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) +
                      (size > 5.0f);  // a comparison that holds is -1
      const B bytes = __builtin_convertvector((U)(-place) | ((U)(v < 0.0f) & 8), B);
      __builtin_memcpy(numbers + k, &bytes, sizeof bytes);
    }
  }
  for (int64_t i = 0; i < half; ++i) quantized[i] = uint8_t(numbers[i] | numbers[half + i] << 4);
}

// e2m1 bits as floats: exponent and mantissa where a float has them, 126 exponents too low.
HR_INLINE F e2m1_floats(U code) {
  const F size = (F)((code & 7) << 22) * 0x1p126f;
  return (F)((U)size | (code & 8) << 28);
}

// One token's e2m1 numbers as values. Reads whole vectors, as below.
template <class T>
HR_INLINE void dequantize_e2m1(const uint8_t* from, int64_t head_dim, const int8_t* slot, T* to) {
  alignas(64) float scales[256 + 16];
  float outer;
  __builtin_memcpy(&outer, slot, 4);
  const int64_t half = head_dim / 2;
  for (int64_t g = 0; g < ceil_div(head_dim, kShared); ++g) {
    const F scale = splat(to_float(fp8{from[half + g]}) * outer);
    for (int64_t k = 0; k < kShared; k += kLanes) store(scales + g * kShared + k, scale);
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const U both = load_bytes(from + i);
    const F lower = e2m1_floats(both & 15) * load(scales + i), upper = e2m1_floats(both >> 4) * load(scales + half + i);
    if (half - i >= kLanes) store(to + i, lower), store(to + half + i, upper);
    else store_part(to + i, lower, half - i), store_part(to + half + i, upper, half - i);
  }
}

// One token's numbers as values. Reads whole vectors: a block's scales lie behind its last token's.
template <class S, class T>
HR_INLINE void dequantize_nibbles(const uint8_t* from, int64_t head_dim, const int8_t* slot, T* to) {
  fp16 pair[2];
  __builtin_memcpy(pair, slot, 4);
  const F scale = splat(to_float(pair[0])), base = splat(to_float(pair[1]));
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const U both = load_bytes(from + i);
    const F lower = meant<S>(both & 15) * scale + base, upper = meant<S>(both >> 4) * scale + base;
    if (half - i >= kLanes) store(to + i, lower), store(to + half + i, upper);
    else store_part(to + i, lower, half - i), store_part(to + half + i, upper, half - i);
  }
}

// One token's numbers of 3 bits as values, rotated as they are.
template <class S, class T>
HR_INLINE void dequantize_3_bits(const uint8_t* from, int64_t head_dim, const int8_t* slot, T* to) {
  alignas(64) uint8_t numbers[256 + 16];
  fp16 pair[2];
  __builtin_memcpy(pair, slot, 4);
  const F scale = splat(to_float(pair[0])), base = splat(to_float(pair[1]));
  const int64_t quarter = head_dim / 4, eighth = head_dim / 8;
  for (int64_t q = 0; q < 4; ++q)
    for (int64_t i = 0; i < quarter; ++i) numbers[q * quarter + i] = uint8_t(from[i] >> 2 * q & 3);
  for (int64_t j = 0; j < 8; ++j)
    for (int64_t i = 0; i < eighth; ++i) numbers[j * eighth + i] |= uint8_t((from[quarter + i] >> j & 1) << 2);
  for (int64_t k = 0; k < head_dim; k += kLanes)
    store(to + k, meant<S>(load_bytes(numbers + k)) * scale + base);
}

// Keys and values of the KV positions [low, low + count) as a cache of one block of kTokens tokens: [2][kTokens][head_dim].
template <class T, class S>
HR_INLINE void dequantize_tile(const Attention& p, int64_t row, int64_t kv_head, int64_t low, int64_t count, T* tile) {
  const int64_t bytes = value_bytes<S>(p.head_dim);
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t j = 0; j < count; ++j) {
      const int64_t block = p.block_table[row * p.table_stride + (low + j) / p.block_tokens];
      const int64_t offset = (low + j) % p.block_tokens;
      const int8_t* head =
          static_cast<const int8_t*>(p.kv) + block * p.block_stride + half * p.value_offset + kv_head * p.head_stride;
      const uint8_t* from = reinterpret_cast<const uint8_t*>(head) + offset * bytes;
      const int8_t* slot = head + p.block_tokens * bytes + offset * 4;
      T* to = tile + (half * kTokens + j) * p.head_dim;
      if constexpr (kIs3Bits<S>) dequantize_3_bits<S>(from, p.head_dim, slot, to);
      else if constexpr (kIsE2m1<S>) dequantize_e2m1(from, p.head_dim, slot, to);
      else dequantize_nibbles<S>(from, p.head_dim, slot, to);
    }
}

// The attention call and task over such a tile alone.
template <class T>
struct TileCall {
  Attention call;
  Task task;
  int32_t block = 0;
  TileCall(const Attention& p, const Task& of, int64_t count, const T* tile) : call(p), task(of) {
    call.kv = tile, call.block_table = &block, call.table_stride = 0, call.block_tokens = kTokens;
    call.block_stride = 0, call.head_stride = 0, call.value_offset = kTokens * p.head_dim;
    task.high = int32_t(count);
  }
};

}  // namespace
