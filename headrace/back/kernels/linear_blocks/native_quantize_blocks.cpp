// Quantizes a weight [N,K] into panels of a coding made online (layout.py) by the rules of back/quant/scheme.py, to the bit.

#include "../native/block_panels.h"

namespace {

struct Weight {
  const void* w;
  uint8_t* panels;
  int64_t N, K, stride;
};

HR_INLINE int32_t code_of(float scaled, int32_t low, int32_t high) {
  return larger(smaller(int32_t(__builtin_rintf(scaled)), high), low);
}

// One output of a block: `count` inputs at w, scale and minimum at their places, codes to `codes` with the coding's offset.
template <class C, class T>
HR_INLINE void block_codes(const T* w, int64_t count, int64_t column, uint8_t* block, uint8_t* codes) {
  float v[C::block] = {}, most = 0, at = 0, low = 0, high = 0;
  bool good = true;
  for (int64_t k = 0; k < count; ++k) {
    v[k] = to_float(w[k]);
    const float size = __builtin_fabsf(v[k]);
    good = good && size < __builtin_inff();
    if (size > most) most = size, at = v[k];
    low = smaller(low, v[k]), high = larger(high, v[k]);
  }
  const float ideal = C::minimum ? (high - low) / 15.0f : C::bits == 8 ? most / 127.0f : at / -8.0f;
  bf16 stored, less;
  put(&stored, good ? ideal : __builtin_nanf(""));
  put(&less, good ? -low : __builtin_nanf(""));
  __builtin_memcpy(block + column * 2, &stored, 2);
  if (C::minimum) __builtin_memcpy(block + (kPanel + column) * 2, &less, 2);
  const float scale = to_float(stored), inverse = good && scale != 0 ? 1.0f / scale : 0.0f;
  const float shift = C::minimum && good ? to_float(less) : 0.0f;
  constexpr int32_t bottom = C::minimum ? 0 : C::bits == 8 ? -127 : -8, top = C::minimum ? 15 : C::bits == 8 ? 127 : 7;
  for (int64_t k = 0; k < C::block; ++k) {
    const float x = good && k < count ? (C::minimum ? v[k] + shift : v[k]) * inverse : 0.0f;
    codes[k] = uint8_t(code_of(x, bottom, top) + C::offset);
  }
}

// The 32 codes of one output to their places in the planes of a group.
template <class C>
HR_INLINE void put_codes(const uint8_t* codes, int64_t column, uint8_t* planes) {
  if (C::bits == 8) {
    for (int64_t s = 0; s < 8; ++s) __builtin_memcpy(planes + s * kPlane + column * 4, codes + 4 * s, 4);
    return;
  }
  for (int64_t r = 0; r < 4; ++r) {
    uint8_t both[4];
    for (int b = 0; b < 4; ++b) both[b] = uint8_t(codes[8 * r + b] | codes[8 * r + 4 + b] << 4);
    __builtin_memcpy(planes + r * kPlane + column * 4, both, 4);
  }
}

template <class C, class T>
void panel_of(void* context, int64_t j) {
  const Weight& p = *static_cast<const Weight*>(context);
  const int64_t blocks = ceil_div(p.K, int64_t(C::block));
  uint8_t* panel = p.panels + j * blocks * super_bytes<C>();
  // Outputs that do not exist: scale 0 and any code.
  __builtin_memset(panel, 0, size_t(blocks * super_bytes<C>()));
  for (int64_t column = 0; column < kPanel && j * kPanel + column < p.N; ++column) {
    const T* w = static_cast<const T*>(p.w) + (j * kPanel + column) * p.stride;
    for (int64_t i = 0; i < blocks; ++i) {
      uint8_t* block = panel + i * super_bytes<C>();
      uint8_t codes[C::block];
      block_codes<C>(w + i * C::block, smaller<int64_t>(C::block, p.K - i * C::block), column, block, codes);
      for (int64_t g = 0; g < C::block / 32; ++g)
        put_codes<C>(codes + g * 32, column, block + header_bytes<C>() + g * group_bytes<C>());
    }
  }
}

}  // namespace

// w [N, K] with a row stride in elements; panels as layout.py describes them, every byte written.
HR_PUBLIC int32_t HR_EXPORT(quantize_blocks)(const void* w, uint8_t* panels, int64_t N, int64_t K, int64_t stride,
                                             int64_t coding, int32_t dtype) {
  if (N < 0 || K < 1) return HR_BAD_SHAPE;
  if (is_stored(coding) || dtype < HR_F32 || dtype > HR_F16) return HR_BAD_DTYPE;
  Weight p{w, panels, N, K, stride};
  const bool known = with_coding(coding, [&](auto chosen) {
    using C = decltype(chosen);
    if constexpr (!C::stored)
      hr_parallel(dtype == HR_BF16 ? panel_of<C, bf16> : dtype == HR_F16 ? panel_of<C, fp16> : panel_of<C, float>, &p,
                  ceil_div(N, kPanel));
  });
  return known ? HR_OK : HR_BAD_DTYPE;
}
HR_REPLAYABLE(quantize_blocks)
