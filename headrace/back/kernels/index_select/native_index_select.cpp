// The positions of the highest index scores of each query, by a radix select: four passes over the scores' bits find the
// lowest chosen score, one more writes the positions in order. A query that sees no more than it may choose scores nothing.

#include "../native/token_row.h"

namespace {

constexpr int64_t kMaxDim = 512;

struct IndexSelect {
  const void *q, *weight, *keys;
  const int32_t *start, *length, *table;
  int32_t* chosen;
  int64_t rows, table_stride, heads, dim, top_k, q_token, weight_token, block_tokens, num_blocks, block_stride;
};

// Bits that sort as the floats do; any NaN above all, and the two zeros are one.
HR_INLINE uint32_t sortable(float score) {
  if (score != score) return 0xffffffffu;
  uint32_t bits;
  score += 0.0f;
  __builtin_memcpy(&bits, &score, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The score of one key: q [heads rounded up to 4, padded dim] and weight are float32.
template <class T>
HR_INLINE float score_of(const IndexSelect& p, const float* q, const float* weight, int64_t padded, const T* key) {
  float score = 0.0f;
  for (int64_t h = 0; h < p.heads; h += 4) {
    const float* at = q + h * padded;
    F a{}, b{}, c{}, d{};
    for (int64_t i = 0; i < p.dim; i += kLanes) {
      const F k = i + kLanes <= p.dim ? load(key + i) : load_part(key + i, p.dim - i);
      a = fma(load(at + i), k, a), b = fma(load(at + padded + i), k, b);
      c = fma(load(at + 2 * padded + i), k, c), d = fma(load(at + 3 * padded + i), k, d);
    }
    float dots[4];
    sum4(a, b, c, d, dots);
    for (int j = 0; j < 4; ++j) score += weight[h + j] * (dots[j] < 0.0f ? 0.0f : dots[j]);
  }
  return score;
}

template <class T>
HR_INLINE void score_all(const IndexSelect& p, int64_t token, int64_t row, int64_t seen, float* q, uint32_t* bits) {
  const int64_t padded = ceil_div(p.dim, kLanes) * kLanes, heads = ceil_div(p.heads, 4) * 4;
  float* weight = q + heads * padded;
  for (int64_t i = 0; i < heads * (padded + 1); ++i) q[i] = 0.0f;
  for (int64_t h = 0; h < p.heads; ++h) {
    const T* from = static_cast<const T*>(p.q) + token * p.q_token + h * p.dim;
    for (int64_t d = 0; d < p.dim; ++d) q[h * padded + d] = to_float(from[d]);
    weight[h] = to_float(static_cast<const T*>(p.weight)[token * p.weight_token + h]);
  }
  const int32_t* blocks = p.table + row * p.table_stride;
  for (int64_t s = 0; s < seen; ++s) {
    const T* key = static_cast<const T*>(p.keys) + blocks[s / p.block_tokens] * p.block_stride + s % p.block_tokens * p.dim;
    bits[s] = sortable(score_of(p, q, weight, padded, key));
  }
}

// The top_k-th highest of bits; `ties`: how many of that value are chosen.
HR_INLINE uint32_t lowest_chosen(const uint32_t* bits, int64_t seen, int64_t top_k, int64_t* ties) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t counts[256] = {};
    for (int64_t s = 0; s < seen; ++s)
      if ((bits[s] & mask) == prefix) ++counts[bits[s] >> shift & 255];
    int digit = 255;
    for (; counts[digit] < top_k; --digit) top_k -= counts[digit];
    prefix |= uint32_t(digit) << shift, mask |= 255u << shift;
  }
  *ties = top_k;
  return prefix;
}

template <class T>
void select_token(void* context, int64_t token) {
  const IndexSelect& p = *static_cast<const IndexSelect*>(context);
  int32_t* chosen = p.chosen + token * p.top_k;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t seen = place.row < 0 ? 0 : place.position + 1;
  int64_t count = 0;
  if (seen <= p.top_k) {
    for (; count < seen; ++count) chosen[count] = int32_t(count);
  } else {
    const int64_t queries = ceil_div(p.heads, 4) * 4 * (ceil_div(p.dim, kLanes) * kLanes + 1);
    float* q = static_cast<float*>(hr_scratch((queries + seen) * int64_t(sizeof(float)), 1));
    if (q != nullptr) {
      uint32_t* bits = reinterpret_cast<uint32_t*>(q + queries);
      score_all<T>(p, token, place.row, seen, q, bits);
      int64_t ties;
      const uint32_t lowest = lowest_chosen(bits, seen, p.top_k, &ties);
      for (int64_t s = 0; s < seen; ++s) {
        if (bits[s] < lowest || (bits[s] == lowest && ties-- <= 0)) continue;
        chosen[count++] = int32_t(s);
      }
    }
  }
  for (; count < p.top_k; ++count) chosen[count] = -1;
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
