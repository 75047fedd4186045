// Layer norm, rotation and write of an indexer's keys, and the rotation of its queries in place. Between the stages values
// are float32.

#include "../native/simd.h"

namespace {

constexpr int64_t kMaxDim = 512;
constexpr int64_t kChunkElements = 16 * 1024;

struct IndexWrite {
  void* q;
  const void* key;
  const int64_t* positions;
  const float* table;
  void* keys;
  const int64_t* slots;
  const float *weight, *bias;
  int64_t tokens, heads, dim, rotary, offset, q_token, q_head, key_token, block_tokens, block_stride, tokens_per_chunk;
  float eps;
  bool pairs;
};

// The elements of x from the offset on rotated by the position's cosines, then sines.
template <class T>
HR_INLINE void rotate_in_place(const IndexWrite& p, T* x, const float* cos) {
  x += p.offset;
  const int64_t half = p.rotary / 2, step = p.pairs ? 2 : 1, apart = p.pairs ? 1 : half;
  const float* sin = cos + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[i * step]), b = to_float(x[i * step + apart]);
    put(x + i * step, a * cos[i] - b * sin[i]);
    put(x + i * step + apart, b * cos[i] + a * sin[i]);
  }
}

template <class T>
HR_INLINE void norm_key(const IndexWrite& p, const T* x, T* to) {
  F total{}, squares{};
  for (int64_t d = 0; d < p.dim; d += kLanes) total += load_part(x + d, smaller<int64_t>(p.dim - d, kLanes));
  const float mean = sum(total) / float(p.dim);
  for (int64_t d = 0; d < p.dim; d += kLanes) {
    const int64_t n = smaller<int64_t>(p.dim - d, kLanes);
    float values[kLanes];
    store(values, load_part(x + d, n) - mean);
    const F v = load_part(values, n);  // zeros after the n-th
    squares = fma(v, v, squares);
  }
  const float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(p.dim) + p.eps);
  for (int64_t d = 0; d < p.dim; d += kLanes) {
    const int64_t n = smaller<int64_t>(p.dim - d, kLanes);
    store_part(to + d, fma((load_part(x + d, n) - mean) * scale, load_part(p.weight + d, n), load_part(p.bias + d, n)), n);
  }
}

template <class T>
void write_tokens(void* context, int64_t i) {
  const IndexWrite& p = *static_cast<const IndexWrite*>(context);
  const int64_t end = smaller((i + 1) * p.tokens_per_chunk, p.tokens);
  for (int64_t t = i * p.tokens_per_chunk; t < end; ++t) {
    const float* cos = p.table + p.positions[t] * p.rotary;
    T* to = static_cast<T*>(p.keys) + p.slots[t] / p.block_tokens * p.block_stride + p.slots[t] % p.block_tokens * p.dim;
    norm_key(p, static_cast<const T*>(p.key) + t * p.key_token, to);
    rotate_in_place(p, to, cos);
    T* q = static_cast<T*>(p.q) + t * p.q_token;
    for (int64_t h = 0; h < p.heads; ++h) rotate_in_place(p, q + h * p.q_head, cos);
  }
}

}  // namespace

// q [tokens, heads, dim] and key [tokens, dim], with strides in elements; keys: block b, token t at b * block_stride + t * dim.
HR_PUBLIC int32_t HR_EXPORT(index_write)(void* q, const void* key, const int64_t* positions, const float* table, void* keys,
                                         const int64_t* slots, const float* weight, const float* bias, int64_t tokens,
                                         int64_t heads, int64_t dim, int64_t rotary, int64_t offset, int64_t q_token, int64_t q_head,
                                         int64_t key_token, int64_t table_rows, int64_t block_tokens, int64_t num_blocks,
                                         int64_t block_stride, float eps, int32_t pairs, int32_t dtype) {
  if (dim < 1 || dim > kMaxDim || rotary < 2 || rotary % 2 || offset < 0 || offset + rotary > dim || heads < 1 || block_tokens < 1)
    return HR_BAD_SHAPE;
  for (int64_t t = 0; t < tokens; ++t) {
    if (positions[t] < 0 || positions[t] >= table_rows) return HR_BAD_INDEX;
    if (slots[t] < 0 || slots[t] >= num_blocks * block_tokens) return HR_BAD_INDEX;
  }
  IndexWrite p{q, key, positions, table, keys, slots, weight, bias, tokens, heads, dim, rotary, offset, q_token, q_head, key_token,
               block_tokens, block_stride, ceil_div(kChunkElements, dim + heads * rotary), eps, pairs != 0};
  const int64_t chunks = ceil_div(tokens, p.tokens_per_chunk);
  if (dtype == HR_BF16) hr_parallel(write_tokens<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(write_tokens<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(write_tokens<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(index_write)
