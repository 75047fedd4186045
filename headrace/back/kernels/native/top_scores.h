// Which of a query's scores are its highest, by a radix select: four passes over the scores' bits find the lowest chosen score,
// one more writes the places in order. Among equal scores the lower places are chosen.
#pragma once

#include "dots.h"

namespace {

// Bits that sort as the floats do; any NaN above all, and the two zeros are one.
HR_INLINE uint32_t sortable(float score) {
  if (score != score) return 0xffffffffu;
  uint32_t bits;
  score += 0.0f;
  __builtin_memcpy(&bits, &score, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The top_k-th highest of bits; `ties`: how many of that value are chosen.
HR_INLINE uint32_t lowest_chosen(const uint32_t* bits, int64_t count, int64_t top_k, int64_t* ties) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t counts[256] = {};
    for (int64_t s = 0; s < count; ++s)
      if ((bits[s] & mask) == prefix) ++counts[bits[s] >> shift & 255];
    int digit = 255;
    for (; counts[digit] < top_k; --digit) top_k -= counts[digit];
    prefix |= uint32_t(digit) << shift, mask |= 255u << shift;
  }
  *ties = top_k;
  return prefix;
}

// Few tokens are scored in parts, each a task, so that a decode is not left to one thread: so many scores a part, so many tokens
// at most.
constexpr int64_t kScorePart = 1024;
constexpr int64_t kFewTokens = 64;

// The places of the top_k highest of more than top_k bits, in rising order.
HR_INLINE void write_highest(const uint32_t* bits, int64_t count, int64_t top_k, int32_t* chosen) {
  int64_t ties;
  const uint32_t lowest = lowest_chosen(bits, count, top_k, &ties);
  for (int64_t s = 0; s < count; ++s) {
    if (bits[s] < lowest || (bits[s] == lowest && ties-- <= 0)) continue;
    *chosen++ = int32_t(s);
  }
}

// Places [0, count) and -1 behind them, of top_k.
HR_INLINE void write_first(int64_t count, int64_t top_k, int32_t* chosen) {
  for (int64_t i = 0; i < top_k; ++i) chosen[i] = i < count ? int32_t(i) : -1;
}

// An indexer's queries of a token: [heads rounded up to 4, stride], and their weights.
template <class T>
struct IndexQueries {
  Query<T>* q;
  float* weight;
  int64_t heads, dim, stride;
};

// Floats that they take, at most.
HR_INLINE int64_t index_floats(int64_t heads, int64_t dim) { return ceil_div(heads, 4) * 4 * (query_stride(dim) + 1); }

// q [heads, dim], contiguous; weight [heads], or null: they are 0.
template <class T>
HR_INLINE IndexQueries<T> index_queries(const T* q, const T* weight, int64_t heads, int64_t dim, float* memory) {
  const int64_t stride = query_stride(dim), count = ceil_div(heads, 4) * 4;
  IndexQueries<T> to{reinterpret_cast<Query<T>*>(memory + count), memory, count, dim, stride};
  for (int64_t h = 0; h < count; ++h) {
    to.weight[h] = weight != nullptr && h < heads ? to_float(weight[h]) : 0.0f;
    keep_query<T>(to.q + h * stride, q + h * dim, h < heads ? dim : 0, stride);
  }
  return to;
}

// bits of the sum over heads of weight * relu(q . key), for keys [0, count), where at(i) tells where one lies.
template <class T, class At>
HR_INLINE void index_scores(const IndexQueries<T>& queries, int64_t count, At at, uint32_t* bits) {
  for (int64_t first = 0; first < count; first += kSide) {
    const T* keys[kSide];
    float scores[kSide]{}, terms[kSide][4];
    for (int j = 0; j < kSide; ++j) keys[j] = first + j < count ? at(first + j) : keys[0];
    for (int64_t h = 0; h < queries.heads; h += 4) {
      dots(queries.q + h * queries.stride, queries.stride, keys, queries.dim, terms);
      for (int j = 0; j < kSide; ++j)
        for (int i = 0; i < 4; ++i)
          scores[j] += queries.weight[h + i] * (terms[j][i] < 0.0f ? 0.0f : terms[j][i]);
    }
    for (int64_t j = 0; j < kSide && first + j < count; ++j) bits[first + j] = sortable(scores[j]);
  }
}

}  // namespace
