// Norm and rotation of the step's latents and their write into the cache, and the rotation of the queries' last
// dimensions into their absorbed form. Between the stages values are float32.

#include "../native/simd.h"

namespace {

constexpr int64_t kMaxWidth = 1024;
constexpr int64_t kChunkElements = 16 * 1024;

struct LatentWrite {
  const void *q, *latent;
  const int64_t* positions;
  const float* table;
  void* kv;
  const int64_t* slots;
  void* out;
  const float* weight;
  int64_t tokens, heads, nope, rank, rotary, q_token, q_head, latent_token, block_tokens, block_stride, tokens_per_chunk;
  float eps;
  bool pairs;
};

// to = x rotated by the position's cosines, then sines.
template <class T>
HR_INLINE void rotate(const LatentWrite& p, const T* x, const float* cos, T* to) {
  const int64_t half = p.rotary / 2, step = p.pairs ? 2 : 1, apart = p.pairs ? 1 : half;
  const float* sin = cos + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[i * step]), b = to_float(x[i * step + apart]);
    put(to + i * step, a * cos[i] - b * sin[i]);
    put(to + i * step + apart, b * cos[i] + a * sin[i]);
  }
}

template <class T>
HR_INLINE void norm_latent(const LatentWrite& p, const T* x, T* to) {
  F squares{};
  for (int64_t d = 0; d < p.rank; d += kLanes) {
    const F v = load_part(x + d, smaller<int64_t>(p.rank - d, kLanes));
    squares = fma(v, v, squares);
  }
  const float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(p.rank) + p.eps);
  for (int64_t d = 0; d < p.rank; d += kLanes) {
    const int64_t n = smaller<int64_t>(p.rank - d, kLanes);
    store_part(to + d, load_part(x + d, n) * scale * load_part(p.weight + d, n), n);
  }
}

template <class T>
void write_tokens(void* context, int64_t i) {
  const LatentWrite& p = *static_cast<const LatentWrite*>(context);
  const int64_t end = smaller((i + 1) * p.tokens_per_chunk, p.tokens), width = p.rank + p.rotary;
  for (int64_t t = i * p.tokens_per_chunk; t < end; ++t) {
    const float* cos = p.table + p.positions[t] * p.rotary;
    const T* latent = static_cast<const T*>(p.latent) + t * p.latent_token;
    T* to = static_cast<T*>(p.kv) + p.slots[t] / p.block_tokens * p.block_stride + p.slots[t] % p.block_tokens * width;
    norm_latent(p, latent, to);
    rotate(p, latent + p.rank, cos, to + p.rank);
    const T* q = static_cast<const T*>(p.q) + t * p.q_token + p.nope;
    T* out = static_cast<T*>(p.out) + t * p.heads * width + p.rank;
    for (int64_t h = 0; h < p.heads; ++h) rotate(p, q + h * p.q_head, cos, out + h * width);
  }
}

}  // namespace

// q [tokens, heads, nope + rotary], latent [tokens, rank + rotary], with strides in elements; kv: block b, token t at
// b * block_stride + t * (rank + rotary); out [tokens, heads, rank + rotary], contiguous, of which the last rotary elements
// are written. Positions and slots outside table and cache are refused beforehand.
HR_PUBLIC int32_t HR_EXPORT(latent_write)(const void* q, const void* latent, const int64_t* positions, const float* table,
                                          void* kv, const int64_t* slots, void* out, const float* weight, int64_t tokens,
                                          int64_t heads, int64_t nope, int64_t rank, int64_t rotary, int64_t q_token,
                                          int64_t q_head, int64_t latent_token, int64_t table_rows, int64_t block_tokens,
                                          int64_t num_blocks, int64_t block_stride, float eps, int32_t pairs,
                                          int32_t dtype) {
  if (rank < 1 || rotary < 0 || rotary % 2 || rank + rotary > kMaxWidth || heads < 1 || nope < 0 || block_tokens < 1)
    return HR_BAD_SHAPE;
  for (int64_t t = 0; t < tokens; ++t) {
    if (positions[t] < 0 || positions[t] >= table_rows) return HR_BAD_INDEX;
    if (slots[t] < 0 || slots[t] >= num_blocks * block_tokens) return HR_BAD_INDEX;
  }
  const int64_t per_token = rank + (heads + 1) * rotary;
  LatentWrite p{q, latent, positions, table, kv, slots, out, weight, tokens, heads, nope, rank, rotary, q_token, q_head,
                latent_token, block_tokens, block_stride, ceil_div(kChunkElements, per_token), eps, pairs != 0};
  const int64_t chunks = ceil_div(tokens, p.tokens_per_chunk);
  if (dtype == HR_BF16) hr_parallel(write_tokens<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(write_tokens<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(write_tokens<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(latent_write)
