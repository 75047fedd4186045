// Block-quantized weights in panels of 64 outputs: the native twin of layout.py, which describes the bytes.
#pragma once

#include "int8.h"

namespace {

// A power of two by its exponent plus 127 (Open Compute, Microscaling Formats 1.0, 5.4.1); 0 counts as the number 0.
struct e8m0 {
  uint8_t bits;
};
HR_INLINE F load(const e8m0* p) {
#if defined(__AVX512F__)
  return (F)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 23);
#else
  typedef uint8_t B __attribute__((vector_size(kLanes)));
  return (F)(__builtin_convertvector(load_raw<B>(p), U) << 23);
#endif
}
HR_INLINE float to_float(e8m0 x) {
  const uint32_t bits = uint32_t(x.bits) << 23;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

constexpr int64_t kPanel = 64, kPlane = kPanel * 4;  // one plane: a 32-bit word of each output

// One way to quantize a weight. `wide`: values are whole bytes, stored plus 128, or levels of a table. A scale (and
// minimum) of type `Scale` belongs to `block` inputs; in two-level codings `sub` inputs have a multiplier of it. `scaled_parts`:
// each half of 16 inputs of a block of 32 has a scale of its own instead.
template <int NUMBER, int BLOCK, int SUB, int BITS, int OFFSET, bool MINIMUM, bool TWO_LEVEL, bool TABLE = false,
          class SCALE = fp16>
struct Coding {
  using Scale = SCALE;
  static constexpr int number = NUMBER, block = BLOCK, sub = SUB, bits = BITS, offset = OFFSET;
  static constexpr int x_group = SUB < 32 ? 32 : SUB;  // inputs that share a scale of the activations
  static constexpr bool minimum = MINIMUM, two_level = TWO_LEVEL, table = TABLE, wide = BITS == 8 || TABLE;
  static constexpr bool stored = NUMBER < 12 || NUMBER == 21;  // by checkpoints
  static constexpr bool scaled_parts = SUB < BLOCK && !TWO_LEVEL;
  static constexpr int64_t scale_size = sizeof(SCALE);
};
using Q8_0 = Coding<0, 32, 32, 8, 128, false, false>;
using Q4_0 = Coding<1, 32, 32, 4, 8, false, false>;
using Q4_1 = Coding<2, 32, 32, 4, 0, true, false>;
using Q5_0 = Coding<3, 32, 32, 5, 16, false, false>;
using Q5_1 = Coding<4, 32, 32, 5, 0, true, false>;
using Q2_K = Coding<5, 256, 16, 2, 0, true, true>;
using Q3_K = Coding<6, 256, 16, 3, 4, false, true>;
using Q4_K = Coding<7, 256, 32, 4, 0, true, true>;
using Q5_K = Coding<8, 256, 32, 5, 0, true, true>;
using Q6_K = Coding<9, 256, 16, 6, 32, false, true>;
using IQ4_NL = Coding<10, 32, 32, 4, 128, false, false, true>;
using IQ4_XS = Coding<11, 256, 32, 4, 128, false, true, true>;
using MXFP4 = Coding<21, 32, 32, 4, 128, false, false, true, e8m0>;
// As NVFP4, with scales rounded to bfloat16.
using E2m1 = Coding<22, 32, 16, 4, 128, false, false, true, bf16>;
// The numbers of GGUF's IQ types, vectors looked up: IQ1 and IQ2, IQ3_XXS, IQ3_S.
using Iq2 = Coding<26, 32, 16, 4, 128, false, false, true, bf16>;
using Iq3Xxs = Coding<27, 32, 32, 4, 128, false, false, true, bf16>;
using Iq3S = Coding<28, 32, 32, 4, 128, false, false, true, bf16>;
// Made while a plain checkpoint loads: a group of inputs with a bfloat16 scale, and a minimum where values are asymmetric.
template <int NUMBER, int GROUP>
using Int8 = Coding<NUMBER, GROUP, GROUP, 8, 128, false, false, false, bf16>;
template <int NUMBER, int GROUP>
using Int4 = Coding<NUMBER, GROUP, GROUP, 4, 8, false, false, false, bf16>;
template <int NUMBER, int GROUP>
using Int4Asymmetric = Coding<NUMBER, GROUP, GROUP, 4, 0, true, false, false, bf16>;

// Values around the middle of their range, so that minima are small beside them.
template <int NUMBER, int GROUP>
using Int8Asymmetric = Coding<NUMBER, GROUP, GROUP, 8, 128, true, false, false, bf16>;

// Calls f with the coding of that number; 0 if there is none.
template <class Function>
HR_INLINE bool with_coding(int64_t number, Function f) {
  switch (number) {
    case 0: f(Q8_0{}); return true;
    case 1: f(Q4_0{}); return true;
    case 2: f(Q4_1{}); return true;
    case 3: f(Q5_0{}); return true;
    case 4: f(Q5_1{}); return true;
    case 5: f(Q2_K{}); return true;
    case 6: f(Q3_K{}); return true;
    case 7: f(Q4_K{}); return true;
    case 8: f(Q5_K{}); return true;
    case 9: f(Q6_K{}); return true;
    case 10: f(IQ4_NL{}); return true;
    case 11: f(IQ4_XS{}); return true;
    case 12: f(Int4<12, 32>{}); return true;
    case 13: f(Int4<13, 64>{}); return true;
    case 14: f(Int4<14, 128>{}); return true;
    case 15: f(Int4Asymmetric<15, 32>{}); return true;
    case 16: f(Int4Asymmetric<16, 64>{}); return true;
    case 17: f(Int4Asymmetric<17, 128>{}); return true;
    case 18: f(Int8<18, 32>{}); return true;
    case 19: f(Int8<19, 64>{}); return true;
    case 20: f(Int8<20, 128>{}); return true;
    case 21: f(MXFP4{}); return true;
    case 22: f(E2m1{}); return true;
    case 23: f(Int8Asymmetric<23, 32>{}); return true;
    case 24: f(Int8Asymmetric<24, 64>{}); return true;
    case 25: f(Int8Asymmetric<25, 128>{}); return true;
    case 26: f(Iq2{}); return true;
    case 27: f(Iq3Xxs{}); return true;
    case 28: f(Iq3S{}); return true;
    default: return false;
  }
}

// Inputs of a block, and of a group of activations, in that coding; 0 if there is none of that number.
HR_INLINE int64_t block_of(int64_t number) {
  int64_t block = 0;
  with_coding(number, [&](auto coding) { block = decltype(coding)::block; });
  return block;
}
HR_INLINE bool is_stored(int64_t number) {
  bool stored = false;
  with_coding(number, [&](auto coding) { stored = decltype(coding)::stored; });
  return stored;
}
HR_INLINE int64_t x_group_of(int64_t number) {
  int64_t group = 0;
  with_coding(number, [&](auto coding) { group = decltype(coding)::x_group; });
  return group;
}

template <class C>
constexpr int64_t header_bytes() { return kPanel * C::scale_size * (C::minimum || C::scaled_parts ? 2 : 1); }
template <class C>
constexpr int64_t scale_bytes() { return C::two_level ? 32 / C::sub * kPanel * (C::minimum ? 2 : 1) : 0; }  // per 32 inputs
template <class C>
constexpr int64_t group_bytes() { return scale_bytes<C>() + C::bits * kPlane; }
template <class C>
constexpr int64_t super_bytes() { return header_bytes<C>() + C::block / 32 * group_bytes<C>(); }

// The levels of table codings plus 128: -127, -104, ... 113, twice the e2m1 numbers (scales are half as large), and the
// magnitudes of GGUF's IQ types, then the same below 0.
alignas(16) constexpr uint8_t kLevels[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t kLevelsE2m1[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
alignas(16) constexpr uint8_t kLevelsIq2[16] = {128, 129, 135, 136, 137, 153, 171, 128, 128, 127, 121, 120, 119, 103, 85, 128};
alignas(16) constexpr uint8_t kLevelsIq3Xxs[16] = {132, 140, 148, 156, 164, 172, 180, 190, 124, 116, 108, 100, 92, 84, 76, 66};
alignas(16) constexpr uint8_t kLevelsIq3S[16] = {129, 131, 133, 135, 137, 139, 141, 143, 127, 125, 123, 121, 119, 117, 115, 113};
template <class C>
constexpr const uint8_t* levels_of() {
  return C::number == MXFP4::number || C::number == E2m1::number ? kLevelsE2m1
         : C::number == Iq2::number                               ? kLevelsIq2
         : C::number == Iq3Xxs::number                            ? kLevelsIq3Xxs
         : C::number == Iq3S::number                              ? kLevelsIq3S
                                                                  : kLevels;
}

template <class C>
HR_INLINE I look_up(I quantized) {
  constexpr const uint8_t* levels = levels_of<C>();
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(levels)));
  return (I)_mm512_shuffle_epi8(table, (__m512i)quantized);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(levels)));
  return (I)_mm256_shuffle_epi8(table, (__m256i)quantized);
