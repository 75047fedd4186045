// The groups of the highest scores of each query: of their entries, one list for all heads, or of their best keys, a list for
// each head. A query that sees no more groups than it may choose scores nothing.

#include "../native/entry_select.h"

namespace {

constexpr int64_t kHeads = 4;  // of a chunk, whose groups are scored together: a key is loaded once for them

struct GroupSelect {
  const void *q, *weight, *entries;
  const int32_t *start, *length;
  Entries at;
  int32_t* chosen;
  int64_t rows, heads, dim, top_k, q_token, weight_token, block_tokens, group, local;
};

// The best score of each group for kHeads heads: bits [kHeads][groups]. Local groups are not scored.
template <class T>
HR_INLINE void score_groups(const GroupSelect& p, const IndexQueries<T>& queries, const TokenPlace& place, int64_t groups,
                            uint32_t* bits) {
  const int32_t* blocks = p.at.table + place.row * p.at.table_stride;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * p.group, keys = smaller(p.group, place.position + 1 - first);
    float best[kHeads];
    bool nan[kHeads]{};
    for (int h = 0; h < kHeads; ++h) best[h] = groups - g <= p.local ? __builtin_inff() : -__builtin_inff();
    each_dot<T>(
        queries.q, queries.stride, p.dim, groups - g <= p.local ? 0 : keys,
        [&](int64_t i) {
          const int64_t s = first + i;
          return static_cast<const T*>(p.entries) + blocks[s / p.block_tokens] * p.at.block_stride + s % p.block_tokens * p.dim;
        },
        [&](int64_t, const float* scores) {
          for (int h = 0; h < kHeads; ++h) {
            best[h] = scores[h] > best[h] ? scores[h] : best[h];
            nan[h] = nan[h] || scores[h] != scores[h];
          }
        });
    for (int h = 0; h < kHeads; ++h) bits[h * groups + g] = sortable(nan[h] ? __builtin_nanf("") : best[h]);
  }
}

// A chunk is a token and kHeads of its heads.
template <class T>
void by_best_keys(void* context, int64_t chunk) {
  const GroupSelect& p = *static_cast<const GroupSelect*>(context);
  const int64_t parts = ceil_div(p.heads, kHeads), token = chunk / parts, first = chunk % parts * kHeads;
  const int64_t heads = smaller(kHeads, p.heads - first);
  int32_t* chosen = p.chosen + (token * p.heads + first) * p.top_k;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t groups = place.row < 0 ? 0 : place.position / p.group + 1, floats = index_floats(kHeads, p.dim);
  float* memory = nullptr;
  if (groups > p.top_k) memory = static_cast<float*>(hr_scratch((floats + kHeads * groups) * int64_t(sizeof(float)), 1));
  if (memory == nullptr) {
    for (int64_t h = 0; h < heads; ++h) write_first(groups > p.top_k ? 0 : groups, p.top_k, chosen + h * p.top_k);
    return;
  }
  const T* q = static_cast<const T*>(p.q) + token * p.q_token + first * p.dim;
  const IndexQueries<T> queries = index_queries(q, static_cast<const T*>(nullptr), heads, p.dim, memory);
  uint32_t* bits = reinterpret_cast<uint32_t*>(memory + floats);
  score_groups<T>(p, queries, place, groups, bits);
  for (int64_t h = 0; h < heads; ++h) write_highest(bits + h * groups, groups, p.top_k, chosen + h * p.top_k);
}

template <class T>
int32_t run(GroupSelect& p, int64_t tokens, bool best_key) {
  if (best_key) {
    hr_parallel(by_best_keys<T>, &p, tokens * ceil_div(p.heads, kHeads));
    return HR_OK;
  }
  EntrySelect of_entries{p.q, p.weight, p.entries, p.start, p.length, p.at, p.chosen, p.rows, p.heads, p.dim, p.top_k, p.q_token,
                         p.weight_token, nullptr, 0, 0};
  return select_entries<T>(of_entries, tokens);
}

}  // namespace

// q [tokens, heads, dim], heads next to each other, and weight [tokens, heads], with strides in elements; entries: as
// native/group_entries.h says, or with best_key keys of positions, position t of block b at b * block_stride + t * dim; chosen
// [tokens, heads if best_key else 1, top_k]. local: groups up to the query's own that are always chosen.
HR_PUBLIC int32_t HR_EXPORT(group_select)(const void* q, const void* weight, const void* entries, const int32_t* start,
                                          const int32_t* length, const int32_t* table, int32_t* chosen, int64_t rows,
                                          int64_t table_stride, int64_t tokens, int64_t heads, int64_t dim, int64_t top_k,
                                          int64_t q_token, int64_t weight_token, int64_t block_tokens, int64_t num_blocks,
                                          int64_t block_stride, int64_t group, int64_t local, int32_t best_key,
                                          int32_t dtype) {
  if (heads < 1 || dim < 1 || dim > kMaxDim || top_k < 1 || block_tokens < 1 || group < 1 || local < 0) return HR_BAD_SHAPE;
  GroupSelect p{q, weight, entries, start, length, entries_of(table, table_stride, num_blocks, block_stride, group, block_tokens),
                chosen, rows, heads, dim, top_k, q_token, weight_token, block_tokens, group, local};
  if (best_key && !rows_fit(start, length, table, rows, table_stride, tokens, block_tokens, num_blocks)) return HR_BAD_INDEX;
  if (!best_key && !entries_fit(p.at, start, length, rows, tokens, block_tokens)) return HR_BAD_INDEX;
  if (dtype == HR_BF16) return run<bf16>(p, tokens, best_key);
  if (dtype == HR_F16) return run<fp16>(p, tokens, best_key);
  if (dtype == HR_F32) return run<float>(p, tokens, best_key);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(group_select)
