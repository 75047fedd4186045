// y = act(gate) * up over rows that hold the gate's columns, then the up projection's.

#include "../native/activation.h"

namespace {

constexpr int64_t kChunkElements = 8 * 1024;

struct Gated {
  const void* x;
  void* y;
  int64_t width, x_stride, columns;  // columns of one chunk
};

template <class T, int A>
void chunk(void* context, int64_t i) {
  const Gated& p = *static_cast<const Gated*>(context);
  const int64_t per_row = ceil_div(p.width, p.columns), row = i / per_row, first = i % per_row * p.columns;
  const int64_t end = smaller(first + p.columns, p.width);
  const T *gate = static_cast<const T*>(p.x) + row * p.x_stride, *up = gate + p.width;
  T* y = static_cast<T*>(p.y) + row * p.width;
  int64_t e = first;
  for (; e + kLanes <= end; e += kLanes) store(y + e, activate<A>(load(gate + e)) * load(up + e));
  if (e < end)
    store_part(y + e, activate<A>(load_part(gate + e, end - e)) * load_part(up + e, end - e), end - e);
}

template <class T>
int32_t run(Gated& p, int64_t rows, int32_t activation) {
  const int64_t chunks = rows * ceil_div(p.width, p.columns);
  if (activation == SILU) hr_parallel(chunk<T, SILU>, &p, chunks);
  else if (activation == GELU) hr_parallel(chunk<T, GELU>, &p, chunks);
  else if (activation == GELU_TANH) hr_parallel(chunk<T, GELU_TANH>, &p, chunks);
  else if (activation == RELU) hr_parallel(chunk<T, RELU>, &p, chunks);
  else if (activation == RELU2) hr_parallel(chunk<T, RELU2>, &p, chunks);
  else return HR_BAD_SHAPE;
  return HR_OK;
}

}  // namespace

// x [rows, 2 * width] with row stride in elements, y [rows, width] contiguous.
HR_PUBLIC int32_t HR_EXPORT(gated_act)(const void* x, void* y, int64_t rows, int64_t width, int64_t x_stride,
                                       int32_t activation, int32_t dtype) {
  if (rows < 0 || width < 1) return HR_BAD_SHAPE;
  Gated p{x, y, width, x_stride, smaller(width, kChunkElements)};
  if (dtype == HR_BF16) return run<bf16>(p, rows, activation);
  if (dtype == HR_F16) return run<fp16>(p, rows, activation);
  if (dtype == HR_F32) return run<float>(p, rows, activation);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(gated_act)
