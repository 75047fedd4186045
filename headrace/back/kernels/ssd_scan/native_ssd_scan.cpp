// Mamba 2's recurrence over the tokens of each row. A task has some channels of one head, whose state stays in the first-level
// cache over all tokens of the row.

#include "../native/recurrent.h"

namespace {

constexpr int64_t kChannels = 16;  // of one task
constexpr int kSide = 4;           // of them side by side: b and c are loaded once for all, sums are chains of their own

struct Ssd {
  const void *x, *dt, *b, *c;
  const float *decay, *bias, *skip;
  void* y;
  float* state;
  StepRows rows;
  int64_t heads, groups, head_dim, state_dim;
  int64_t x_stride, dt_stride, b_stride, c_stride, state_stride;
  float low, high;
};

template <class T>
HR_INLINE F load_some(const T* p, int64_t count) { return count >= kLanes ? load(p) : load_part(p, count); }
HR_INLINE void store_some(float* p, F v, int64_t count) {
  if (count >= kLanes) store(p, v);
  else store_part(p, v, count);
}

// One token's step of R channels, whose states lie one behind the other from s on.
template <class T, int R>
HR_INLINE void step(const Ssd& p, const T* x, const T* b, const T* c, float* s, T* y, float keep, float dt, float skip) {
  F total[R]{};
  float in[R];
  HR_UNROLL for (int r = 0; r < R; ++r) in[r] = to_float(x[r]) * dt;
  for (int64_t n = 0; n < p.state_dim; n += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), p.state_dim - n);
    const F b_n = load_some(b + n, count), c_n = load_some(c + n, count);
    HR_UNROLL for (int r = 0; r < R; ++r) {
      float* at = s + r * p.state_dim + n;
      const F now = fma(b_n, in[r], load_some(at, count) * keep);
      store_some(at, now, count);
      total[r] = fma(now, c_n, total[r]);
    }
  }
  HR_UNROLL for (int r = 0; r < R; ++r) put(y + r, sum(total[r]) + skip * to_float(x[r]));
}

template <class T>
HR_INLINE void channels(const Ssd& p, const RowTokens& row, int64_t head, int64_t first, int64_t last) {
  const int64_t group = head / (p.heads / p.groups);
  float* state = p.state + row.state * p.state_stride + head * p.head_dim * p.state_dim;
  for (int64_t t = row.first; t < row.last; ++t) {
    if (row.trail >= 0) state = next_state(state, row, t, p.state_stride, first * p.state_dim, last * p.state_dim);
    const float raw = to_float(static_cast<const T*>(p.dt)[t * p.dt_stride + head]);
    const float dt = smaller(larger(softplus(raw + p.bias[head]), p.low), p.high);
    const float keep = __builtin_expf(dt * p.decay[head]), skip = p.skip[head];
    const T* b = static_cast<const T*>(p.b) + t * p.b_stride + group * p.state_dim;
    const T* c = static_cast<const T*>(p.c) + t * p.c_stride + group * p.state_dim;
    const T* x = static_cast<const T*>(p.x) + t * p.x_stride + head * p.head_dim;
    T* y = static_cast<T*>(p.y) + (t * p.heads + head) * p.head_dim;
    int64_t e = first;
    for (; e + kSide <= last; e += kSide)
      step<T, kSide>(p, x + e, b, c, state + e * p.state_dim, y + e, keep, dt, skip);
    for (; e < last; ++e) step<T, 1>(p, x + e, b, c, state + e * p.state_dim, y + e, keep, dt, skip);
  }
}

template <class T>
void chunk(void* context, int64_t i) {
  const Ssd& p = *static_cast<const Ssd*>(context);
  const int64_t parts = ceil_div(p.head_dim, kChannels), first = i % parts * kChannels;
  const RowTokens row = row_tokens(p.rows, i / parts / p.heads);
  if (row.first == row.last) return;
  channels<T>(p, row, i / parts % p.heads, first, smaller(first + kChannels, p.head_dim));
}

}  // namespace

// x [tokens, heads, head_dim], dt [tokens, heads], b, c [tokens, groups, state_dim], each with a row stride in elements; y
// [tokens, heads, head_dim] contiguous; decay, bias, skip float32 [heads]; state float32 [.., heads, head_dim, state_dim], row r
// at r * state_stride.
HR_PUBLIC int32_t HR_EXPORT(ssd_scan)(const void* x, const void* dt, const void* b, const void* c, const float* decay,
                                      const float* bias, const float* skip, void* y, float* state, const void* row,
                                      const int32_t* start, int64_t rows, int64_t states, int64_t depth, int64_t heads, int64_t groups,
                                      int64_t head_dim, int64_t state_dim, int64_t x_stride, int64_t dt_stride,
                                      int64_t b_stride, int64_t c_stride, int64_t state_stride, float low, float high,
                                      int32_t wide, int32_t dtype) {
  if (rows < 0 || groups < 1 || heads % groups || head_dim < 1 || state_dim < 1) return HR_BAD_SHAPE;
  Ssd p{x, dt, b, c, decay, bias, skip, y, state, {row, start, rows, states, depth, wide}, heads, groups, head_dim, state_dim,
        x_stride, dt_stride, b_stride, c_stride, state_stride, low, high};
  const int64_t chunks = rows * heads * ceil_div(head_dim, kChannels);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(ssd_scan)
