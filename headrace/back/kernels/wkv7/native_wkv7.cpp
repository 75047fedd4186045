// RWKV 7's recurrence over the tokens of each row, with the norm of the head and the token's bonus. A task has one head of one row,
// whose state [head_dim, head_dim] is changed where it lies.

#include "../native/head_norm.h"
#include "../native/recurrent.h"

namespace {

constexpr int64_t kMaxHead = 256;
constexpr float kFastest = -0.60653065971263342f;  // -exp(-1/2)
constexpr int kInputs = 7;
enum Input { R, W, K, V, A, FIRST, MIX };

struct Wkv7 {
  const void* in[kInputs];
  const float *removal, *scale, *bonus, *weight, *bias;
  void* y;
  float* state;
  StepRows rows;
  int64_t heads, head_dim, stride[kInputs], state_stride;
  float eps;
};

// What a token brings of a head; arrays have room for whole vectors, zeros behind the head.
struct HeadToken {
  float r[kMaxHead + kLanes], u[kMaxHead + kLanes], k[kMaxHead + kLanes], v[kMaxHead + kLanes];
  float keep[kMaxHead + kLanes], put[kMaxHead + kLanes];  // what is kept of a row of the state, and what replaces S^T u there
  float bonus;                                            // r . (bonus * k)
};

template <class T>
HR_INLINE F read(const Wkv7& p, Input which, int64_t t, int64_t c, int64_t count) {
  return load_part(static_cast<const T*>(p.in[which]) + t * p.stride[which] + c, count);
}

template <class T>
HR_INLINE void prepare(const Wkv7& p, int64_t t, int64_t first, HeadToken& token) {
  F squares{}, own{};
  for (int64_t e = 0; e < p.head_dim; e += kLanes) {
    const int64_t c = first + e, count = smaller(int64_t(kLanes), p.head_dim - e);
    const F k = read<T>(p, K, t, c, count), r = read<T>(p, R, t, c, count), rate = vsigmoid(read<T>(p, A, t, c, count));
    F v = read<T>(p, V, t, c, count);
    if (p.in[MIX] != nullptr) v = fma(read<T>(p, FIRST, t, c, count) - v, vsigmoid(read<T>(p, MIX, t, c, count)), v);
    const F u = k * load_part(p.removal + c, count);
    const F changed = k * fma(rate - 1.0f, load_part(p.scale + c, count), splat(1.0f));
    squares = fma(u, u, squares);
    own = fma(r * changed, load_part(p.bonus + c, count), own);
    store(token.r + e, r), store(token.v + e, v), store(token.u + e, u), store(token.k + e, changed);
    store(token.put + e, rate);
    store(token.keep + e, vexp(vsigmoid(read<T>(p, W, t, c, count)) * kFastest));
  }
  const float length = larger(__builtin_sqrtf(sum(squares)), 1e-12f);
  for (int64_t e = 0; e < p.head_dim; e += kLanes) {
    const F u = load(token.u + e) / length;
    store(token.u + e, u);
    store(token.put + e, load(token.put + e) * u * -1.0f);
  }
  token.bonus = sum(own);
}

// Columns c .. c + count of the state: what u finds in them, the change, and what r reads of the result. FULL: count is kLanes.
template <bool FULL>
HR_INLINE F columns(const Wkv7& p, const HeadToken& token, const float* before, float* state, int64_t c, int64_t count) {
  const int64_t size = p.head_dim;
  const auto at = [&](int64_t row) { return FULL ? load(before + row * size + c) : load_part(before + row * size + c, count); };
  F reading[2]{}, out[2]{};
  int64_t e = 0;
  for (; e + 2 <= size; e += 2) HR_UNROLL for (int i = 0; i < 2; ++i) reading[i] = fma(at(e + i), token.u[e + i], reading[i]);
  if (e < size) reading[0] = fma(at(e), token.u[e], reading[0]);
  const F known = reading[0] + reading[1], v = load(token.v + c);
  const auto change = [&](int64_t row, F sum) {
    const F s = fma(v, token.k[row], fma(known, token.put[row], at(row) * token.keep[row]));
    if (FULL) store(state + row * size + c, s);
    else store_part(state + row * size + c, s, count);
    return fma(s, token.r[row], sum);
  };
  for (e = 0; e + 2 <= size; e += 2) HR_UNROLL for (int i = 0; i < 2; ++i) out[i] = change(e + i, out[i]);
  if (e < size) out[0] = change(e, out[0]);
  return out[0] + out[1];
}

template <class T>
HR_INLINE void finish(const Wkv7& p, int64_t t, int64_t first, const HeadToken& token, float* out) {
  if (p.weight != nullptr) head_norm(out, p.head_dim, p.weight + first, p.bias + first, p.eps);
  T* y = static_cast<T*>(p.y) + t * p.heads * p.head_dim + first;
  for (int64_t e = 0; e < p.head_dim; e += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), p.head_dim - e);
    store_part(y + e, fma(load_part(token.v + e, count), splat(token.bonus), load_part(out + e, count)), count);
  }
}

template <class T>
void chunk(void* context, int64_t i) {
  const Wkv7& p = *static_cast<const Wkv7*>(context);
  const int64_t head = i % p.heads, first = head * p.head_dim, size = p.head_dim * p.head_dim;
  const RowTokens row = row_tokens(p.rows, i / p.heads);
  HeadToken token;
  float out[kMaxHead + kLanes];
  for (int64_t t = row.first; t < row.last; ++t) {
    prepare<T>(p, t, first, token);
    float* state = p.state + behind(row, t) * p.state_stride + head * size;
    const float* before = t == row.first ? p.state + row.state * p.state_stride + head * size
                                         : p.state + behind(row, t - 1) * p.state_stride + head * size;
    for (int64_t c = 0; c < p.head_dim; c += kLanes) {
      const int64_t count = smaller(int64_t(kLanes), p.head_dim - c);
      store(out + c, count == kLanes ? columns<true>(p, token, before, state, c, count)
                                     : columns<false>(p, token, before, state, c, count));
    }
    finish<T>(p, t, first, token, out);
  }
}

}  // namespace

// r, w, k, v, a, first, mix [tokens, heads * head_dim], each with a row stride in elements, the last two null together; y
// [tokens, heads * head_dim] contiguous; removal, scale, bonus, weight, bias float32 [heads * head_dim], the last two null
// together; state float32 [.., heads, head_dim, head_dim], row i at i * state_stride.
HR_PUBLIC int32_t HR_EXPORT(wkv7)(const void* r, const void* w, const void* k, const void* v, const void* a,
                                  const void* first_value, const void* mix, const float* removal, const float* scale, const float* bonus,
                                  const float* weight, const float* bias, void* y, float* state, const void* row,
                                  const int32_t* start, int64_t rows, int64_t states, int64_t depth, int64_t heads,
                                  int64_t head_dim, int64_t r_stride, int64_t w_stride, int64_t k_stride, int64_t v_stride,
                                  int64_t a_stride, int64_t first_stride, int64_t mix_stride, int64_t state_stride, float eps,
                                  int32_t wide, int32_t dtype) {
  if (rows < 0 || heads < 1 || head_dim < 1 || head_dim > kMaxHead) return HR_BAD_SHAPE;
  Wkv7 p{{r, w, k, v, a, first_value, mix}, removal, scale, bonus, weight, bias, y, state, {row, start, rows, states, depth, wide},
         heads, head_dim, {r_stride, w_stride, k_stride, v_stride, a_stride, first_stride, mix_stride}, state_stride, eps};
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, rows * heads);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, rows * heads);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, rows * heads);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(wkv7)
