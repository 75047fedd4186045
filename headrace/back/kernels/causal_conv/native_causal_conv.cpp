// A short causal convolution of each channel over the tokens of each row; the inputs before its first token lie in the row's
// state, which becomes the last ones.

#include "../native/activation.h"
#include "../native/recurrent.h"

namespace {

constexpr int64_t kChannels = 16 * kLanes;  // of one task
constexpr int kMaxTaps = 8;

struct Conv {
  const void* x;
  const float *weight, *bias;
  void *y, *state;
  StepRows rows;
  int64_t channels, taps, x_stride, state_stride;
  int32_t silu;
};

template <class T>
HR_INLINE void channels(const Conv& p, const RowTokens& row, int64_t c, int64_t count) {
  const int64_t before = p.taps - 1;
  F past[kMaxTaps]{}, weight[kMaxTaps]{};
  T* state = static_cast<T*>(p.state) + row.state * p.state_stride + c;
  for (int64_t j = 0; j < before; ++j) past[j] = load_part(state + j * p.channels, count);
  for (int64_t j = 0; j < p.taps; ++j) weight[j] = load_part(p.weight + j * p.channels + c, count);
  const F bias = p.bias == nullptr ? F{} : load_part(p.bias + c, count);
  for (int64_t t = row.first; t < row.last; ++t) {
    past[before] = load_part(static_cast<const T*>(p.x) + t * p.x_stride + c, count);
    F y = bias;
    for (int64_t j = 0; j < p.taps; ++j) y = fma(past[j], weight[j], y);
    store_part(static_cast<T*>(p.y) + t * p.channels + c, p.silu ? activate<SILU>(y) : y, count);
    for (int64_t j = 0; j < before; ++j) past[j] = past[j + 1];
    if (!is_kept(row, t)) continue;
    T* kept = state + (behind(row, t) - row.state) * p.state_stride;
    for (int64_t j = 0; j < before; ++j) store_part(kept + j * p.channels, past[j], count);
  }
}

template <class T>
void chunk(void* context, int64_t i) {
  const Conv& p = *static_cast<const Conv*>(context);
  const int64_t parts = ceil_div(p.channels, kChannels), begin = i % parts * kChannels;
  const int64_t end = smaller(begin + kChannels, p.channels);
  const RowTokens row = row_tokens(p.rows, i / parts);
  if (row.first == row.last) return;
  for (int64_t c = begin; c < end; c += kLanes) channels<T>(p, row, c, smaller(int64_t(kLanes), end - c));
}

}  // namespace

// x [tokens, channels] with a row stride, y contiguous; weight float32 [taps, channels], bias float32 [channels] or null;
// state [.., taps - 1, channels], row r at r * state_stride elements.
HR_PUBLIC int32_t HR_EXPORT(causal_conv)(const void* x, const float* weight, const float* bias, void* y, void* state,
                                         const void* row, const int32_t* start, int64_t rows, int64_t states, int64_t depth,
                                         int64_t channels, int64_t taps, int64_t x_stride, int64_t state_stride,
                                         int32_t silu, int32_t wide, int32_t dtype) {
  if (rows < 0 || channels < 1 || taps < 2 || taps > kMaxTaps) return HR_BAD_SHAPE;
  Conv p{x, weight, bias, y, state, {row, start, rows, states, depth, wide}, channels, taps, x_stride, state_stride, silu};
  const int64_t chunks = rows * ceil_div(channels, kChannels);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(causal_conv)
