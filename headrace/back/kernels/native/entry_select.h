// The choice of groups by the scores of their entries, or of positions, which are groups of one: what kernels index_select and
// group_select share. A query that sees no more than it may choose scores nothing.
#pragma once

#include "group_entries.h"
#include "top_scores.h"

namespace {

constexpr int64_t kMaxDim = 512;

struct EntrySelect {
  const void *q, *weight, *entries;
  const int32_t *start, *length;
  Entries at;
  int32_t* chosen;
  int64_t rows, heads, dim, top_k, q_token, weight_token;
  uint32_t* bits;          // of few tokens: [tokens][longest]
  int64_t longest, parts;  // groups of the longest row, and parts of them
};

// Groups that a token sees: the whole ones; none of padding.
HR_INLINE int64_t groups_seen(const EntrySelect& p, const TokenPlace& place) {
  return place.row < 0 ? 0 : (place.position + 1) / p.at.group;
}

// bits of the scores of groups [first, first + count). memory: index_floats of the heads.
template <class T>
HR_INLINE void score(const EntrySelect& p, int64_t token, int64_t row, int64_t first, int64_t count, float* memory,
                     uint32_t* bits) {
  const IndexQueries<T> queries = index_queries(static_cast<const T*>(p.q) + token * p.q_token,
                                                static_cast<const T*>(p.weight) + token * p.weight_token, p.heads, p.dim, memory);
  const T* entries = static_cast<const T*>(p.entries);
  index_scores<T>(queries, count, [&](int64_t i) { return entry_at(p.at, entries, row, first + i, p.dim); }, bits);
}

// A chunk is a token.
template <class T>
void select_token(void* context, int64_t token) {
  const EntrySelect& p = *static_cast<const EntrySelect*>(context);
  int32_t* chosen = p.chosen + token * p.top_k;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t seen = groups_seen(p, place), queries = index_floats(p.heads, p.dim);
  if (seen <= p.top_k) return write_first(seen, p.top_k, chosen);
  float* memory = static_cast<float*>(hr_scratch((queries + seen) * int64_t(sizeof(float)), 1));
  if (memory == nullptr) return write_first(0, p.top_k, chosen);
  uint32_t* bits = reinterpret_cast<uint32_t*>(memory + queries);
  score<T>(p, token, place.row, 0, seen, memory, bits);
  write_highest(bits, seen, p.top_k, chosen);
}

// A chunk is a part of a token's groups.
template <class T>
void score_part(void* context, int64_t chunk) {
  const EntrySelect& p = *static_cast<const EntrySelect*>(context);
  const int64_t token = chunk / p.parts, first = chunk % p.parts * kScorePart;
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t seen = groups_seen(p, place);
  if (seen <= p.top_k || first >= seen) return;
  float* memory = static_cast<float*>(hr_scratch(index_floats(p.heads, p.dim) * int64_t(sizeof(float)), 1));
  const int64_t count = smaller(kScorePart, seen - first);
  uint32_t* bits = p.bits + token * p.longest + first;
  if (memory != nullptr) score<T>(p, token, place.row, first, count, memory, bits);
  for (int64_t i = 0; memory == nullptr && i < count; ++i) bits[i] = 0;
}

// A chunk is a token, whose scores are there.
void select_scored(void* context, int64_t token) {
  const EntrySelect& p = *static_cast<const EntrySelect*>(context);
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  const int64_t seen = groups_seen(p, place);
  if (seen <= p.top_k) write_first(seen, p.top_k, p.chosen + token * p.top_k);
  else write_highest(p.bits + token * p.longest, seen, p.top_k, p.chosen + token * p.top_k);
}

template <class T>
int32_t select_entries(EntrySelect& p, int64_t tokens) {
  for (int64_t r = 0; r < p.rows; ++r)
    if (p.start[r + 1] > p.start[r]) p.longest = larger<int64_t>(p.longest, p.length[r] / p.at.group);
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
