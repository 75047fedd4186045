// The gated delta rule over the tokens of each row. A task has some columns of one head's state, which stay in the first-level
// cache over all tokens of the row.

#include "../native/recurrent.h"

namespace {

constexpr int64_t kMaxKey = 256;
constexpr int kVectors = 4;                     // chains of additions side by side
constexpr int64_t kColumns = kVectors * kLanes;  // of one task

struct Delta {
  const void *q, *k, *v, *a, *b;
  const float *decay, *bias;
  void* y;
  float* state;
  StepRows rows;
  int64_t key_heads, heads, key_dim, value_dim;
  int64_t q_stride, k_stride, v_stride, a_stride, b_stride, state_stride;
  float beta_scale, bound;
};

// What a head keeps: log keep is decay * softplus(x), or bound * sigmoid(-decay * x) if there is a bound (below 0).
HR_INLINE F kept(F x, float decay, float bound) {
  return vexp(bound < 0 ? vsigmoid(x * -decay) * bound : vsoftplus(x) * decay);
}

// The factor of each row of the state, into keep, which has room for whole vectors.
template <class T>
HR_INLINE void kept_channels(const Delta& p, int64_t t, int64_t head, float* keep) {
  const T* a = static_cast<const T*>(p.a) + t * p.a_stride + head * p.key_dim;
  const float* bias = p.bias + head * p.key_dim;
  for (int64_t e = 0; e < p.key_dim; e += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), p.key_dim - e);
    store(keep + e, kept(load_part(a + e, count) + load_part(bias + e, count), p.decay[head], p.bound));
  }
}

// x / |x| * scale into y, which has room for whole vectors.
template <class T>
HR_INLINE void normed(const T* x, int64_t size, float scale, float* y) {
  F squares{};
  for (int64_t e = 0; e < size; e += kLanes) {
    const F v = load_part(x + e, smaller(int64_t(kLanes), size - e));
    squares = fma(v, v, squares);
    store(y + e, v);
  }
  const float factor = scale / __builtin_sqrtf(sum(squares) + 1e-6f);
  for (int64_t e = 0; e < size; e += kLanes) store(y + e, load(y + e) * factor);
}

// What a token brings of a head: its normed query and key, what is kept of each row of the state, or of all, and the key that
// reads what will be kept. Arrays have room for whole vectors.
template <bool CHANNELS>
struct HeadToken {
  float q[kMaxKey + kLanes], k[kMaxKey + kLanes], keeps[CHANNELS ? kMaxKey + kLanes : 1];
  float reads[CHANNELS ? kMaxKey + kLanes : 1];
  float keep, beta;
};

template <bool CHANNELS>
HR_INLINE const float* reading(const HeadToken<CHANNELS>& token) {
  return CHANNELS ? token.reads : token.k;
}

template <class T, bool CHANNELS>
HR_INLINE void prepare(const Delta& p, int64_t t, int64_t head, float scale, HeadToken<CHANNELS>& token) {
  const int64_t key_head = head / (p.heads / p.key_heads);
  normed(static_cast<const T*>(p.q) + t * p.q_stride + key_head * p.key_dim, p.key_dim, scale, token.q);
  normed(static_cast<const T*>(p.k) + t * p.k_stride + key_head * p.key_dim, p.key_dim, 1.0f, token.k);
  token.keep = 1.0f;
  if constexpr (CHANNELS) {
    kept_channels<T>(p, t, head, token.keeps);
    for (int64_t e = 0; e < p.key_dim; ++e) token.reads[e] = token.k[e] * token.keeps[e];
  } else {
    const float x = to_float(static_cast<const T*>(p.a)[t * p.a_stride + head]) + p.bias[head];
    token.keep = kept(splat(x), p.decay[head], p.bound)[0];
  }
  token.beta = p.beta_scale * sigmoid(to_float(static_cast<const T*>(p.b)[t * p.b_stride + head]));
}

// The state after a token, and what the token reads of it. NEXT: what the next token's key finds is summed up on the way, in the
// order of a pass of its own: a state is loaded once for each token.
template <bool CHANNELS, bool NEXT>
HR_INLINE void update(float* tile, int64_t key_dim, const HeadToken<CHANNELS>& token, const float* next, const F* delta, F* out,
                      F* known) {
  F sums[kVectors]{}, readings[kVectors]{};
  float keep = token.keep;
  for (int64_t e = 0; e < key_dim; ++e) {
    if constexpr (CHANNELS) keep = token.keeps[e];
    HR_UNROLL for (int i = 0; i < kVectors; ++i) {
      float* s = tile + e * kColumns + i * kLanes;
      const F now = fma(delta[i], token.k[e], load(s) * keep);
      store(s, now);
      sums[i] = fma(now, token.q[e], sums[i]);
      if constexpr (NEXT) readings[i] = fma(now, next[e], readings[i]);
    }
  }
  HR_UNROLL for (int i = 0; i < kVectors; ++i) out[i] = sums[i], known[i] = readings[i];
}

