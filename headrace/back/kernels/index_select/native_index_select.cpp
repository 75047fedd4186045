// The positions of the highest index scores of each query. A query that sees no more than it may choose scores nothing.

#include "../native/token_row.h"
#include "../native/top_scores.h"

namespace {

constexpr int64_t kMaxDim = 512;

struct IndexSelect {
  const void *q, *weight, *keys;
  const int32_t *start, *length, *table;
  int32_t* chosen;
  int64_t rows, table_stride, heads, dim, top_k, q_token, weight_token, block_tokens, num_blocks, block_stride;
};

template <class T>
HR_INLINE void score_all(const IndexSelect& p, int64_t token, int64_t row, int64_t seen, float* memory, uint32_t* bits) {
  const IndexQueries<T> queries = index_queries(static_cast<const T*>(p.q) + token * p.q_token,
                                             static_cast<const T*>(p.weight) + token * p.weight_token, p.heads, p.dim, memory);
  const int32_t* blocks = p.table + row * p.table_stride;
  index_scores<T>(
      queries, seen,
      [&](int64_t s) {
        return static_cast<const T*>(p.keys) + blocks[s / p.block_tokens] * p.block_stride + s % p.block_tokens * p.dim;
      },
      bits);
}

template <class T>
void select_token(void* context, int64_t token) {
  const IndexSelect& p = *static_cast<const IndexSelect*>(context);
  int32_t* chosen = p.chosen + token * p.top_k;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t seen = place.row < 0 ? 0 : place.position + 1, queries = index_floats(p.heads, p.dim);
  if (seen <= p.top_k) return write_first(seen, p.top_k, chosen);
  float* memory = static_cast<float*>(hr_scratch((queries + seen) * int64_t(sizeof(float)), 1));
  if (memory == nullptr) return write_first(0, p.top_k, chosen);
  uint32_t* bits = reinterpret_cast<uint32_t*>(memory + queries);
  score_all<T>(p, token, place.row, seen, memory, bits);
  write_highest(bits, seen, p.top_k, chosen);
}

}  // namespace

// q [tokens, heads, dim], heads next to each other, and weight [tokens, heads], with strides in elements; keys: block b, token t
// at b * block_stride + t * dim; chosen [tokens, top_k]. Without memory for the scores nothing is chosen.
HR_PUBLIC int32_t HR_EXPORT(index_select)(const void* q, const void* weight, const void* keys, const int32_t* start,
                                          const int32_t* length, const int32_t* table, int32_t* chosen, int64_t rows,
                                          int64_t table_stride, int64_t tokens, int64_t heads, int64_t dim, int64_t top_k,
                                          int64_t q_token, int64_t weight_token, int64_t block_tokens, int64_t num_blocks,
                                          int64_t block_stride, int32_t dtype) {
  if (heads < 1 || dim < 1 || dim > kMaxDim || top_k < 1 || block_tokens < 1) return HR_BAD_SHAPE;
  if (!rows_fit(start, length, table, rows, table_stride, tokens, block_tokens, num_blocks)) return HR_BAD_INDEX;
  IndexSelect p{q, weight, keys, start, length, table, chosen, rows, table_stride, heads, dim, top_k, q_token, weight_token,
                block_tokens, num_blocks, block_stride};
  if (dtype == HR_BF16) hr_parallel(select_token<bf16>, &p, tokens);
  else if (dtype == HR_F16) hr_parallel(select_token<fp16>, &p, tokens);
  else if (dtype == HR_F32) hr_parallel(select_token<float>, &p, tokens);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(index_select)
