// Attention over chosen positions of a cache of keys and values: a chunk is a token and up to four query heads of one KV head,
// which read a key and a value once. Positions are summed in their order, so that a query's bits are the same in any step.

#include "../native/token_row.h"

namespace {

constexpr int kHeads = 4;
constexpr int64_t kMaxHead = 512;

struct ChosenAttention {
  const void *q, *kv;
  const int32_t *start, *length, *table, *chosen;
  void* out;
  int64_t rows, table_stride, heads, kv_heads, head_dim, lists, top_k, block_tokens;
  int64_t block_stride, value_offset, head_stride, groups;
  float scale;
};

// scores [kHeads, count] of these heads, scaled. q [kHeads, padded head_dim], float32.
template <class T>
HR_INLINE void score_heads(const ChosenAttention& p, const float* q, int64_t padded, const T* const* keys, int64_t count,
                           float* scores) {
  for (int64_t s = 0; s < count; ++s) {
    F a{}, b{}, c{}, d{};
    for (int64_t i = 0; i < p.head_dim; i += kLanes) {
      const F k = i + kLanes <= p.head_dim ? load(keys[s] + i) : load_part(keys[s] + i, p.head_dim - i);
      a = fma(load(q + i), k, a), b = fma(load(q + padded + i), k, b);
      c = fma(load(q + 2 * padded + i), k, c), d = fma(load(q + 3 * padded + i), k, d);
    }
    float dots[kHeads];
    sum4(a, b, c, d, dots);
    for (int h = 0; h < kHeads; ++h) scores[h * count + s] = dots[h] * p.scale;
  }
}

// Scores become weights that sum to 1.
HR_INLINE void soften(float* scores, int64_t count) {
  float best = scores[0];
  for (int64_t s = 1; s < count; ++s) best = scores[s] > best ? scores[s] : best;
  F total{};
  for (int64_t s = 0; s < count; s += kLanes) {
    const int64_t n = smaller<int64_t>(count - s, kLanes);
    store_part(scores + s, vexp(load_part(scores + s, n) - best), n);
    total += load_part(scores + s, n);
  }
  const float share = 1.0f / sum(total);
  for (int64_t s = 0; s < count; ++s) scores[s] *= share;
}

template <class T>
HR_INLINE void sum_values(const ChosenAttention& p, const float* weights, const T* const* keys, int64_t count, int64_t heads,
                          T* out) {
  for (int64_t c = 0; c < p.head_dim; c += kLanes) {
    const int64_t n = smaller<int64_t>(p.head_dim - c, kLanes);
    F sums[kHeads] = {};
    for (int64_t s = 0; s < count; ++s) {
      const T* value = keys[s] + p.value_offset + c;
      const F v = n == kLanes ? load(value) : load_part(value, n);
      for (int h = 0; h < kHeads; ++h) sums[h] = fma(v, weights[h * count + s], sums[h]);
    }
    for (int64_t h = 0; h < heads; ++h) store_part(out + h * p.head_dim + c, sums[h], n);
  }
}

template <class T>
void attend(void* context, int64_t chunk) {
  const ChosenAttention& p = *static_cast<const ChosenAttention*>(context);
  const int64_t each = p.heads / p.kv_heads, token = chunk / (p.kv_heads * p.groups);
  const int64_t kv_head = chunk / p.groups % p.kv_heads, inside = chunk % p.groups * kHeads;
  const int64_t first = kv_head * each + inside, heads = smaller<int64_t>(kHeads, each - inside);
  T* out = static_cast<T*>(p.out) + (token * p.heads + first) * p.head_dim;
  const int32_t* chosen = p.chosen + (token * p.lists + (p.lists == 1 ? 0 : kv_head)) * p.top_k;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  int64_t count = 0;
  if (place.row >= 0)
    while (count < p.top_k && chosen[count] >= 0 && chosen[count] <= place.position) ++count;
  const int64_t padded = ceil_div(p.head_dim, kLanes) * kLanes;
  char* memory = count == 0 ? nullptr
                            : static_cast<char*>(hr_scratch(kHeads * (padded + count) * int64_t(sizeof(float)) +
                                                                count * int64_t(sizeof(T*)), 1));
  if (memory == nullptr) {
    for (int64_t i = 0; i < heads * p.head_dim; ++i) put(out + i, 0.0f);
    return;
  }
  const T** keys = reinterpret_cast<const T**>(memory);
  float *q = reinterpret_cast<float*>(keys + count), *scores = q + kHeads * padded;
  const int32_t* blocks = p.table + place.row * p.table_stride;
  for (int64_t s = 0; s < count; ++s)
    keys[s] = static_cast<const T*>(p.kv) + blocks[chosen[s] / p.block_tokens] * p.block_stride + kv_head * p.head_stride +
              chosen[s] % p.block_tokens * p.head_dim;
  for (int64_t i = 0; i < kHeads * padded; ++i) q[i] = 0.0f;
  const T* from = static_cast<const T*>(p.q) + (token * p.heads + first) * p.head_dim;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t d = 0; d < p.head_dim; ++d) q[h * padded + d] = to_float(from[h * p.head_dim + d]);
  score_heads(p, q, padded, keys, count, scores);
  for (int64_t h = 0; h < kHeads; ++h) soften(scores + h * count, count);
  sum_values(p, scores, keys, count, heads, out);
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
