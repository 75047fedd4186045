// Quantizes a weight [N,K] into panels (layout.py) by the rules of back/quant/scheme.py, to the bit.

#include "../native/simd.h"

namespace {

constexpr int64_t kPanel = 64, kGroup = 32;
constexpr int64_t kStepBytes = kPanel * 4, kGroupBytes = kPanel * 2 + kGroup / 8 * kStepBytes;

struct Weight {
  const void* w;
  uint8_t* panels;
  int64_t N, K, stride, panel_bytes;
};

HR_INLINE int32_t nearest(float x) { return int32_t(__builtin_rintf(x)); }

// One output of an int8 panel.
template <class T>
HR_INLINE void row8(const T* w, int64_t K, int64_t column, uint8_t* panel) {
  F most{};
  bool good = true;
  for (int64_t k = 0; k < K; k += kLanes) {
    const F v = k + kLanes <= K ? load(w + k) : load_part(w + k, K - k);
    const F size = (F)((U)v & 0x7fffffffu);
    most = vmax(size, most);
    const I odd = !(size < __builtin_inff());
    for (int i = 0; i < kLanes; ++i) good = good && !odd[i];
  }
  const float scale = good ? largest(most) / 127.0f : __builtin_nanf("");
  const float inverse = good && scale != 0 ? 1.0f / scale : 0.0f;
  __builtin_memcpy(panel + column * 4, &scale, 4);
  uint8_t* to = panel + kPanel * 4 + column * 4;
  for (int64_t k = 0; k < K; k += kLanes) {
    F v = k + kLanes <= K ? load(w + k) : load_part(w + k, K - k);
    if (!good) v = F{};
    const F scaled = v * inverse;
    uint8_t codes[kLanes];
    for (int i = 0; i < kLanes; ++i)
      codes[i] = uint8_t(larger(smaller(nearest(scaled[i]), 127), -127) + 128);
    for (int i = 0; i < kLanes && k + i < K; i += 4) __builtin_memcpy(to + (k + i) / 4 * kStepBytes, codes + i, 4);
  }
}

// One output and group of an int4 panel: `codes` of 32 inputs, the scale at its place.
template <class T>
HR_INLINE void group4(const T* w, int64_t count, int64_t column, uint8_t* group) {
  float v[kGroup] = {}, most = 0;
  bool good = true;
  for (int64_t k = 0; k < count; ++k) v[k] = to_float(w[k]);
  float at = 0;
  for (int64_t k = 0; k < kGroup; ++k) {
    const float size = __builtin_fabsf(v[k]);
    good = good && size < __builtin_inff();
    if (size > most) most = size, at = v[k];
  }
  bf16 stored;
  put(&stored, good ? at / -8.0f : __builtin_nanf(""));
  const float scale = to_float(stored), inverse = good && scale != 0 ? 1.0f / scale : 0.0f;
  __builtin_memcpy(group + column * 2, &stored, 2);
  uint8_t codes[kGroup];
  for (int64_t k = 0; k < kGroup; ++k) {
    const float x = (good ? v[k] : 0.0f) * inverse;
    codes[k] = uint8_t(larger(smaller(nearest(x), 7), -8) + 8);
  }
  for (int64_t r = 0; r < kGroup / 8; ++r) {
    uint8_t both[4];
    for (int b = 0; b < 4; ++b) both[b] = uint8_t(codes[8 * r + b] | codes[8 * r + 4 + b] << 4);
    __builtin_memcpy(group + kPanel * 2 + r * kStepBytes + column * 4, both, 4);
  }
}

template <class T, int BITS>
void panel_of(void* context, int64_t j) {
  const Weight& p = *static_cast<const Weight*>(context);
  uint8_t* panel = p.panels + j * p.panel_bytes;
  // What no input or output fills: code 0, scale 0.
  __builtin_memset(panel, BITS == 8 ? 0x80 : 0x88, size_t(p.panel_bytes));
  if (BITS == 8) __builtin_memset(panel, 0, kPanel * 4);
  else
    for (int64_t g = 0; g < ceil_div(p.K, kGroup); ++g) __builtin_memset(panel + g * kGroupBytes, 0, kPanel * 2);
  for (int64_t column = 0; column < kPanel && j * kPanel + column < p.N; ++column) {
    const T* w = static_cast<const T*>(p.w) + (j * kPanel + column) * p.stride;
    if (BITS == 8) row8(w, p.K, column, panel);
    else
      for (int64_t g = 0; g < ceil_div(p.K, kGroup); ++g)
        group4(w + g * kGroup, smaller(kGroup, p.K - g * kGroup), column, panel + g * kGroupBytes);
  }
}

}  // namespace

// w [N, K] with a row stride in elements; panels as layout.py describes them, every byte written.
HR_PUBLIC int32_t HR_EXPORT(quantize)(const void* w, uint8_t* panels, int64_t N, int64_t K, int64_t stride, int32_t dtype,
                                      int32_t bits) {
  if (N < 0 || K < 1 || (bits != 8 && bits != 4)) return HR_BAD_SHAPE;
  Weight p{w, panels, N, K, stride,
           bits == 8 ? kPanel * 4 + ceil_div(K, int64_t(4)) * kStepBytes : ceil_div(K, kGroup) * kGroupBytes};
  const int64_t chunks = ceil_div(N, kPanel);
  if (dtype == HR_BF16) hr_parallel(bits == 8 ? panel_of<bf16, 8> : panel_of<bf16, 4>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(bits == 8 ? panel_of<fp16, 8> : panel_of<fp16, 4>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(bits == 8 ? panel_of<float, 8> : panel_of<float, 4>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(quantize)
