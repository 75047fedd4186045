// RWKV 6's recurrence, and gated linear attention, over the tokens of each row, with the norm of the head. A task has one head of
// one row, whose state [head_dim, head_dim] is changed where it lies.

#include "../native/head_norm.h"
#include "../native/recurrent.h"

namespace {

constexpr int64_t kMaxHead = 256;

struct Wkv6 {
  const void *r, *w, *k, *v;
  const float *first, *weight, *bias;
  void* y;
  float* state;
  StepRows rows;
  int64_t heads, key_heads, head_dim, r_stride, w_stride, k_stride, v_stride, state_stride;
  float eps;
};

// What a token brings of a head; arrays have room for whole vectors, zeros behind the head.
struct HeadToken {
  float r[kMaxHead + kLanes], k[kMaxHead + kLanes], v[kMaxHead + kLanes], keep[kMaxHead + kLanes];
  float bonus;  // r . (first * k)
};

template <class T>
HR_INLINE void prepare(const Wkv6& p, int64_t t, int64_t head, HeadToken& token) {
  const int64_t at = head * p.head_dim, key_at = head / (p.heads / p.key_heads) * p.head_dim;
  const float scale = p.first == nullptr ? 1.0f / __builtin_sqrtf(float(p.head_dim)) : 1.0f;
  F own{};
  for (int64_t e = 0; e < p.head_dim; e += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), p.head_dim - e);
    const F r = load_part(static_cast<const T*>(p.r) + t * p.r_stride + at + e, count);
    const F w = load_part(static_cast<const T*>(p.w) + t * p.w_stride + at + e, count);
    const F keep = vexp(vexp(w) * -1.0f);
    F k = load_part(static_cast<const T*>(p.k) + t * p.k_stride + key_at + e, count);
    if (p.first == nullptr) k = k * (1.0f - keep);
    else own = fma(r * load_part(p.first + at + e, count), k, own);
    store(token.r + e, r * scale), store(token.k + e, k), store(token.keep + e, keep);
    store(token.v + e, load_part(static_cast<const T*>(p.v) + t * p.v_stride + key_at + e, count));
  }
  token.bonus = sum(own);
}

// Columns c .. c + count of the state: changes them, and gives what r reads of them, before the change or (AFTER) behind it. FULL:
// count is kLanes.
template <bool AFTER, bool FULL>
HR_INLINE F columns(const HeadToken& token, const float* before, float* state, int64_t size, int64_t c, int64_t count) {
  const F v = load(token.v + c);
  F out[2]{};
  const auto change = [&](int64_t row, F sum) {
    const float* from = before + row * size + c;
    const F s = FULL ? load(from) : load_part(from, count), next = fma(v, token.k[row], s * token.keep[row]);
    if (FULL) store(state + row * size + c, next);
    else store_part(state + row * size + c, next, count);
    return fma(AFTER ? next : s, token.r[row], sum);
  };
  int64_t e = 0;
  for (; e + 2 <= size; e += 2) HR_UNROLL for (int i = 0; i < 2; ++i) out[i] = change(e + i, out[i]);
  if (e < size) out[0] = change(e, out[0]);
  return out[0] + out[1];
}

template <bool AFTER>
HR_INLINE void read_and_change(const HeadToken& token, const float* before, float* state, int64_t size, float* out) {
  for (int64_t c = 0; c < size; c += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), size - c);
    F o = count == kLanes ? columns<AFTER, true>(token, before, state, size, c, count)
                          : columns<AFTER, false>(token, before, state, size, c, count);
    if (!AFTER) o = fma(load(token.v + c), splat(token.bonus), o);
    store(out + c, o);
  }
}

template <class T>
void chunk(void* context, int64_t i) {
  const Wkv6& p = *static_cast<const Wkv6*>(context);
  const int64_t head = i % p.heads, at = head * p.head_dim, size = p.head_dim;
  const RowTokens row = row_tokens(p.rows, i / p.heads);
  HeadToken token;
  float out[kMaxHead + kLanes];
  for (int64_t t = row.first; t < row.last; ++t) {
    prepare<T>(p, t, head, token);
    const int64_t from = t == row.first ? row.state : behind(row, t - 1);
    const float* before = p.state + from * p.state_stride + head * size * size;
    float* state = p.state + behind(row, t) * p.state_stride + head * size * size;
    if (p.first == nullptr) read_and_change<true>(token, before, state, size, out);
    else read_and_change<false>(token, before, state, size, out);
    if (p.weight != nullptr) head_norm(out, size, p.weight + at, p.bias + at, p.eps);
    T* y = static_cast<T*>(p.y) + t * p.heads * size + at;
    for (int64_t c = 0; c < size; c += kLanes) {
      const int64_t count = smaller(int64_t(kLanes), size - c);
      store_part(y + c, load_part(out + c, count), count);
    }
  }
}

}  // namespace

// r, w [tokens, heads * head_dim], k, v [tokens, key_heads * head_dim], each with a row stride in elements; y [tokens,
// heads * head_dim] contiguous; first, weight, bias float32 [heads * head_dim], the first null for gated linear attention, the
// others null together; state float32 [.., heads, head_dim, head_dim], row i at i * state_stride.
HR_PUBLIC int32_t HR_EXPORT(wkv6)(const void* r, const void* w, const void* k, const void* v, const float* first,
                                  const float* weight, const float* bias, void* y, float* state, const void* row,
                                  const int32_t* start, int64_t rows, int64_t states, int64_t depth, int64_t heads,
                                  int64_t key_heads, int64_t head_dim, int64_t r_stride, int64_t w_stride, int64_t k_stride,
                                  int64_t v_stride, int64_t state_stride, float eps, int32_t wide, int32_t dtype) {
  if (rows < 0 || key_heads < 1 || heads % key_heads || head_dim < 1 || head_dim > kMaxHead) return HR_BAD_SHAPE;
  Wkv6 p{r, w, k, v, first, weight, bias, y, state, {row, start, rows, states, depth, wide}, heads, key_heads, head_dim,
         r_stride, w_stride, k_stride, v_stride, state_stride, eps};
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, rows * heads);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, rows * heads);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, rows * heads);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(wkv6)
