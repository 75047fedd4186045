// Attention over chosen positions of a cache of latents: a chunk is a token and up to four of its heads, which read a latent
// once. Positions are summed in their order, so that a query's bits are the same in any step.

#include "../native/token_row.h"

namespace {

constexpr int kHeads = 4;
constexpr int64_t kMaxWidth = 1024;

struct SparseAttention {
  const void *q, *kv;
  const int32_t *start, *length, *table, *chosen;
  void* out;
  const float* sinks;
  int64_t rows, table_stride, heads, width, rank, top_k, block_tokens, num_blocks, block_stride, groups;
  float scale;
};

// scores [kHeads, count] of these heads, scaled. q [kHeads, padded width], float32.
template <class T>
HR_INLINE void score_heads(const SparseAttention& p, const float* q, int64_t padded, const T* const* latents, int64_t count,
                           float* scores) {
  for (int64_t s = 0; s < count; ++s) {
    F a{}, b{}, c{}, d{};
    for (int64_t i = 0; i < p.width; i += kLanes) {
      const F k = i + kLanes <= p.width ? load(latents[s] + i) : load_part(latents[s] + i, p.width - i);
      a = fma(load(q + i), k, a), b = fma(load(q + padded + i), k, b);
      c = fma(load(q + 2 * padded + i), k, c), d = fma(load(q + 3 * padded + i), k, d);
    }
    float dots[kHeads];
    sum4(a, b, c, d, dots);
    for (int h = 0; h < kHeads; ++h) scores[h * count + s] = dots[h] * p.scale;
  }
}

// Scores become weights that sum to 1, together with that of the sink.
HR_INLINE void soften(float* scores, int64_t count, float sink) {
  float best = sink;
  for (int64_t s = 0; s < count; ++s) best = scores[s] > best ? scores[s] : best;
  F total{};
  for (int64_t s = 0; s < count; s += kLanes) {
    const int64_t n = smaller<int64_t>(count - s, kLanes);
    store_part(scores + s, vexp(load_part(scores + s, n) - best), n);
    total += load_part(scores + s, n);
  }
  const float share = 1.0f / (sum(total) + vexp(splat(sink - best))[0]);
  for (int64_t s = 0; s < count; ++s) scores[s] *= share;
}

template <class T>
HR_INLINE void sum_values(const SparseAttention& p, const float* weights, const T* const* latents, int64_t count, int64_t heads,
                          T* out) {
  for (int64_t c = 0; c < p.rank; c += kLanes) {
    const int64_t n = smaller<int64_t>(p.rank - c, kLanes);
    F sums[kHeads] = {};
    for (int64_t s = 0; s < count; ++s) {
      const F v = n == kLanes ? load(latents[s] + c) : load_part(latents[s] + c, n);
      for (int h = 0; h < kHeads; ++h) sums[h] = fma(v, weights[h * count + s], sums[h]);
    }
    for (int64_t h = 0; h < heads; ++h) store_part(out + h * p.rank + c, sums[h], n);
  }
}

template <class T>
void attend(void* context, int64_t chunk) {
  const SparseAttention& p = *static_cast<const SparseAttention*>(context);
  const int64_t token = chunk / p.groups, first = chunk % p.groups * kHeads, heads = smaller<int64_t>(kHeads, p.heads - first);
  T* out = static_cast<T*>(p.out) + (token * p.heads + first) * p.rank;
  const int32_t* chosen = p.chosen + token * p.top_k;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  int64_t count = 0;
  if (place.row >= 0)
    while (count < p.top_k && chosen[count] >= 0 && chosen[count] <= place.position) ++count;
  const int64_t padded = ceil_div(p.width, kLanes) * kLanes;
  char* memory = count == 0 ? nullptr
                            : static_cast<char*>(hr_scratch(kHeads * (padded + count) * int64_t(sizeof(float)) +
                                                                count * int64_t(sizeof(T*)), 1));
  if (memory == nullptr) {
    for (int64_t i = 0; i < heads * p.rank; ++i) put(out + i, 0.0f);
    return;
  }
  const T** latents = reinterpret_cast<const T**>(memory);
  float *q = reinterpret_cast<float*>(latents + count), *scores = q + kHeads * padded;
  const int32_t* blocks = p.table + place.row * p.table_stride;
  for (int64_t s = 0; s < count; ++s)
    latents[s] = static_cast<const T*>(p.kv) + blocks[chosen[s] / p.block_tokens] * p.block_stride +
                 chosen[s] % p.block_tokens * p.width;
  for (int64_t i = 0; i < kHeads * padded; ++i) q[i] = 0.0f;
  const T* from = static_cast<const T*>(p.q) + (token * p.heads + first) * p.width;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t d = 0; d < p.width; ++d) q[h * padded + d] = to_float(from[h * p.width + d]);
  score_heads(p, q, padded, latents, count, scores);
  for (int64_t h = 0; h < kHeads; ++h)
    soften(scores + h * count, count, p.sinks != nullptr && h < heads ? p.sinks[first + h] : -__builtin_inff());
  sum_values(p, scores, latents, count, heads, out);
}

}  // namespace

// q [tokens, heads, width] and out [tokens, heads, rank], contiguous; kv: block b, token t at b * block_stride + t * width; chosen
// [tokens, top_k]: positions of the token's row, in order, -1 behind them. What is computed for padding is 0. sinks [heads] or null.
HR_PUBLIC int32_t HR_EXPORT(sparse_latent_attention)(const void* q, const void* kv, const int32_t* start, const int32_t* length,
                                                     const int32_t* table, const int32_t* chosen, void* out,
                                                     const float* sinks, int64_t rows,
                                                     int64_t table_stride, int64_t tokens, int64_t heads, int64_t width,
                                                     int64_t rank, int64_t top_k, int64_t block_tokens, int64_t num_blocks,
                                                     int64_t block_stride, float scale, int32_t dtype) {
  if (heads < 1 || rank < 1 || rank > width || width > kMaxWidth || top_k < 1 || block_tokens < 1) return HR_BAD_SHAPE;
  if (!rows_fit(start, length, table, rows, table_stride, tokens, block_tokens, num_blocks)) return HR_BAD_INDEX;
  SparseAttention p{q, kv, start, length, table, chosen, out, sinks, rows, table_stride, heads, width, rank, top_k, block_tokens,
                    num_blocks, block_stride, ceil_div(heads, kHeads), scale};
  if (dtype == HR_BF16) hr_parallel(attend<bf16>, &p, tokens * p.groups);
  else if (dtype == HR_F16) hr_parallel(attend<fp16>, &p, tokens * p.groups);
  else if (dtype == HR_F32) hr_parallel(attend<float>, &p, tokens * p.groups);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(sparse_latent_attention)
