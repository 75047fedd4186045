// Quantizes a weight [N,K] into panels of a coding made online (layout.py) by the rules of back/quant/scheme.py, to the bit.

#include "../native/block_panels.h"

namespace {

struct Weight {
  const void* w;
  uint8_t* panels;
  int64_t N, K, stride;
};

// The first of N values, whole vectors of them, whose size is `top`; where none is (a NaN's), it does not matter what.
template <int64_t N>
HR_INLINE float first_of_size(const float* v, float top) {
#if defined(__AVX512F__)
  for (int64_t k = 0; k < N; k += kLanes)
    if (const unsigned at = _mm512_cmpeq_ps_mask((__m512)size_bits(load(v + k)), _mm512_set1_ps(top)))
      return v[k + __builtin_ctz(at)];
#else
  for (int64_t k = 0; k < N; ++k)
    if (__builtin_fabsf(v[k]) == top) return v[k];
#endif
  return top;
}

// One output of a block: `count` inputs at w, scale and minimum at their places, the results to
// `quantized` with the coding's offset.
template <class C, class T>
HR_INLINE void block_quantized(const T* w, int64_t count, int64_t column, uint8_t* block, uint8_t* quantized) {
  alignas(64) float v[C::block];
  I most{};
  F least{}, greatest{};
  HR_UNROLL for (int64_t k = 0; k < C::block; k += kLanes) {
    const F x = k + kLanes <= count ? load(w + k) : k < count ? load_part(w + k, count - k) : F{};
    store(v + k, x);
    most = vmax(most, size_bits(x));
    if constexpr (C::minimum) least = vmin(least, x), greatest = vmax(greatest, x);
  }
  const float top = size_of(largest(most));
  const bool good = top < __builtin_inff();
  float ideal, low = 0;
  if constexpr (C::minimum) low = -largest(-least), ideal = (largest(greatest) - low) / 15.0f;
  else if constexpr (C::bits == 8) ideal = top / 127.0f;
  else ideal = first_of_size<C::block>(v, top) / -8.0f;
  bf16 stored, less;
  put(&stored, good ? ideal : __builtin_nanf(""));
  put(&less, good ? -low : __builtin_nanf(""));
  __builtin_memcpy(block + column * 2, &stored, 2);
  if (C::minimum) __builtin_memcpy(block + (kPanel + column) * 2, &less, 2);
  const float scale = to_float(stored), inverse = good && scale != 0 ? 1.0f / scale : 0.0f;
  const float shift = C::minimum && good ? to_float(less) : 0.0f;
  constexpr int32_t first = C::minimum ? 0 : C::bits == 8 ? -127 : -8, last = C::minimum ? 15 : C::bits == 8 ? 127 : 7;
  HR_UNROLL for (int64_t k = 0; k < C::block; k += kLanes) {
    F x = load(v + k);
    if constexpr (C::minimum) x += shift;
    const I code = good ? round_int(x * inverse) : I{};
    store_quantized(reinterpret_cast<int8_t*>(quantized) + k, clamped(code, first, last) + C::offset);
  }
  for (int64_t k = count; k < C::block; ++k) quantized[k] = C::offset;  // 0
}

// The 32 quantized values of one output to their places in the planes of a group.
template <class C>
HR_INLINE void put_quantized(const uint8_t* quantized, int64_t column, uint8_t* planes) {
  if (C::bits == 8) {
    for (int64_t s = 0; s < 8; ++s) __builtin_memcpy(planes + s * kPlane + column * 4, quantized + 4 * s, 4);
    return;
  }
  for (int64_t r = 0; r < 4; ++r) {
    uint32_t low, high;
    __builtin_memcpy(&low, quantized + 8 * r, 4);
    __builtin_memcpy(&high, quantized + 8 * r + 4, 4);
    low |= high << 4;
    __builtin_memcpy(planes + r * kPlane + column * 4, &low, 4);
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
      uint8_t quantized[C::block];
      block_quantized<C>(w + i * C::block, smaller<int64_t>(C::block, p.K - i * C::block), column, block, quantized);
      for (int64_t g = 0; g < C::block / 32; ++g)
        put_quantized<C>(quantized + g * 32, column, block + header_bytes<C>() + g * group_bytes<C>());
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
