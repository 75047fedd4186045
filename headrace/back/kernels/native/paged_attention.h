// What an attention call is about: the paged cache, the tasks it is cut into, where the parts of a decode row lie.
#pragma once

#include "simd.h"

namespace {

constexpr int kRows = 32;        // query rows of a tile
constexpr int kTokens = 64;      // KV tokens of a tile
constexpr int kMaxHead = 256;    // largest head_dim of heads with values of their own
constexpr int kMaxLatent = 640;  // largest head_dim where values are the beginning of the keys
constexpr int64_t kSplit = 256;  // KV tokens per part of a row with few queries
constexpr int64_t kFewQueries = 16;  // queries of such a row at most

struct Attention {
  const void *q, *kv;
  void* out;
  const int32_t *query_start, *kv_len, *block_table;
  const float* sinks;  // a score per query head, or null
  float* lse;          // [tokens, heads] log-sum-exp of each query's scores, or null
  int64_t rows, table_stride, heads, kv_heads, head_dim, value_dim, block_tokens;
  int64_t q_token_stride, q_head_stride, block_stride, value_offset, head_stride;
  int64_t window;  // positions a query sees, itself included; -C: those of its chunk of C, up to itself
  float scale, softcap;
  int64_t prefill_rows;  // query rows of a prefill task
  bool causal;     // else every query of a row sees all its positions
  bool whole;      // no parts, and with a window a query token a task: a query's result then depends on its position alone
  const struct Task* tasks;
  const struct RowParts* row_parts;
  float* parts;
  const float* slopes = nullptr;  // per query head, times the distance of key from query onto a score (ALiBi)
  const float* bias = nullptr;  // [heads, bias_width] added to the score of a key so many positions before its query, or null
  int64_t bias_width = 0;       // distances that have a bias of their own; greater ones have that of the last
  const float* states = nullptr;  // [tokens, heads, bias_rank], or null: then bias is [bias_rank, bias_width], the farthest
                                  // distance first, and a query's is the sum of its lines times these; greater ones have none
  int64_t bias_rank = 0;
};

// Where the parts of a row lie: `count` from number `first` on, those of a query and head beside each other; from float
// `base` on, if there are several.
struct RowParts {
  int64_t base, first, count;
};

// Query tokens [token, token + tokens) of a row, query heads [head, head + heads), KV positions [low, high).
// first: it holds the lowest position of its rows. part: not kWholeRow: one of several parts of a row, whose unmerged result
// is left in `parts`. kPartOfRows: its tokens are those of as many rows with one query each, which all see these positions
// in the same blocks. kPartOfQueries: they are queries of one row.
enum : int32_t { kWholeRow = 0, kPartOfRows = 1, kPartOfQueries = 2 };
struct Task {
  int32_t row, token, tokens, head, heads, low, high, first, part;
};

// The first position that a query at `position` sees.
HR_INLINE int64_t first_seen(int64_t window, int64_t position) {
  if (window < 0) return larger<int64_t>(position, 0) / -window * -window;
  return larger<int64_t>(position - window + 1, 0);
}

template <class S>
constexpr bool kQuantized = sizeof(S) == 1;
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

// The position of query row m of a task, from which windows are counted.
HR_INLINE int64_t own_position(const Attention& p, const Task& task, int64_t m) {
  if (task.part == kPartOfRows) return p.kv_len[task.row + m / task.heads] - 1;
  const int64_t length = p.kv_len[task.row];
  return length - (p.query_start[task.row + 1] - p.query_start[task.row]) + task.token + m / task.heads;
}

// The last position that it sees.
HR_INLINE int64_t last_position(const Attention& p, const Task& task, int64_t m) {
  return p.causal || task.part == kPartOfRows ? own_position(p, task, m) : p.kv_len[task.row] - 1;
}

// What the sums of a query are divided by. One that sees nothing, which causal queries never do, gives zeros.
HR_INLINE float divisor(const Attention& p, float total) { return !p.causal && total == 0 ? 1.0f : total; }

HR_INLINE void store_lse(const Attention& p, int64_t token, int64_t head, float max, float total) {
  if (p.lse) p.lse[token * p.heads + head] = max + __builtin_logf(total);
}

HR_INLINE int64_t part_floats(const Attention& p) { return p.value_dim + 2; }
// Floats between the sums of a task's query rows.
HR_INLINE int64_t sums_stride(const Attention& p) { return ceil_div(p.value_dim, kLanes) * kLanes; }
// Where a task leaves the unmerged result of its query row m.
HR_INLINE float* part_at(const Attention& p, const Task& task, int64_t m) {
  const int64_t token = m / task.heads;
  const RowParts& parts = p.row_parts[task.row + (task.part == kPartOfRows ? token : 0)];
  const int64_t query = task.part == kPartOfQueries ? task.token + token : 0;
  const int64_t number = task.low / kSplit - parts.first;
  const int64_t at = (query * p.heads + task.head) * parts.count + number * task.heads + m % task.heads;
  return p.parts + parts.base + at * part_floats(p);
}

}  // namespace
