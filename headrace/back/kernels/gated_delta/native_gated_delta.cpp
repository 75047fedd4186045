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
};

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

template <class T>
HR_INLINE void columns(const Delta& p, const RowTokens& row, int64_t head, int64_t first, int64_t count) {
  alignas(64) float tile[kMaxKey * kColumns];
  float q[kMaxKey + kLanes], k[kMaxKey + kLanes];
  const int64_t key_head = head / (p.heads / p.key_heads);
  const float scale = 1.0f / __builtin_sqrtf(float(p.key_dim));
  float* state = p.state + row.state * p.state_stride + head * p.key_dim * p.value_dim + first;
  int64_t sizes[kVectors];
  for (int i = 0; i < kVectors; ++i) sizes[i] = larger(int64_t(0), smaller(int64_t(kLanes), count - i * kLanes));
  for (int64_t e = 0; e < p.key_dim; ++e)
    for (int i = 0; i < kVectors; ++i)
      store(tile + e * kColumns + i * kLanes, load_part(state + e * p.value_dim + i * kLanes, sizes[i]));
  for (int64_t t = row.first; t < row.last; ++t) {
    normed(static_cast<const T*>(p.q) + t * p.q_stride + key_head * p.key_dim, p.key_dim, scale, q);
    normed(static_cast<const T*>(p.k) + t * p.k_stride + key_head * p.key_dim, p.key_dim, 1.0f, k);
    const float a = to_float(static_cast<const T*>(p.a)[t * p.a_stride + head]);
    const float keep = __builtin_expf(p.decay[head] * softplus(a + p.bias[head]));
    const float beta = sigmoid(to_float(static_cast<const T*>(p.b)[t * p.b_stride + head]));
    const T* v = static_cast<const T*>(p.v) + t * p.v_stride + head * p.value_dim + first;
    T* y = static_cast<T*>(p.y) + (t * p.heads + head) * p.value_dim + first;
    F known[kVectors]{}, delta[kVectors], out[kVectors]{};
    for (int64_t e = 0; e < p.key_dim; ++e)
      HR_UNROLL for (int i = 0; i < kVectors; ++i)
        known[i] = fma(load(tile + e * kColumns + i * kLanes), k[e], known[i]);
    HR_UNROLL for (int i = 0; i < kVectors; ++i)
      delta[i] = (load_part(v + i * kLanes, sizes[i]) - known[i] * keep) * beta;
    for (int64_t e = 0; e < p.key_dim; ++e)
      HR_UNROLL for (int i = 0; i < kVectors; ++i) {
        float* s = tile + e * kColumns + i * kLanes;
        const F now = fma(delta[i], k[e], load(s) * keep);
        store(s, now);
        out[i] = fma(now, q[e], out[i]);
      }
    for (int i = 0; i < kVectors; ++i) store_part(y + i * kLanes, out[i], sizes[i]);
  }
  for (int64_t e = 0; e < p.key_dim; ++e)
    for (int i = 0; i < kVectors; ++i)
      store_part(state + e * p.value_dim + i * kLanes, load(tile + e * kColumns + i * kLanes), sizes[i]);
}

template <class T>
void chunk(void* context, int64_t i) {
  const Delta& p = *static_cast<const Delta*>(context);
  const int64_t parts = ceil_div(p.value_dim, kColumns), first = i % parts * kColumns;
  const RowTokens row = row_tokens(p.rows, i / parts / p.heads);
  if (row.first == row.last) return;
  columns<T>(p, row, i / parts % p.heads, first, smaller(kColumns, p.value_dim - first));
}

}  // namespace

// q, k [tokens, key_heads, key_dim], v [tokens, heads, value_dim], a, b [tokens, heads], each with a row stride in elements; y
// [tokens, heads, value_dim] contiguous; decay, bias float32 [heads]; state float32 [.., heads, key_dim, value_dim], row r at
// r * state_stride.
HR_PUBLIC int32_t HR_EXPORT(gated_delta)(const void* q, const void* k, const void* v, const void* a, const void* b,
                                         const float* decay, const float* bias, void* y, float* state, const void* row,
                                         const int32_t* start, int64_t rows, int64_t states, int64_t key_heads,
                                         int64_t heads, int64_t key_dim, int64_t value_dim, int64_t q_stride,
                                         int64_t k_stride, int64_t v_stride, int64_t a_stride, int64_t b_stride,
                                         int64_t state_stride, int32_t wide, int32_t dtype) {
  if (rows < 0 || key_heads < 1 || heads % key_heads || key_dim < 1 || key_dim > kMaxKey || value_dim < 1)
    return HR_BAD_SHAPE;
  Delta p{q, k, v, a, b, decay, bias, y, state, {row, start, rows, states, wide}, key_heads, heads, key_dim, value_dim,
          q_stride, k_stride, v_stride, a_stride, b_stride, state_stride};
  const int64_t chunks = rows * heads * ceil_div(value_dim, kColumns);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(gated_delta)
