// RWKV 4's weighted average over the tokens of each row: sums of weighted values and of weights, both divided by exp(m), and m.

#include "../native/activation.h"
#include "../native/recurrent.h"

namespace {

constexpr int64_t kChannels = 4 * kLanes;  // of one task
constexpr float kNever = -1e30f;           // the exponent of no weight at all

struct Average {
  const void *k, *v;
  const float *decay, *first;
  void* y;
  float* state;
  StepRows rows;
  int64_t channels, k_stride, v_stride, state_stride;
};

struct Sums {
  F top, below, most;
};

// Both with one value more, whose weight is exp(k).
HR_INLINE Sums with(const Sums& s, F k, F v) {
  const F most = vmax(s.most, k), kept = vexp(s.most - most), taken = vexp(k - most);
  return {s.top * kept + v * taken, s.below * kept + taken, most};
}

template <class T>
void chunk(void* context, int64_t i) {
  const Average& p = *static_cast<const Average*>(context);
  const int64_t parts = ceil_div(p.channels, kChannels), begin = i % parts * kChannels;
  const int64_t end = smaller(begin + kChannels, p.channels);
  const RowTokens row = row_tokens(p.rows, i / parts);
  if (row.first == row.last) return;
  for (int64_t c = begin; c < end; c += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), end - c);
    const float* state = p.state + row.state * p.state_stride + c;
    const F decay = load_part(p.decay + c, count), first = load_part(p.first + c, count);
    Sums s{load_part(state, count), load_part(state + p.channels, count), load_part(state + 2 * p.channels, count)};
    s.most = select(s.below == 0.0f, splat(kNever), s.most);
    for (int64_t t = row.first; t < row.last; ++t) {
      const F k = load_part(static_cast<const T*>(p.k) + t * p.k_stride + c, count);
      const F v = load_part(static_cast<const T*>(p.v) + t * p.v_stride + c, count);
      const Sums now = with(s, k + first, v);
      store_part(static_cast<T*>(p.y) + t * p.channels + c, now.top / now.below, count);
      s = with({s.top, s.below, s.most - decay}, k, v);
      if (!is_kept(row, t)) continue;
      float* kept = p.state + behind(row, t) * p.state_stride + c;
      store_part(kept, s.top, count);
      store_part(kept + p.channels, s.below, count);
      store_part(kept + 2 * p.channels, s.most, count);
    }
  }
}

}  // namespace

// k, v [tokens, channels] with a row stride in elements; y [tokens, channels] contiguous; decay, first float32 [channels]; state
// float32 [.., 3, channels], row r at r * state_stride.
HR_PUBLIC int32_t HR_EXPORT(wkv)(const void* k, const void* v, const float* decay, const float* first, void* y, float* state,
                                 const void* row, const int32_t* start, int64_t rows, int64_t states, int64_t depth,
                                 int64_t channels, int64_t k_stride, int64_t v_stride, int64_t state_stride, int32_t wide,
                                 int32_t dtype) {
  if (rows < 0 || channels < 1) return HR_BAD_SHAPE;
  Average p{k, v, decay, first, y, state, {row, start, rows, states, depth, wide}, channels, k_stride, v_stride, state_stride};
  const int64_t chunks = rows * ceil_div(channels, kChannels);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(wkv)