#elif defined(__aarch64__)
  return (I)vqtbl1q_u8(vld1q_u8(levels), (uint8x16_t)quantized);
#else
  uint8_t bytes[sizeof(I)];
  __builtin_memcpy(bytes, &quantized, sizeof quantized);
  for (uint8_t& byte : bytes) byte = levels[byte & 15];
  I words;
  __builtin_memcpy(&words, bytes, sizeof words);
  return words;
#endif
}

// kLanes int8 as floats.
HR_INLINE F small_floats(const uint8_t* p) { return load(reinterpret_cast<const int8_t*>(p)); }

// The scales of part h of 32 inputs, for kLanes outputs from `at` on, where those of the block's first part are d.
template <class C>
HR_INLINE F part_scales(F d, const uint8_t* super, const uint8_t* group, int h, int64_t at) {
  if constexpr (C::two_level) return d * small_floats(group + h * kPanel + at);
  if constexpr (C::scaled_parts)
    return h == 0 ? d : load(reinterpret_cast<const typename C::Scale*>(super) + h * kPanel + at);
  return d;
}

// The unsigned values of a group of 32 inputs, of kLanes outputs from `column` on: b[s] holds inputs 4 s .. 4 s + 3.
template <class C>
HR_INLINE void load_quantized(const uint8_t* planes, int64_t column, I (&b)[8]) {
  const uint8_t* w = planes + column * 4;
  constexpr int base = C::bits == 3 ? 2 : C::bits == 5 || C::bits == 6 ? 4 : C::bits;
  if constexpr (base == 8) {
    HR_UNROLL for (int s = 0; s < 8; ++s) b[s] = load_raw<I>(w + s * kPlane);
  } else if constexpr (base == 4) {
    HR_UNROLL for (int r = 0; r < 4; ++r) {
      const I both = load_raw<I>(w + r * kPlane);
      b[2 * r] = both & 0x0f0f0f0f;
      b[2 * r + 1] = (both >> 4) & 0x0f0f0f0f;
    }
  } else {
    HR_UNROLL for (int r = 0; r < 2; ++r) {
      const I four = load_raw<I>(w + r * kPlane);
      HR_UNROLL for (int s = 0; s < 4; ++s) b[4 * r + s] = (four >> (2 * s)) & 0x03030303;
    }
  }
  const uint8_t* high = w + base * kPlane;
  if constexpr (C::bits - base == 1) {
    const I bits = load_raw<I>(high);
    HR_UNROLL for (int s = 0; s < 8; ++s) {
      const I bit = s < base ? bits << (base - s) : bits >> (s - base);
      b[s] |= bit & (0x01010101 << base);
    }
  }
  if constexpr (C::bits - base == 2) {
    HR_UNROLL for (int s = 0; s < 8; ++s) {
      const I pairs = load_raw<I>(high + s / 4 * kPlane);
      const I pair = s % 4 < 2 ? pairs << (4 - s % 4 * 2) : pairs >> (s % 4 * 2 - 4);
      b[s] |= pair & 0x30303030;
    }
  }
  if constexpr (C::table) HR_UNROLL for (int s = 0; s < 8; ++s) b[s] = look_up<C>(b[s]);
}

}  // namespace
