// Quantizes a weight [N,K] into int8 or e4m3 panels (layout.py) by the rules of back/quant/scheme.py, to the bit.

#include "../native/fp8.h"
#include "../native/int8.h"

namespace {

constexpr int64_t kPanel = 64, kStepBytes = kPanel * 4;

struct Weight {
  const void* w;
  uint8_t* panels;
  int64_t N, K, stride, panel_bytes;
};

// The largest magnitude; NaN if one value is not finite.
template <class T>
HR_INLINE float magnitude(const T* w, int64_t K) {
  I most{};
  for (int64_t k = 0; k < K; k += kLanes)
    most = vmax(most, size_bits(k + kLanes <= K ? load(w + k) : load_part(w + k, K - k)));
  const float top = size_of(largest(most));
  return top < __builtin_inff() ? top : __builtin_nanf("");
}

// One output of an int8 panel.
template <class T>
HR_INLINE void row8(const T* w, int64_t K, int64_t column, uint8_t* panel) {
  const float scale = magnitude(w, K) / 127.0f;
  const bool good = scale == scale;
  const float inverse = good && scale != 0 ? 1.0f / scale : 0.0f;
  __builtin_memcpy(panel + column * 4, &scale, 4);
  uint8_t* to = panel + kPanel * 4 + column * 4;
  for (int64_t k = 0; k < K; k += kLanes) {
    F v = k + kLanes <= K ? load(w + k) : load_part(w + k, K - k);
    if (!good) v = F{};
    int8_t quantized[kLanes];
    store_quantized(quantized, clamped(round_int(v * inverse), -127, 127) + 128);
    for (int i = 0; i < kLanes && k + i < K; i += 4) __builtin_memcpy(to + (k + i) / 4 * kStepBytes, quantized + i, 4);
  }
}

// One output of an e4m3 panel. A scale that is not normal has no reciprocal: the row counts as zeros.
template <class T>
HR_INLINE void row_fp8(const T* w, int64_t K, int64_t column, uint8_t* panel) {
  const float scale = magnitude(w, K) / kMostFp8;
  const bool good = scale == scale;
  const float inverse = good && scale >= 0x1p-126f ? 1.0f / scale : 0.0f;
  __builtin_memcpy(panel + column * 4, &scale, 4);
  uint8_t* to = panel + kPanel * 4 + fp8_place(column);
  for (int64_t k = 0; k < K; k += kLanes) {
    F v = k + kLanes <= K ? load(w + k) : load_part(w + k, K - k);
    v = good ? vmax(splat(-kMostFp8), vmin(splat(kMostFp8), v * inverse)) : F{};
    const U quantized = to_fp8(v);
    for (int i = 0; i < kLanes && k + i < K; i += 2) {
      const uint8_t pair[] = {uint8_t(quantized[i]), uint8_t(quantized[i + 1])};
      __builtin_memcpy(to + (k + i) / 4 * kStepBytes + (k + i) % 4 * 4, pair, 2);
    }
  }
}

template <class T, bool FP8>
void panel_of(void* context, int64_t j) {
  const Weight& p = *static_cast<const Weight*>(context);
  uint8_t* panel = p.panels + j * p.panel_bytes;
  // What no input or output fills: code 0, scale 0.
  __builtin_memset(panel, FP8 ? 0 : 0x80, size_t(p.panel_bytes));
  __builtin_memset(panel, 0, kPanel * 4);
  for (int64_t column = 0; column < kPanel && j * kPanel + column < p.N; ++column) {
    const T* w = static_cast<const T*>(p.w) + (j * kPanel + column) * p.stride;
    if constexpr (FP8) row_fp8(w, p.K, column, panel);
    else row8(w, p.K, column, panel);
  }
}

template <bool FP8>
int32_t run(const void* w, uint8_t* panels, int64_t N, int64_t K, int64_t stride, int32_t dtype) {
  if (N < 0 || K < 1) return HR_BAD_SHAPE;
  Weight p{w, panels, N, K, stride, kPanel * 4 + ceil_div(K, int64_t(4)) * kStepBytes};
  const int64_t chunks = ceil_div(N, kPanel);
  if (dtype == HR_BF16) hr_parallel(panel_of<bf16, FP8>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(panel_of<fp16, FP8>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(panel_of<float, FP8>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}

}  // namespace

// w [N, K] with a row stride in elements; panels as layout.py describes them, every byte written.
HR_PUBLIC int32_t HR_EXPORT(quantize)(const void* w, uint8_t* panels, int64_t N, int64_t K, int64_t stride, int32_t dtype) {
  return run<false>(w, panels, N, K, stride, dtype);
}
HR_REPLAYABLE(quantize)
HR_PUBLIC int32_t HR_EXPORT(quantize_fp8)(const void* w, uint8_t* panels, int64_t N, int64_t K, int64_t stride,
                                          int32_t dtype) {
  return run<true>(w, panels, N, K, stride, dtype);
}
HR_REPLAYABLE(quantize_fp8)
