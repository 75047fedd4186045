// y = act(x), element by element.

#include "../native/activation.h"

namespace {

constexpr int64_t kChunkElements = 8 * 1024;

struct Elements {
  const void* x;
  void* y;
  int64_t count;
};

// Activations of this op alone.
enum Further : int32_t { TANH = 5, SIGMOID = 6 };

template <int A>
HR_INLINE F activated(F x) {
  if (A == TANH) return vtanh(x);
  if (A == SIGMOID) return vsigmoid(x);
  return activate<A>(x);
}

template <class T, int A>
void chunk(void* context, int64_t i) {
  const Elements& p = *static_cast<const Elements*>(context);
  const int64_t end = smaller((i + 1) * kChunkElements, p.count);
  const T* x = static_cast<const T*>(p.x);
  T* y = static_cast<T*>(p.y);
  int64_t e = i * kChunkElements;
  for (; e + kLanes <= end; e += kLanes) store(y + e, activated<A>(load(x + e)));
  if (e < end) store_part(y + e, activated<A>(load_part(x + e, end - e)), end - e);
}

template <class T>
int32_t run(Elements& p, int32_t activation) {
  const int64_t chunks = ceil_div(p.count, kChunkElements);
  if (activation == SILU) hr_parallel(chunk<T, SILU>, &p, chunks);
  else if (activation == GELU) hr_parallel(chunk<T, GELU>, &p, chunks);
  else if (activation == GELU_TANH) hr_parallel(chunk<T, GELU_TANH>, &p, chunks);
  else if (activation == RELU) hr_parallel(chunk<T, RELU>, &p, chunks);
  else if (activation == RELU2) hr_parallel(chunk<T, RELU2>, &p, chunks);
  else if (activation == TANH) hr_parallel(chunk<T, TANH>, &p, chunks);
  else if (activation == SIGMOID) hr_parallel(chunk<T, SIGMOID>, &p, chunks);
  else return HR_BAD_SHAPE;
  return HR_OK;
}

}  // namespace

// x and y [count] contiguous.
HR_PUBLIC int32_t HR_EXPORT(activation)(const void* x, void* y, int64_t count, int32_t activation, int32_t dtype) {
  if (count < 0) return HR_BAD_SHAPE;
  Elements p{x, y, count};
  if (dtype == HR_BF16) return run<bf16>(p, activation);
  if (dtype == HR_F16) return run<fp16>(p, activation);
  if (dtype == HR_F32) return run<float>(p, activation);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(activation)
