// x[T,E] = code * scale of rows ids[T] of a packed table (linear_quant/layout.py). A row lies in 4-byte pieces 256 bytes
// apart: a few hundred cache lines per token, some microseconds beside the milliseconds of its step.

#include "../native/simd.h"

namespace {

constexpr int64_t kPanel = 64, kGroup = 32;
constexpr int64_t kStepBytes = kPanel * 4, kGroupBytes = kPanel * 2 + kGroup / 8 * kStepBytes;

struct Lookup {
  const int64_t* ids;
  const uint8_t* table;
  void* x;
  int64_t T, V, E, panel_bytes;
};

template <class Y>
HR_INLINE void row8(const uint8_t* panel, int64_t column, Y* x, int64_t E) {
  float scale;
  __builtin_memcpy(&scale, panel + column * 4, 4);
  const uint8_t* w = panel + kPanel * 4 + column * 4;
  for (int64_t k = 0; k < E; ++k) put(x + k, float(int32_t(w[k / 4 * kStepBytes + k % 4]) - 128) * scale);
}

template <class Y>
HR_INLINE void row4(const uint8_t* panel, int64_t column, Y* x, int64_t E) {
  for (int64_t k = 0; k < E; ++k) {
    const uint8_t* group = panel + k / kGroup * kGroupBytes;
    const int64_t at = k % kGroup;
    bf16 scale;
    __builtin_memcpy(&scale, group + column * 2, 2);
    const uint8_t both = group[kPanel * 2 + at / 8 * kStepBytes + column * 4 + at % 4];
    put(x + k, float(int32_t(at % 8 < 4 ? both & 15 : both >> 4) - 8) * to_float(scale));
  }
}

template <class Y, int BITS>
void rows(void* context, int64_t t) {
  const Lookup& p = *static_cast<const Lookup*>(context);
  const uint8_t* panel = p.table + p.ids[t] / kPanel * p.panel_bytes;
  Y* x = static_cast<Y*>(p.x) + t * p.E;
  if (BITS == 8) row8(panel, p.ids[t] % kPanel, x, p.E);
  else row4(panel, p.ids[t] % kPanel, x, p.E);
}

template <class Y, int BITS>
int32_t run(Lookup& p) {
  for (int64_t t = 0; t < p.T; ++t)
    if (p.ids[t] < 0 || p.ids[t] >= p.V) return HR_BAD_INDEX;
  p.panel_bytes = BITS == 8 ? kPanel * 4 + ceil_div(p.E, int64_t(4)) * kStepBytes : ceil_div(p.E, kGroup) * kGroupBytes;
  hr_parallel(rows<Y, BITS>, &p, p.T);
  return HR_OK;
}

}  // namespace

// x is contiguous. An id outside [0, V) refuses the call before anything is read or written.
HR_PUBLIC int32_t HR_EXPORT(embedding_quant)(const int64_t* ids, const void* table, void* x, int64_t T, int64_t V,
                                             int64_t E, int32_t dtype, int32_t bits) {
  if (T < 0 || V < 0 || E <= 0) return HR_BAD_SHAPE;
  Lookup p{ids, static_cast<const uint8_t*>(table), x, T, V, E, 0};
  if (dtype == HR_BF16 && bits == 8) return run<bf16, 8>(p);
  if (dtype == HR_BF16 && bits == 4) return run<bf16, 4>(p);
  if (dtype == HR_F16 && bits == 8) return run<fp16, 8>(p);
  if (dtype == HR_F16 && bits == 4) return run<fp16, 4>(p);
  if (dtype == HR_F32 && bits == 8) return run<float, 8>(p);
  if (dtype == HR_F32 && bits == 4) return run<float, 4>(p);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(embedding_quant)
