// x[T,E] = code * scale of rows ids[T] of a packed table (linear_quant/layout.py). A row lies in 4-byte words 256 bytes
// apart: a few hundred cache lines per token, some microseconds beside the milliseconds of its step.

#include "../native/fp8.h"

namespace {

constexpr int64_t kPanel = 64, kStepBytes = kPanel * 4;

struct Lookup {
  const int64_t* ids;
  const uint8_t* table;
  void* x;
  int64_t T, V, E, group, panel_bytes;  // group: of e4m3 values, how many share a scale
};

template <class Y>
HR_INLINE void dequantize(const uint8_t* panel, int64_t column, Y* x, int64_t E) {
  float scale;
  __builtin_memcpy(&scale, panel + column * 4, 4);
  const uint8_t* w = panel + kPanel * 4 + column * 4;
  for (int64_t k = 0; k < E; ++k) put(x + k, float(int32_t(w[k / 4 * kStepBytes + k % 4]) - 128) * scale);
}

template <class Y>
HR_INLINE void dequantize_fp8(const uint8_t* panel, int64_t column, Y* x, int64_t E, int64_t group) {
  for (; E > 0; E -= group, x += group, panel += kPanel * 4 + group / 4 * kStepBytes) {
    float scale;
    __builtin_memcpy(&scale, panel + column * 4, 4);
    const uint8_t* w = panel + kPanel * 4 + fp8_place(column);
    for (int64_t k = 0; k < smaller(E, group); ++k)
      put(x + k, to_float(fp8{w[k / 4 * kStepBytes + k % 4 / 2 * 8 + k % 2]}) * scale);
  }
}

template <class Y, bool FP8>
void rows(void* context, int64_t t) {
  const Lookup& p = *static_cast<const Lookup*>(context);
  const uint8_t* panel = p.table + p.ids[t] / kPanel * p.panel_bytes;
  Y* x = static_cast<Y*>(p.x) + t * p.E;
  if (FP8) dequantize_fp8(panel, p.ids[t] % kPanel, x, p.E, p.group);
  else dequantize(panel, p.ids[t] % kPanel, x, p.E);
}

template <class Y, bool FP8>
int32_t run_rows(Lookup& p) {
  for (int64_t t = 0; t < p.T; ++t)
    if (p.ids[t] < 0 || p.ids[t] >= p.V) return HR_BAD_INDEX;
  p.panel_bytes = ceil_div(p.E, p.group) * kPanel * 4 + ceil_div(p.E, int64_t(4)) * kStepBytes;
  hr_parallel(rows<Y, FP8>, &p, p.T);
  return HR_OK;
}

template <bool FP8>
int32_t run(Lookup p, int32_t dtype) {
  if (p.T < 0 || p.V < 0 || p.E <= 0 || p.group < 0 || p.group % 4) return HR_BAD_SHAPE;
  if (p.group == 0 || p.group > p.E) p.group = p.E;
  if (dtype == HR_BF16) return run_rows<bf16, FP8>(p);
  if (dtype == HR_F16) return run_rows<fp16, FP8>(p);
  if (dtype == HR_F32) return run_rows<float, FP8>(p);
  return HR_BAD_DTYPE;
}

}  // namespace

// x is contiguous. `group` values share a scale, 0: all. An id outside [0, V) refuses the call before anything is read or written.
HR_PUBLIC int32_t HR_EXPORT(embedding_quant)(const int64_t* ids, const void* table, void* x, int64_t T, int64_t V,
                                             int64_t E, int32_t dtype) {
  return run<false>({ids, static_cast<const uint8_t*>(table), x, T, V, E, 0, 0}, dtype);
}
HR_REPLAYABLE(embedding_quant)
HR_PUBLIC int32_t HR_EXPORT(embedding_fp8)(const int64_t* ids, const void* table, void* x, int64_t T, int64_t V, int64_t E,
                                           int64_t group, int32_t dtype) {
  return run<true>({ids, static_cast<const uint8_t*>(table), x, T, V, E, group, 0}, dtype);
}
HR_REPLAYABLE(embedding_fp8)
