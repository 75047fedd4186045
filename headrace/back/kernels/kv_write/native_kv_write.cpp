// Copies the step's keys and values to their slots of the paged KV cache: bytes as they are, or quantized with a scale.

#include "../native/int8.h"
#include "../native/kv_forms.h"

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

namespace {

struct QuantizedWrite {
  const void *k, *v;
  int8_t* kv;
  const int64_t* slots;
  const float* fixed;
  int64_t tokens, heads, head_dim, block_tokens;
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride, block_stride, value_offset, head_stride;
};

template <class T, class S>
HR_INLINE void quantize_vector(const T* x, int64_t head_dim, int64_t block_tokens, int64_t offset, int8_t* head,
                               float fixed) {
  // The quantizer writes whole vectors: the tail of the last one must not reach the next token.
  alignas(64) int8_t quantized[256 + 64];
  float scale;
  int32_t sums[2];
  uint8_t* bytes = reinterpret_cast<uint8_t*>(quantized);
  if constexpr (kIsFp8<S>) quantize_fp8(x, head_dim, reinterpret_cast<fp8*>(quantized), &scale, fixed);
  else if constexpr (kIsRotated<S>) quantize_rotated<S>(x, head_dim, bytes, &scale);
  else if constexpr (kIsE2m1<S>) quantize_e2m1(x, head_dim, bytes, &scale);
  else if constexpr (kByTile<S>) quantize_nibbles(x, head_dim, bytes, &scale);
  else if constexpr (!kInTiles<S>) quantize_e5m2(x, head_dim, bytes, &scale);
  else quantize(x, head_dim, head_dim, quantized, &scale, sums);
  const int64_t size = value_bytes<S>(head_dim);
  __builtin_memcpy(head + offset * size, quantized, size_t(size));
  __builtin_memcpy(head + block_tokens * size + offset * 4, &scale, 4);
}

template <class T, class S>
void write_token(void* context, int64_t t) {
  const QuantizedWrite& p = *static_cast<const QuantizedWrite*>(context);
  int8_t* to = p.kv + p.slots[t] / p.block_tokens * p.block_stride;
  const int64_t offset = p.slots[t] % p.block_tokens;
  for (int64_t h = 0; h < p.heads; ++h, to += p.head_stride) {
    const T* k = static_cast<const T*>(p.k) + t * p.k_token_stride + h * p.k_head_stride;
    const T* v = static_cast<const T*>(p.v) + t * p.v_token_stride + h * p.v_head_stride;
    const float of_k = p.fixed ? p.fixed[h] : 0, of_v = p.fixed ? p.fixed[p.heads + h] : 0;
    quantize_vector<T, S>(k, p.head_dim, p.block_tokens, offset, to, of_k);
    quantize_vector<T, S>(v, p.head_dim, p.block_tokens, offset, to + p.value_offset, of_v);
  }
}

template <class S>
int32_t write_all(QuantizedWrite& p, int32_t dtype) {
  if (dtype == HR_BF16) hr_parallel(write_token<bf16, S>, &p, p.tokens);
  else if (dtype == HR_F16) hr_parallel(write_token<fp16, S>, &p, p.tokens);
  else if (dtype == HR_F32) hr_parallel(write_token<float, S>, &p, p.tokens);
  else return HR_BAD_DTYPE;
  return HR_OK;
}

}  // namespace

// The same for a quantized cache (1: int8, 2: e4m3, 3: e5m2, 4: 4 bits, 5: e2m1, 6 and 7: rotated 4 and 3 bits, 8 and 9: levels of so many) with a float32 scale per token and head (as attention
// reads it). Strides of k and v count elements, those of kv bytes. fixed [2, heads]: the scales of keys and values, e4m3 only;
// null: found for each token.
HR_PUBLIC int32_t HR_EXPORT(kv_write_quantized)(const void* k, const void* v, int8_t* kv, const int64_t* slots,
                                           const float* fixed, int64_t tokens,
                                           int64_t heads, int64_t head_dim, int64_t block_tokens, int64_t num_blocks,
                                           int64_t k_token_stride, int64_t k_head_stride, int64_t v_token_stride,
                                           int64_t v_head_stride, int64_t block_stride, int64_t value_offset,
                                           int64_t head_stride, int32_t dtype, int32_t form) {
  if (tokens < 0 || block_tokens < 1 || head_dim < 1 || head_dim > 256) return HR_BAD_SHAPE;
  for (int64_t t = 0; t < tokens; ++t)
    if (slots[t] < 0 || slots[t] >= num_blocks * block_tokens) return HR_BAD_INDEX;
  if (fixed != nullptr && form != 2) return HR_BAD_SHAPE;
  QuantizedWrite p{k, v, kv, slots, fixed, tokens, heads, head_dim, block_tokens, k_token_stride, k_head_stride, v_token_stride,
          v_head_stride, block_stride, value_offset, head_stride};
  if (form == 1) return write_all<int8_t>(p, dtype);
  if (form == 2) return write_all<fp8>(p, dtype);
  if (form == 3) return write_all<e5m2>(p, dtype);
  if (form == 4) return head_dim % 2 ? HR_BAD_SHAPE : write_all<nibbles>(p, dtype);
  if (form == 5) return head_dim % 2 ? HR_BAD_SHAPE : write_all<e2m1>(p, dtype);
  const bool whole = head_dim >= 16 && (head_dim & (head_dim - 1)) == 0;
  if (form == 6) return whole ? write_all<rotated4>(p, dtype) : int32_t(HR_BAD_SHAPE);
  if (form == 7) return whole ? write_all<rotated3>(p, dtype) : int32_t(HR_BAD_SHAPE);
  if (form == 8) return whole ? write_all<levels4>(p, dtype) : int32_t(HR_BAD_SHAPE);
  if (form == 9) return whole ? write_all<levels3>(p, dtype) : int32_t(HR_BAD_SHAPE);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(kv_write_quantized)
