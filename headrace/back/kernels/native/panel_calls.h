// How calls of a product with panels of weights come in: what is sound, and a function for the types of x and y. `Run::of<T,
// Y>(p)` multiplies rows of T to results of Y; P: the call as data.
#pragma once

#include "panel_results.h"
#include "top.h"

namespace {

// With an activation panels are full and there is no bias.
inline bool sound(int64_t M, int64_t N, int64_t K, int32_t activation, const void* bias) {
  if (M < 0 || N < 0 || K <= 0) return false;
  return activation <= RELU2 && (activation < 0 || (N % (2 * kPanel) == 0 && bias == nullptr));
}

// y has the type of x and the bias, or is float32 without a bias.
template <class Run, class P>
int32_t run_typed(P& p, int32_t dtype, int32_t y_dtype) {
  if (dtype == HR_BF16 && y_dtype == HR_BF16) return Run::template of<bf16, bf16>(p);
  if (dtype == HR_BF16 && y_dtype == HR_F32 && p.bias == nullptr) return Run::template of<bf16, float>(p);
  if (dtype == HR_F16 && y_dtype == HR_F16) return Run::template of<fp16, fp16>(p);
  if (dtype == HR_F16 && y_dtype == HR_F32 && p.bias == nullptr) return Run::template of<fp16, float>(p);
  if (dtype == HR_F32 && y_dtype == HR_F32) return Run::template of<float, float>(p);
  return HR_BAD_DTYPE;
}

// The `count` best of the float32 results of the call, which has no bias: outputs and values [M, count], best first.
template <class Run, class P>
int32_t run_top(const P& call, int64_t* ids, float* values, int64_t count, int32_t dtype) {
  if (count < 1 || count > call.N) return HR_BAD_SHAPE;
  const int64_t bytes = dtype == HR_F32 ? 4 : 2;
  for (int64_t m = 0; m < call.M; m += kTopRows) {
    Top top{count, smaller(call.M - m, kTopRows), ceil_div(call.N, kTopOutputs), nullptr, nullptr};
    if (!top_begin(top)) return HR_NO_MEMORY;
    P p = call;
    p.source = static_cast<const char*>(call.source) + m * call.source_stride * bytes, p.M = top.rows, p.top = &top;
    const int32_t status = run_typed<Run>(p, dtype, HR_F32);
    if (status != HR_OK) return status;
    top_merge(top, ids + m * count, values + m * count);
  }
  return HR_OK;
}

}  // namespace
