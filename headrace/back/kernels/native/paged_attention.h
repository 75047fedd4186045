// What an attention call is about: the paged cache, the tasks it is cut into, where the parts of a decode row lie.
#pragma once

#include "simd.h"

namespace {

constexpr int kRows = 32;        // query rows of a tile
constexpr int kTokens = 64;      // KV tokens of a tile
constexpr int kMaxHead = 256;    // largest head_dim
constexpr int64_t kSplit = 256;  // KV tokens per part of a decode row

struct Attention {
  const void *q, *kv;
  void* out;
  const int32_t *query_start, *kv_len, *block_table;
  const float* sinks;  // a score per query head, or null
  int64_t rows, table_stride, heads, kv_heads, head_dim, block_tokens;
  int64_t q_token_stride, q_head_stride, block_stride, value_offset, head_stride;
  int64_t window;  // positions a query sees, itself included
  float scale, softcap;
  int64_t prefill_rows;  // query rows of a prefill task
  bool whole;      // no parts, and with a window a query token a task: a query's result then depends on its position alone
  const struct Task* tasks;
  const struct RowParts* row_parts;
  float* parts;
};

// Where the parts of a decode row lie: `count` from number `first` on, those of a head beside each other; from float
// `base` on, if there are several.
struct RowParts {
  int64_t base, first, count;
};

// Query tokens [token, token + tokens) of a row, query heads [head, head + heads), KV positions [low, high).
// first: it holds the lowest position of its rows. part: one of several parts of a decode row, whose unmerged result is
// left in `parts`; its tokens are then those of as many rows, which all see these positions in the same blocks.
struct Task {
  int32_t row, token, tokens, head, heads, low, high, first, part;
};

template <class S>
constexpr bool kCoded = sizeof(S) == 1;
template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

// Where a KV token's vector lies.
template <class T>
HR_INLINE const T* kv_at(const Attention& p, int64_t row, int64_t kv_head, int64_t position, int64_t half) {
  const int64_t block = p.block_table[row * p.table_stride + position / p.block_tokens];
  return static_cast<const T*>(p.kv) + block * p.block_stride + half * p.value_offset + kv_head * p.head_stride +
         position % p.block_tokens * p.head_dim;
}

// A scale for each of the KV positions [low, low + count).
HR_INLINE void kv_scales(const Attention& p, int64_t row, int64_t kv_head, int64_t low, int64_t count, int64_t half,
                         float* scales) {
  for (int64_t j = 0; j < count;) {
    const int64_t offset = (low + j) % p.block_tokens, run = smaller(count - j, p.block_tokens - offset);
    const int8_t* base = kv_at<int8_t>(p, row, kv_head, low + j - offset, half);
    __builtin_memcpy(scales + j, base + p.block_tokens * p.head_dim + offset * 4, size_t(run) * 4);
    j += run;
  }
}

// The running maximum and sum that query row m of a task begins with: the sink is a score of the first part.
HR_INLINE void begin_row(const Attention& p, const Task& task, int64_t m, float& max, float& total) {
  const bool sinks = p.sinks != nullptr && task.first;
  max = sinks ? p.sinks[task.head + m % task.heads] : -__builtin_inff();
  total = sinks ? 1.0f : 0.0f;
}

HR_INLINE int64_t part_floats(const Attention& p) { return p.head_dim + 2; }
// Where a task leaves the unmerged result of its query row m.
HR_INLINE float* part_at(const Attention& p, const Task& task, int64_t m) {
  const RowParts& parts = p.row_parts[task.row + m / task.heads];
  const int64_t number = task.low / kSplit - parts.first;
  return p.parts + parts.base + (task.head * parts.count + number * task.heads + m % task.heads) * part_floats(p);
}

}  // namespace
