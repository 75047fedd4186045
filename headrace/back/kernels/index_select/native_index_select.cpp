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
  uint32_t* bits;  // of few tokens: [tokens][longest]
  int64_t longest, parts;
};

// bits of the scores of positions [first, first + count). memory: index_floats of the heads.
template <class T>
HR_INLINE void score(const IndexSelect& p, int64_t token, int64_t row, int64_t first, int64_t count, float* memory,
                     uint32_t* bits) {
  const IndexQueries<T> queries = index_queries(static_cast<const T*>(p.q) + token * p.q_token,
                                                static_cast<const T*>(p.weight) + token * p.weight_token, p.heads, p.dim, memory);
  const int32_t* blocks = p.table + row * p.table_stride;
  index_scores<T>(
      queries, count,
      [&](int64_t i) {
        const int64_t s = first + i;
        return static_cast<const T*>(p.keys) + blocks[s / p.block_tokens] * p.block_stride + s % p.block_tokens * p.dim;
      },
      bits);
}

// A chunk is a token.
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
  score<T>(p, token, place.row, 0, seen, memory, bits);
  write_highest(bits, seen, p.top_k, chosen);
}

// A chunk is a part of a token's positions.
template <class T>
void score_part(void* context, int64_t chunk) {
  const IndexSelect& p = *static_cast<const IndexSelect*>(context);
  const int64_t token = chunk / p.parts, first = chunk % p.parts * kScorePart;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t seen = place.row < 0 ? 0 : place.position + 1;
  if (seen <= p.top_k || first >= seen) return;
  float* memory = static_cast<float*>(hr_scratch(index_floats(p.heads, p.dim) * int64_t(sizeof(float)), 1));
  const int64_t count = smaller(kScorePart, seen - first);
  uint32_t* bits = p.bits + token * p.longest + first;
  if (memory != nullptr) score<T>(p, token, place.row, first, count, memory, bits);
  for (int64_t i = 0; memory == nullptr && i < count; ++i) bits[i] = 0;
}

// A chunk is a token, whose scores are there.
void select_scored(void* context, int64_t token) {
  const IndexSelect& p = *static_cast<const IndexSelect*>(context);
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t seen = place.row < 0 ? 0 : place.position + 1;
  if (seen <= p.top_k) write_first(seen, p.top_k, p.chosen + token * p.top_k);
  else write_highest(p.bits + token * p.longest, seen, p.top_k, p.chosen + token * p.top_k);
}

template <class T>
int32_t run(IndexSelect& p, int64_t tokens) {
  for (int64_t r = 0; r < p.rows; ++r)
    if (p.start[r + 1] > p.start[r]) p.longest = larger<int64_t>(p.longest, p.length[r]);
  p.parts = ceil_div(p.longest, kScorePart);
  if (tokens > kFewTokens || p.parts < 2 || hr_pool_threads() < 2) {
    hr_parallel(select_token<T>, &p, tokens);
    return HR_OK;
  }
  p.bits = static_cast<uint32_t*>(hr_scratch(tokens * p.longest * int64_t(sizeof(uint32_t)), 3));
  if (p.bits == nullptr) return HR_NO_MEMORY;
  hr_parallel(score_part<T>, &p, tokens * p.parts);
  hr_parallel(select_scored, &p, tokens);
  return HR_OK;
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
                block_tokens, num_blocks, block_stride, nullptr, 0, 0};
  if (dtype == HR_BF16) return run<bf16>(p, tokens);
  if (dtype == HR_F16) return run<fp16>(p, tokens);
  if (dtype == HR_F32) return run<float>(p, tokens);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(index_select)
