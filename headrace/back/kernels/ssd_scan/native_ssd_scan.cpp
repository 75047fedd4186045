// Mamba 2's recurrence over the tokens of each row. A task has some channels of one head, whose state stays in the first-level
// cache over all tokens of the row.

#include "../native/recurrent.h"

namespace {

constexpr int64_t kChannels = 16;  // of one task

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
HR_INLINE void channels(const Ssd& p, const RowTokens& row, int64_t head, int64_t first, int64_t last) {
  const int64_t group = head / (p.heads / p.groups), whole = p.state_dim / kLanes * kLanes, rest = p.state_dim - whole;
  float* state = p.state + row.state * p.state_stride + head * p.head_dim * p.state_dim;
  for (int64_t t = row.first; t < row.last; ++t) {
    const float raw = to_float(static_cast<const T*>(p.dt)[t * p.dt_stride + head]);
    const float dt = smaller(larger(softplus(raw + p.bias[head]), p.low), p.high);
    const float keep = __builtin_expf(dt * p.decay[head]);
    const T* b = static_cast<const T*>(p.b) + t * p.b_stride + group * p.state_dim;
    const T* c = static_cast<const T*>(p.c) + t * p.c_stride + group * p.state_dim;
    const T* x = static_cast<const T*>(p.x) + t * p.x_stride + head * p.head_dim;
    T* y = static_cast<T*>(p.y) + (t * p.heads + head) * p.head_dim;
    for (int64_t e = first; e < last; ++e) {
      const float in = to_float(x[e]), step = in * dt;
      float* s = state + e * p.state_dim;
      F total{};
      for (int64_t n = 0; n < whole; n += kLanes) {
        const F now = fma(load(b + n), step, load(s + n) * keep);
        store(s + n, now);
        total = fma(now, load(c + n), total);
      }
      if (rest) {
        const F now = fma(load_part(b + whole, rest), step, load_part(s + whole, rest) * keep);
        store_part(s + whole, now, rest);
        total = fma(now, load_part(c + whole, rest), total);
      }
      put(y + e, sum(total) + p.skip[head] * in);
    }
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
                                      const int32_t* start, int64_t rows, int64_t states, int64_t heads, int64_t groups,
                                      int64_t head_dim, int64_t state_dim, int64_t x_stride, int64_t dt_stride,
                                      int64_t b_stride, int64_t c_stride, int64_t state_stride, float low, float high,
                                      int32_t wide, int32_t dtype) {
  if (rows < 0 || groups < 1 || heads % groups || head_dim < 1 || state_dim < 1) return HR_BAD_SHAPE;
  Ssd p{x, dt, b, c, decay, bias, skip, y, state, {row, start, rows, states, wide}, heads, groups, head_dim, state_dim,
        x_stride, dt_stride, b_stride, c_stride, state_stride, low, high};
  const int64_t chunks = rows * heads * ceil_div(head_dim, kChannels);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(ssd_scan)
