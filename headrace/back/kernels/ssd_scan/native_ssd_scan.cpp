// Mamba 2's recurrence over the tokens of each row. A task has some channels of one head, whose state stays in the first-level
// cache over all tokens of the row.

#include "../native/recurrent.h"

namespace {

constexpr int64_t kChannels = 16;  // of one task
constexpr int kSide = 4;           // of them side by side: b and c are loaded once for all, sums are chains of their own
constexpr int kAtOnce = kLanes >= 16 ? 4 : 2;  // tokens for which a state is loaded once; their sums fill the registers

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

// What a step of S tokens reads: their first token's rows, and of each token how much is kept and the size of its step.
template <class T, int S>
struct Tokens {
  const T *x, *b, *c;
  T* y;
  float keep[S], dt[S];
};

// A step of R channels, whose states lie one behind the other from s on. A state is loaded and stored once for all S tokens; each
// token's sums are what they are alone.
template <class T, int R, int S>
HR_INLINE void step(const Ssd& p, const Tokens<T, S>& tokens, int64_t e, float* s, float skip) {
  F total[S][R]{};
  float in[S][R];
  HR_UNROLL for (int t = 0; t < S; ++t)
    HR_UNROLL for (int r = 0; r < R; ++r) in[t][r] = to_float(tokens.x[t * p.x_stride + e + r]) * tokens.dt[t];
  for (int64_t n = 0; n < p.state_dim; n += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), p.state_dim - n);
    F now[R];
    HR_UNROLL for (int r = 0; r < R; ++r) now[r] = load_some(s + r * p.state_dim + n, count);
    HR_UNROLL for (int t = 0; t < S; ++t) {
      const F b_n = load_some(tokens.b + t * p.b_stride + n, count), c_n = load_some(tokens.c + t * p.c_stride + n, count);
      HR_UNROLL for (int r = 0; r < R; ++r) {
        now[r] = fma(b_n, in[t][r], now[r] * tokens.keep[t]);
        total[t][r] = fma(now[r], c_n, total[t][r]);
      }
    }
    HR_UNROLL for (int r = 0; r < R; ++r) store_some(s + r * p.state_dim + n, now[r], count);
  }
  HR_UNROLL for (int t = 0; t < S; ++t)
    HR_UNROLL for (int r = 0; r < R; ++r)
      put(tokens.y + t * p.heads * p.head_dim + e + r,
          sum(total[t][r]) + skip * to_float(tokens.x[t * p.x_stride + e + r]));
}

// S tokens from t on, of channels [first, last) of a head.
template <class T, int S>
HR_INLINE void at_once(const Ssd& p, int64_t t, int64_t head, float* state, int64_t first, int64_t last) {
  const int64_t group = head / (p.heads / p.groups);
  Tokens<T, S> tokens{static_cast<const T*>(p.x) + t * p.x_stride + head * p.head_dim,
                      static_cast<const T*>(p.b) + t * p.b_stride + group * p.state_dim,
                      static_cast<const T*>(p.c) + t * p.c_stride + group * p.state_dim,
                      static_cast<T*>(p.y) + (t * p.heads + head) * p.head_dim, {}, {}};
  float raw[kLanes]{};
  HR_UNROLL for (int i = 0; i < S; ++i) raw[i] = to_float(static_cast<const T*>(p.dt)[(t + i) * p.dt_stride + head]);
  const F dt = vmin(vmax(vsoftplus(load(raw) + p.bias[head]), splat(p.low)), splat(p.high)), keep = vexp(dt * p.decay[head]);
  HR_UNROLL for (int i = 0; i < S; ++i) tokens.dt[i] = dt[i], tokens.keep[i] = keep[i];
  const float skip = p.skip[head];
  int64_t e = first;
  for (; e + kSide <= last; e += kSide) step<T, kSide, S>(p, tokens, e, state + e * p.state_dim, skip);
  for (; e < last; ++e) step<T, 1, S>(p, tokens, e, state + e * p.state_dim, skip);
}

template <class T>
HR_INLINE void channels(const Ssd& p, const RowTokens& row, int64_t head, int64_t first, int64_t last) {
  float* state = p.state + row.state * p.state_stride + head * p.head_dim * p.state_dim;
  int64_t t = row.first;
  if (row.trail < 0)
    for (; t + kAtOnce <= row.last; t += kAtOnce) at_once<T, kAtOnce>(p, t, head, state, first, last);
  for (; t < row.last; ++t) {
    if (row.trail >= 0) state = next_state(state, row, t, p.state_stride, first * p.state_dim, last * p.state_dim);
    at_once<T, 1>(p, t, head, state, first, last);
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
