// Rotary position embedding in place: (a, b) -> (a cos - b sin, b cos + a sin) for each pair of a head.

#include "../native/simd.h"

namespace {

constexpr int64_t kChunkElements = 16 * 1024;

struct Rope {
  void *q, *k;
  const int64_t* positions;
  const float* table;
  int64_t tokens, heads, kv_heads, half, q_token_stride, q_head_stride, k_token_stride, k_head_stride, tokens_per_chunk;
};

// Pairs (i, i + half).
template <class T>
HR_INLINE void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    if (n >= kLanes) {
      F a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
      store(x + i, a * c - b * s);
      store(x + half + i, b * c + a * s);
    } else {
      F a = load_part(x + i, n), b = load_part(x + half + i, n), c = load_part(cos + i, n), s = load_part(sin + i, n);
      store_part(x + i, a * c - b * s, n);
      store_part(x + half + i, b * c + a * s, n);
    }
  }
}

// Pairs (2i, 2i + 1).
template <class T>
HR_INLINE void rotate_pairs(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    put(x + 2 * i, a * cos[i] - b * sin[i]);
    put(x + 2 * i + 1, b * cos[i] + a * sin[i]);
  }
}

template <class T, bool Pairs>
HR_INLINE void rotate_heads(T* x, int64_t heads, int64_t head_stride, const float* cos, int64_t half) {
  for (int64_t h = 0; h < heads; ++h)
    if (Pairs) rotate_pairs(x + h * head_stride, cos, cos + half, half);
    else rotate_halves(x + h * head_stride, cos, cos + half, half);
}

template <class T, bool Pairs>
void chunk(void* context, int64_t i) {
  const Rope& p = *static_cast<const Rope*>(context);
  const int64_t end = smaller((i + 1) * p.tokens_per_chunk, p.tokens);
  for (int64_t t = i * p.tokens_per_chunk; t < end; ++t) {
    const float* cos = p.table + p.positions[t] * 2 * p.half;
    rotate_heads<T, Pairs>(static_cast<T*>(p.q) + t * p.q_token_stride, p.heads, p.q_head_stride, cos, p.half);
    rotate_heads<T, Pairs>(static_cast<T*>(p.k) + t * p.k_token_stride, p.kv_heads, p.k_head_stride, cos, p.half);
  }
}

template <class T>
void run(Rope& p, bool pairs) {
  const int64_t chunks = ceil_div(p.tokens, p.tokens_per_chunk);
  if (pairs) hr_parallel(chunk<T, true>, &p, chunks);
  else hr_parallel(chunk<T, false>, &p, chunks);
}

}  // namespace

// q [tokens, heads, D], k [tokens, kv_heads, D] with strides in elements. table [table_rows, rotary_dim] float32: cosines,
// then sines. A position outside the table is refused before anything is written.
HR_PUBLIC int32_t HR_EXPORT(rope)(void* q, void* k, const int64_t* positions, const float* table, int64_t tokens,
                                  int64_t heads, int64_t kv_heads, int64_t rotary_dim, int64_t table_rows,
                                  int64_t q_token_stride, int64_t q_head_stride, int64_t k_token_stride,
                                  int64_t k_head_stride, int32_t pairs, int32_t dtype) {
  if (tokens < 0 || rotary_dim < 2 || rotary_dim % 2) return HR_BAD_SHAPE;
  for (int64_t t = 0; t < tokens; ++t)
    if (positions[t] < 0 || positions[t] >= table_rows) return HR_BAD_INDEX;
  const int64_t per_token = larger<int64_t>((heads + kv_heads) * rotary_dim, 1);
  Rope p{q, k, positions, table, tokens, heads, kv_heads, rotary_dim / 2, q_token_stride, q_head_stride,
         k_token_stride, k_head_stride, ceil_div(kChunkElements, per_token)};
  if (dtype == HR_BF16) run<bf16>(p, pairs);
  else if (dtype == HR_F16) run<fp16>(p, pairs);
  else if (dtype == HR_F32) run<float>(p, pairs);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(rope)
