// The positions of the highest index scores of each query.

#include "../native/entry_select.h"

// q [tokens, heads, dim], heads next to each other, and weight [tokens, heads], with strides in elements; keys: block b, token t
// at b * block_stride + t * dim; chosen [tokens, top_k]. Without memory for the scores nothing is chosen.
HR_PUBLIC int32_t HR_EXPORT(index_select)(const void* q, const void* weight, const void* keys, const int32_t* start,
                                          const int32_t* length, const int32_t* table, int32_t* chosen, int64_t rows,
                                          int64_t table_stride, int64_t tokens, int64_t heads, int64_t dim, int64_t top_k,
                                          int64_t q_token, int64_t weight_token, int64_t block_tokens, int64_t num_blocks,
                                          int64_t block_stride, int32_t dtype) {
  if (heads < 1 || dim < 1 || dim > kMaxDim || top_k < 1 || block_tokens < 1) return HR_BAD_SHAPE;
  const Entries at = entries_of(table, table_stride, num_blocks, block_stride, 1, block_tokens);
  if (!entries_fit(at, start, length, rows, tokens, block_tokens)) return HR_BAD_INDEX;
  EntrySelect p{q, weight, keys, start, length, at, chosen, rows, heads, dim, top_k, q_token, weight_token, nullptr, 0, 0};
  if (dtype == HR_BF16) return select_entries<bf16>(p, tokens);
  if (dtype == HR_F16) return select_entries<fp16>(p, tokens);
  if (dtype == HR_F32) return select_entries<float>(p, tokens);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(index_select)
