// Attention over chosen positions of a cache of latents: a chunk is a token and up to four of its heads, which read a latent
// once. Positions are summed in their order, so that a query's bits are the same in any step.

#include "../native/gathered_attention.h"
#include "../native/token_row.h"

namespace {

constexpr int64_t kMaxWidth = 1024;

struct SparseAttention {
  const void *q, *kv;
  const int32_t *start, *length, *table, *chosen;
  void* out;
  const float* sinks;
  int64_t rows, table_stride, heads, width, rank, top_k, block_tokens, num_blocks, block_stride, groups;
  float scale;
};

template <class T>
void attend(void* context, int64_t chunk) {
  const SparseAttention& p = *static_cast<const SparseAttention*>(context);
  const int64_t token = chunk / p.groups, head = chunk % p.groups * kHeads, heads = smaller<int64_t>(kHeads, p.heads - head);
  const int64_t first = token * p.heads + head;
  const int32_t* chosen = p.chosen + token * p.top_k;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t count = place.row < 0 ? 0 : count_chosen(chosen, p.top_k, place.position);
  const Gathered<T> g = gathered<T>(count, p.width);
  const int32_t* blocks = p.table + place.row * p.table_stride;
  for (int64_t s = 0; g.keys != nullptr && s < count; ++s)
    g.keys[s] = static_cast<const T*>(p.kv) + blocks[chosen[s] / p.block_tokens] * p.block_stride +
                chosen[s] % p.block_tokens * p.width;
  attend_gathered(g, static_cast<const T*>(p.q) + first * p.width, heads, p.scale, p.sinks ? p.sinks + head : nullptr, 0,
                  p.rank, static_cast<T*>(p.out) + first * p.rank);
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
