// Attention over a window of latents and over entries of groups, in one softmax: a chunk is a token and up to four of its heads.

#include "../native/gathered_attention.h"
#include "../native/group_entries.h"

namespace {

constexpr int64_t kMaxWidth = 1024;

struct Compressed {
  const void *q, *kv, *entries;
  const int32_t *start, *length, *table, *chosen;
  Entries at;
  const float* sinks;
  void* out;
  int64_t rows, table_stride, heads, head_dim, window, group, top_k, block_tokens, block_stride, parts;
  float scale;
};

// Of a query's groups those that are whole; all of them where none is chosen.
HR_INLINE int64_t group_at(const Compressed& p, const int32_t* chosen, int64_t i, int64_t whole) {
  const int64_t group = p.top_k > 0 ? chosen[i] : i;
  return group < whole ? group : -1;
}

template <class T>
void attend(void* context, int64_t chunk) {
  const Compressed& p = *static_cast<const Compressed*>(context);
  const int64_t token = chunk / p.parts, head = chunk % p.parts * kHeads, first = token * p.heads + head;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t window = place.row < 0 ? 0 : smaller(p.window, place.position + 1);
  const int64_t whole = place.row < 0 || p.group == 0 ? 0 : (place.position + 1) / p.group;
  const int64_t listed = whole == 0 ? 0 : p.top_k > 0 ? p.top_k : whole;
  const int32_t* chosen = p.chosen + token * p.top_k;
  int64_t groups = 0;
  for (int64_t i = 0; i < listed; ++i) groups += group_at(p, chosen, i, whole) >= 0;
  const Gathered<T> g = gathered<T>(window + groups, p.head_dim);
  if (g.keys != nullptr) {
    const int32_t* blocks = p.table + place.row * p.table_stride;
    for (int64_t s = 0; s < window; ++s) {
      const int64_t at = place.position + 1 - window + s;
      g.keys[s] = static_cast<const T*>(p.kv) + blocks[at / p.block_tokens] * p.block_stride + at % p.block_tokens * p.head_dim;
    }
    const T** to = g.keys + window;
    for (int64_t i = 0; i < listed; ++i) {
      const int64_t group = group_at(p, chosen, i, whole);
      if (group >= 0) *to++ = entry_at(p.at, static_cast<const T*>(p.entries), place.row, group, p.head_dim);
    }
  }
  attend_gathered(g, static_cast<const T*>(p.q) + first * p.head_dim, smaller<int64_t>(kHeads, p.heads - head), p.scale,
                  p.sinks + head, 0, p.head_dim, static_cast<T*>(p.out) + first * p.head_dim);
}

}  // namespace

// q and out [tokens, heads, head_dim], contiguous; kv: block b, position t at b * block_stride + t * head_dim; entries as
// native/group_entries.h says; chosen [tokens, top_k]: groups, -1 for none; top_k 0: all whole ones are read. group 0: there are no
// entries. sinks [heads]. What is computed for padding is 0.
HR_PUBLIC int32_t HR_EXPORT(compressed_attention)(const void* q, const void* kv, const void* entries, const int32_t* start,
                                                  const int32_t* length, const int32_t* table, const int32_t* entry_table,
                                                  const int32_t* chosen, const float* sinks, void* out, int64_t rows,
                                                  int64_t table_stride, int64_t entry_table_stride, int64_t tokens,
                                                  int64_t heads, int64_t head_dim, int64_t window, int64_t group, int64_t top_k,
                                                  int64_t block_tokens, int64_t num_blocks, int64_t num_entry_blocks,
                                                  int64_t block_stride, int64_t entry_stride, float scale, int32_t dtype) {
  if (heads < 1 || head_dim < 1 || head_dim > kMaxWidth || window < 1 || group < 0 || top_k < 0 || block_tokens < 1)
    return HR_BAD_SHAPE;
  Compressed p{q, kv, entries, start, length, table, chosen, {}, sinks, out, rows, table_stride, heads, head_dim, window, group,
               top_k, block_tokens, block_stride, ceil_div(heads, kHeads), scale};
  if (!rows_fit(start, length, table, rows, table_stride, tokens, block_tokens, num_blocks)) return HR_BAD_INDEX;
  if (group > 0) {
    p.at = entries_of(entry_table, entry_table_stride, num_entry_blocks, entry_stride, group, block_tokens);
    if (!entries_fit(p.at, start, length, rows, tokens, block_tokens)) return HR_BAD_INDEX;
  }
  if (dtype == HR_BF16) hr_parallel(attend<bf16>, &p, tokens * p.parts);
  else if (dtype == HR_F16) hr_parallel(attend<fp16>, &p, tokens * p.parts);
  else if (dtype == HR_F32) hr_parallel(attend<float>, &p, tokens * p.parts);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(compressed_attention)
