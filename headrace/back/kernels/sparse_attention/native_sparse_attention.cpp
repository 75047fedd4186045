// Attention over chosen positions of a cache of keys and values: a chunk is a token and up to four query heads of one KV head,
// which read a key and a value once. Positions are summed in their order, so that a query's bits are the same in any step.

#include "../native/gathered_attention.h"
#include "../native/token_row.h"

namespace {

constexpr int64_t kMaxHead = 512;

struct ChosenAttention {
  const void *q, *kv;
  const int32_t *start, *length, *table, *chosen;
  void* out;
  int64_t rows, table_stride, heads, kv_heads, head_dim, lists, top_k, block_tokens;
  int64_t block_stride, value_offset, head_stride, groups;
  float scale;
};

template <class T>
void attend(void* context, int64_t chunk) {
  const ChosenAttention& p = *static_cast<const ChosenAttention*>(context);
  const int64_t each = p.heads / p.kv_heads, token = chunk / (p.kv_heads * p.groups);
  const int64_t kv_head = chunk / p.groups % p.kv_heads, inside = chunk % p.groups * kHeads;
  const int64_t first = token * p.heads + kv_head * each + inside, heads = smaller<int64_t>(kHeads, each - inside);
  const int32_t* chosen = p.chosen + (token * p.lists + (p.lists == 1 ? 0 : kv_head)) * p.top_k;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t count = place.row < 0 ? 0 : count_chosen(chosen, p.top_k, place.position);
  const Gathered<T> g = gathered<T>(count, p.head_dim);
  const int32_t* blocks = p.table + place.row * p.table_stride;
  for (int64_t s = 0; g.keys != nullptr && s < count; ++s)
    g.keys[s] = static_cast<const T*>(p.kv) + blocks[chosen[s] / p.block_tokens] * p.block_stride + kv_head * p.head_stride +
                chosen[s] % p.block_tokens * p.head_dim;
  attend_gathered(g, static_cast<const T*>(p.q) + first * p.head_dim, heads, p.scale, nullptr, p.value_offset, p.head_dim,
                  static_cast<T*>(p.out) + first * p.head_dim);
}

}  // namespace

// q and out [tokens, heads, head_dim], contiguous; kv: token t of block b and KV head k at b * block_stride + k * head_stride + t *
// head_dim, its value value_offset behind; chosen [tokens, lists, top_k]: positions of the token's row, in order, -1 behind them.
// What is computed for padding, or without a position, is 0.
HR_PUBLIC int32_t HR_EXPORT(sparse_attention)(const void* q, const void* kv, const int32_t* start, const int32_t* length,
                                              const int32_t* table, const int32_t* chosen, void* out, int64_t rows,
                                              int64_t table_stride, int64_t tokens, int64_t heads, int64_t kv_heads,
                                              int64_t head_dim, int64_t lists, int64_t top_k, int64_t block_tokens,
                                              int64_t num_blocks, int64_t block_stride, int64_t value_offset,
                                              int64_t head_stride, float scale, int32_t dtype) {
  if (kv_heads < 1 || heads < kv_heads || heads % kv_heads || head_dim < 1 || head_dim > kMaxHead) return HR_BAD_SHAPE;
  if ((lists != 1 && lists != kv_heads) || top_k < 1 || block_tokens < 1) return HR_BAD_SHAPE;
  if (!rows_fit(start, length, table, rows, table_stride, tokens, block_tokens, num_blocks)) return HR_BAD_INDEX;
  ChosenAttention p{q, kv, start, length, table, chosen, out, rows, table_stride, heads, kv_heads, head_dim, lists, top_k,
                    block_tokens, block_stride, value_offset, head_stride, ceil_div(heads / kv_heads, kHeads), scale};
  const int64_t chunks = tokens * kv_heads * p.groups;
  if (dtype == HR_BF16) hr_parallel(attend<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(attend<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(attend<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(sparse_attention)
