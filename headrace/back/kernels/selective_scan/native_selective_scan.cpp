// Mamba's selective scan over the tokens of each row. A task has some channels, whose states stay in the first-level cache
// over all tokens of the row.

#include "../native/activation.h"
#include "../native/recurrent.h"

namespace {

constexpr int64_t kChannels = 32;  // of one task
constexpr int kSide = 4;           // of them side by side: b and c are loaded once for all, sums are chains of their own

struct Scan {
  const void *x, *dt, *b, *c, *gate;
  const float *decay, *bias, *skip;
  void* y;
  float* state;
  StepRows rows;
  int64_t channels, state_dim;
  int64_t x_stride, dt_stride, b_stride, c_stride, gate_stride, state_stride;
};

template <class T>
HR_INLINE F load_some(const T* p, int64_t count) { return count >= kLanes ? load(p) : load_part(p, count); }
HR_INLINE void store_some(float* p, F v, int64_t count) {
  if (count >= kLanes) store(p, v);
  else store_part(p, v, count);
}

// One token's step of channels i .. i + R.
template <class T, int R>
HR_INLINE void step(const Scan& p, int64_t t, int64_t i, float* state) {
  const T* x = static_cast<const T*>(p.x) + t * p.x_stride + i;
  const T* raw = static_cast<const T*>(p.dt) + t * p.dt_stride + i;
  const T* gate = static_cast<const T*>(p.gate) + t * p.gate_stride + i;
  const T* b = static_cast<const T*>(p.b) + t * p.b_stride;
  const T* c = static_cast<const T*>(p.c) + t * p.c_stride;
  F total[R]{};
  float in[R], dt[R];
  HR_UNROLL for (int r = 0; r < R; ++r) {
    dt[r] = softplus(to_float(raw[r]) + p.bias[i + r]);
    in[r] = to_float(x[r]) * dt[r];
  }
  for (int64_t n = 0; n < p.state_dim; n += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), p.state_dim - n);
    const F b_n = load_some(b + n, count), c_n = load_some(c + n, count);
    HR_UNROLL for (int r = 0; r < R; ++r) {
      float* at = state + (i + r) * p.state_dim + n;
      const F keep = vexp(load_some(p.decay + (i + r) * p.state_dim + n, count) * dt[r]);
      const F now = fma(b_n, in[r], load_some(at, count) * keep);
      store_some(at, now, count);
      total[r] = fma(now, c_n, total[r]);
    }
  }
  T* y = static_cast<T*>(p.y) + t * p.channels + i;
  HR_UNROLL for (int r = 0; r < R; ++r) {
    const float open = to_float(gate[r]);
    put(y + r, (sum(total[r]) + p.skip[i + r] * to_float(x[r])) * open * sigmoid(open));
  }
}

template <class T>
void chunk(void* context, int64_t i) {
  const Scan& p = *static_cast<const Scan*>(context);
  const int64_t parts = ceil_div(p.channels, kChannels), first = i % parts * kChannels;
  const int64_t last = smaller(first + kChannels, p.channels);
  const RowTokens row = row_tokens(p.rows, i / parts);
  if (row.first == row.last) return;
  float* state = p.state + row.state * p.state_stride;
  for (int64_t t = row.first; t < row.last; ++t) {
    if (row.trail >= 0) state = next_state(state, row, t, p.state_stride, first * p.state_dim, last * p.state_dim);
    int64_t e = first;
    for (; e + kSide <= last; e += kSide) step<T, kSide>(p, t, e, state);
    for (; e < last; ++e) step<T, 1>(p, t, e, state);
  }
}

}  // namespace

// x, dt, gate [tokens, channels], b, c [tokens, state_dim], each with a row stride in elements; y [tokens, channels]
// contiguous; decay float32 [channels, state_dim], bias, skip float32 [channels]; state float32 [.., channels, state_dim], row r
// at r * state_stride.
HR_PUBLIC int32_t HR_EXPORT(selective_scan)(const void* x, const void* dt, const void* b, const void* c, const void* gate,
                                            const float* decay, const float* bias, const float* skip, void* y, float* state,
                                            const void* row, const int32_t* start, int64_t rows, int64_t states, int64_t depth,
                                            int64_t channels, int64_t state_dim, int64_t x_stride, int64_t dt_stride,
                                            int64_t b_stride, int64_t c_stride, int64_t gate_stride, int64_t state_stride,
                                            int32_t wide, int32_t dtype) {
  if (rows < 0 || channels < 1 || state_dim < 1) return HR_BAD_SHAPE;
  Scan p{x, dt, b, c, gate, decay, bias, skip, y, state, {row, start, rows, states, depth, wide}, channels, state_dim,
         x_stride, dt_stride, b_stride, c_stride, gate_stride, state_stride};
  const int64_t chunks = rows * ceil_div(channels, kChannels);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(selective_scan)