template <class T, bool CHANNELS>
HR_INLINE void columns(const Delta& p, const RowTokens& row, int64_t head, int64_t first, int64_t count) {
  alignas(64) float tile[kMaxKey * kColumns];
  HeadToken<CHANNELS> tokens[2];
  const float scale = 1.0f / __builtin_sqrtf(float(p.key_dim));
  float* state = p.state + row.state * p.state_stride + head * p.key_dim * p.value_dim + first;
  int64_t sizes[kVectors];
  for (int i = 0; i < kVectors; ++i) sizes[i] = larger(int64_t(0), smaller(int64_t(kLanes), count - i * kLanes));
  for (int64_t e = 0; e < p.key_dim; ++e)
    for (int i = 0; i < kVectors; ++i)
      store(tile + e * kColumns + i * kLanes, load_part(state + e * p.value_dim + i * kLanes, sizes[i]));
  F known[kVectors]{}, delta[kVectors], out[kVectors];
  prepare<T>(p, row.first, head, scale, tokens[0]);
  for (int64_t e = 0; e < p.key_dim; ++e)
    HR_UNROLL for (int i = 0; i < kVectors; ++i)
      known[i] = fma(load(tile + e * kColumns + i * kLanes), reading(tokens[0])[e], known[i]);
  for (int64_t t = row.first; t < row.last; ++t) {
    const HeadToken<CHANNELS>& token = tokens[(t - row.first) % 2];
    HeadToken<CHANNELS>& next = tokens[(t - row.first + 1) % 2];
    const T* v = static_cast<const T*>(p.v) + t * p.v_stride + head * p.value_dim + first;
    T* y = static_cast<T*>(p.y) + (t * p.heads + head) * p.value_dim + first;
    HR_UNROLL for (int i = 0; i < kVectors; ++i)
      delta[i] = (load_part(v + i * kLanes, sizes[i]) - known[i] * token.keep) * token.beta;
    if (t + 1 < row.last) {
      prepare<T>(p, t + 1, head, scale, next);
      update<CHANNELS, true>(tile, p.key_dim, token, reading(next), delta, out, known);
    } else {
      update<CHANNELS, false>(tile, p.key_dim, token, nullptr, delta, out, known);
    }
    for (int i = 0; i < kVectors; ++i) store_part(y + i * kLanes, out[i], sizes[i]);
    if (!is_kept(row, t)) continue;
    float* kept = state + (behind(row, t) - row.state) * p.state_stride;
    for (int64_t e = 0; e < p.key_dim; ++e)
      for (int i = 0; i < kVectors; ++i)
        store_part(kept + e * p.value_dim + i * kLanes, load(tile + e * kColumns + i * kLanes), sizes[i]);
  }
}

template <class T, bool CHANNELS>
void chunk(void* context, int64_t i) {
  const Delta& p = *static_cast<const Delta*>(context);
  const int64_t parts = ceil_div(p.value_dim, kColumns), first = i % parts * kColumns;
  const RowTokens row = row_tokens(p.rows, i / parts / p.heads);
  if (row.first == row.last) return;
  columns<T, CHANNELS>(p, row, i / parts % p.heads, first, smaller(kColumns, p.value_dim - first));
}

template <class T>
void run(Delta& p, bool channels, int64_t chunks) {
  if (channels) hr_parallel(chunk<T, true>, &p, chunks);
  else hr_parallel(chunk<T, false>, &p, chunks);
}

}  // namespace

// q, k [tokens, key_heads, key_dim], v [tokens, heads, value_dim], a, b [tokens, heads], each with a row stride in elements; y
// [tokens, heads, value_dim] contiguous; decay, bias float32 [heads]; state float32 [.., heads, key_dim, value_dim], row r at
// r * state_stride. per_channel: a [tokens, heads, key_dim], bias [heads, key_dim]. bound: 0 is none.
HR_PUBLIC int32_t HR_EXPORT(gated_delta)(const void* q, const void* k, const void* v, const void* a, const void* b,
                                         const float* decay, const float* bias, void* y, float* state, const void* row,
                                         const int32_t* start, int64_t rows, int64_t states, int64_t depth, int64_t key_heads,
                                         int64_t heads, int64_t key_dim, int64_t value_dim, int64_t q_stride,
                                         int64_t k_stride, int64_t v_stride, int64_t a_stride, int64_t b_stride,
                                         int64_t state_stride, float beta_scale, float bound, int32_t per_channel,
                                         int32_t wide, int32_t dtype) {
  if (rows < 0 || key_heads < 1 || heads % key_heads || key_dim < 1 || key_dim > kMaxKey || value_dim < 1)
    return HR_BAD_SHAPE;
  Delta p{q, k, v, a, b, decay, bias, y, state, {row, start, rows, states, depth, wide}, key_heads, heads, key_dim, value_dim,
          q_stride, k_stride, v_stride, a_stride, b_stride, state_stride, beta_scale, bound};
  const int64_t chunks = rows * heads * ceil_div(value_dim, kColumns);
  if (dtype == HR_BF16) run<bf16>(p, per_channel, chunks);
  else if (dtype == HR_F16) run<fp16>(p, per_channel, chunks);
  else if (dtype == HR_F32) run<float>(p, per_channel, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(gated_delta)
