// Norm of each query and key head, rotation, and the write of keys and values into the paged cache, in one pass over the
// merged projection. Queries stay where they are; between the stages values are float32.

#include "../native/simd.h"

namespace {

constexpr int64_t kChunkElements = 16 * 1024;
constexpr int64_t kMaxHead = 512;

struct Work {
  void *qkv, *kv;
  const int64_t *positions, *slots;
  const float *table, *q_weight, *k_weight;
  int64_t tokens, stride, heads, kv_heads, head_dim, rotary_dim, block_tokens, block_stride, value_offset, head_stride;
  int64_t tokens_per_chunk;
  float eps;
  bool pairs;
};

// The head as float32, normed where there is a weight.
template <class T>
HR_INLINE void norm_head(const Work& p, const T* x, const float* weight, float* y) {
  F squares{};
  for (int64_t d = 0; d < p.head_dim; d += kLanes) {
    const int64_t n = p.head_dim - d;
    F v = n >= kLanes ? load(x + d) : load_part(x + d, n);
    store(y + d, v);  // y has room for a whole vector
    squares = fma(v, v, squares);
  }
  if (weight == nullptr) return;
  const float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(p.head_dim) + p.eps);
  for (int64_t d = 0; d < p.head_dim; d += kLanes) {
    const int64_t n = p.head_dim - d;
    store(y + d, load(y + d) * scale * (n >= kLanes ? load(weight + d) : load_part(weight + d, n)));
  }
}

HR_INLINE void rotate_head(const Work& p, const float* cos, float* y) {
  const int64_t half = p.rotary_dim / 2;
  const float* sin = cos + half;
  if (p.pairs) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = y[2 * i], b = y[2 * i + 1];
      y[2 * i] = a * cos[i] - b * sin[i], y[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F a = load(y + i), b = load(y + half + i), c = load(cos + i), s = load(sin + i);
    store(y + i, a * c - b * s);
    store(y + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = y[i], b = y[half + i];
    y[i] = a * cos[i] - b * sin[i], y[half + i] = b * cos[i] + a * sin[i];
  }
}

template <class T>
HR_INLINE void put_head(const Work& p, const float* y, T* to) {
  for (int64_t d = 0; d < p.head_dim; d += kLanes) {
    const int64_t n = p.head_dim - d;
    if (n >= kLanes) store(to + d, load(y + d));
    else store_part(to + d, load(y + d), n);
  }
}

// A whole head of V vectors whose halves are turned, in registers.
template <class T, int V>
HR_INLINE void turn_head(const Work& p, const T* x, const float* weight, const float* cos, T* to) {
  F v[V], squares{};
  HR_UNROLL for (int i = 0; i < V; ++i) v[i] = load(x + i * kLanes), squares = fma(v[i], v[i], squares);
  if (weight != nullptr) {
    const float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(V * kLanes) + p.eps);
    HR_UNROLL for (int i = 0; i < V; ++i) v[i] = v[i] * scale * load(weight + i * kLanes);
  }
  HR_UNROLL for (int i = 0; i < V / 2; ++i) {
    const F a = v[i], b = v[i + V / 2], c = load(cos + i * kLanes), s = load(cos + (i + V / 2) * kLanes);
    store(to + i * kLanes, a * c - b * s);
    store(to + (i + V / 2) * kLanes, b * c + a * s);
  }
}

// Any head, by way of y, which holds kMaxHead floats and a vector.
template <class T>
HR_INLINE void any_head(const Work& p, const T* x, const float* weight, const float* cos, float* y, T* to) {
  norm_head(p, x, weight, y);
  if (cos != nullptr) rotate_head(p, cos, y);
  put_head(p, y, to);
}

// V: the vectors of a head that turn_head takes; 0: any head.
template <class T, int V>
void chunk(void* context, int64_t i) {
  const Work& p = *static_cast<const Work*>(context);
  alignas(64) float y[kMaxHead + kLanes];
  auto head = [&](const T* x, const float* weight, const float* cos, T* to) {
    if constexpr (V > 0) turn_head<T, V>(p, x, weight, cos, to);
    else any_head(p, x, weight, cos, y, to);
  };
  const int64_t end = smaller((i + 1) * p.tokens_per_chunk, p.tokens);
  for (int64_t t = i * p.tokens_per_chunk; t < end; ++t) {
    T* x = static_cast<T*>(p.qkv) + t * p.stride;
    const float* cos = p.rotary_dim > 0 ? p.table + p.positions[t] * p.rotary_dim : nullptr;
    for (int64_t h = 0; h < p.heads; ++h, x += p.head_dim) head(x, p.q_weight, cos, x);
    T* to = static_cast<T*>(p.kv) + p.slots[t] / p.block_tokens * p.block_stride +
            p.slots[t] % p.block_tokens * p.head_dim;
    for (int64_t h = 0; h < p.kv_heads; ++h, x += p.head_dim, to += p.head_stride) {
      head(x, p.k_weight, cos, to);
      __builtin_memcpy(to + p.value_offset, x + p.kv_heads * p.head_dim, size_t(p.head_dim) * sizeof(T));
    }
  }
}

template <class T>
HrTask chunk_of(const Work& p) {
  const bool whole = !p.pairs && p.rotary_dim == p.head_dim;
  if (whole && p.head_dim == 4 * kLanes) return chunk<T, 4>;
  if (whole && p.head_dim == 8 * kLanes) return chunk<T, 8>;
  if (whole && p.head_dim == 16 * kLanes) return chunk<T, 16>;
  return chunk<T, 0>;
}

}  // namespace

// qkv [tokens, stride]; kv: block b, half h, head k, token t at b * block_stride + h * value_offset + k * head_stride +
// t * head_dim elements. Weights null: no norm. Positions and slots outside table and cache are refused beforehand.
HR_PUBLIC int32_t HR_EXPORT(qk_rope_write)(void* qkv, const int64_t* positions, const float* table, void* kv,
                                           const int64_t* slots, const float* q_weight, const float* k_weight,
                                           int64_t tokens, int64_t stride, int64_t heads, int64_t kv_heads,
                                           int64_t head_dim, int64_t rotary_dim, int64_t table_rows, int64_t block_tokens,
                                           int64_t num_blocks, int64_t block_stride, int64_t value_offset,
                                           int64_t head_stride, float eps, int32_t pairs, int32_t dtype) {
  if (head_dim < 1 || head_dim > kMaxHead || rotary_dim < 0 || rotary_dim % 2 || rotary_dim > head_dim || block_tokens < 1)
    return HR_BAD_SHAPE;
  for (int64_t t = 0; t < tokens; ++t) {
    if (rotary_dim > 0 && (positions[t] < 0 || positions[t] >= table_rows)) return HR_BAD_INDEX;
    if (slots[t] < 0 || slots[t] >= num_blocks * block_tokens) return HR_BAD_INDEX;
  }
  const int64_t per_token = (heads + 2 * kv_heads) * head_dim;
  Work p{qkv, kv, positions, slots, table, q_weight, k_weight, tokens, stride, heads, kv_heads, head_dim, rotary_dim,
         block_tokens, block_stride, value_offset, head_stride, ceil_div(kChunkElements, per_token), eps, pairs != 0};
  const int64_t chunks = ceil_div(tokens, p.tokens_per_chunk);
  if (dtype == HR_BF16) hr_parallel(chunk_of<bf16>(p), &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk_of<fp16>(p), &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk_of<float>(p), &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(qk_rope_write)
