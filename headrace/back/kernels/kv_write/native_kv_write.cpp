// Copies the step's keys and values to their slots of the paged KV cache. Bytes only: the dtype does not matter.

#include "../native/simd.h"

// k, v: token t, head h at t * token_stride + h * head_stride bytes, head_bytes long. kv: as in attention, in bytes. A slot
// outside the cache is refused before anything is written.
HR_PUBLIC int32_t HR_EXPORT(kv_write)(const char* k, const char* v, char* kv, const int64_t* slots, int64_t tokens,
                                      int64_t heads, int64_t head_bytes, int64_t block_tokens, int64_t num_blocks,
                                      int64_t k_token_stride, int64_t k_head_stride, int64_t v_token_stride,
                                      int64_t v_head_stride, int64_t block_stride, int64_t value_offset,
                                      int64_t head_stride) {
  if (tokens < 0 || block_tokens < 1) return HR_BAD_SHAPE;
  for (int64_t t = 0; t < tokens; ++t)
    if (slots[t] < 0 || slots[t] >= num_blocks * block_tokens) return HR_BAD_INDEX;
  for (int64_t t = 0; t < tokens; ++t) {
    char* to = kv + slots[t] / block_tokens * block_stride + slots[t] % block_tokens * head_bytes;
    for (int64_t h = 0; h < heads; ++h, to += head_stride) {
      __builtin_memcpy(to, k + t * k_token_stride + h * k_head_stride, size_t(head_bytes));
      __builtin_memcpy(to + value_offset, v + t * v_token_stride + h * v_head_stride, size_t(head_bytes));
    }
  }
  return HR_OK;
}
HR_REPLAYABLE(kv_write)
