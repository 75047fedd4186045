// Attention's tasks in bf16 with matrix tiles: what they read of the paged cache, and where their results go.
#pragma once

#include "amx_prefill.h"
#include "paged_attention.h"

#if defined(HR_AMX)

namespace {

// Whether tiles can be used, and whether they pay for a task of few rows. Quantized values are dequantized once for all rows of a task, which
// pays from four query heads to a KV head on: of one and two, a decode alone takes 1.8 and 1.4 times as long in tiles; and
// whether it is alone must not show in its bits, nor with `whole` whether it is part of a prompt.
template <class S>
HR_INLINE bool few_fit_tiles(const Attention& p) { return !kQuantized<S> || p.heads >= 4 * p.kv_heads; }
template <class S>
HR_INLINE bool fits_tiles(const Attention& p) {
  const bool counts_back = !p.causal && p.window != INT32_MAX;  // from a query's own position, which tiles do not know
  return !counts_back && p.slopes == nullptr && p.bias == nullptr && p.head_dim % 32 == 0 && p.block_tokens % kTile == 0 && (few_fit_tiles<S>(p) || !p.whole);
}

// The KV cache as tiles read it, 16 tokens at a time: in place, or dequantized; into `wide` [3][16][head_dim] where a slot is
// named.
template <class S>
struct TileKV {
  static constexpr int64_t bytes = sizeof(S);
  const Attention& p;
  int64_t row, kv_head;
  bf16* wide;
  const bf16* rows(int64_t token, int64_t half, int slot) const {
    return rows_at(token, half, wide + slot * 16 * p.head_dim);
  }
  const bf16* rows_at(int64_t token, int64_t half, bf16* to) const {
    const S* at = kv_at<S>(p, row, kv_head, token, half);
    if constexpr (kQuantized<S>) return dequantize_rows(at, p.head_dim, to);
    else return at;
  }
  const char* where(int64_t token, int64_t half) const { return (const char*)kv_at<S>(p, row, kv_head, token, half); }
  void scales(int64_t first, int64_t low, int64_t high, TileScales& to) const {
    to = {};
    const int64_t from = larger(first, low), count = smaller(first + kTokens, high) - from;
    kv_scales(p, row, kv_head, from, count, 0, to.keys + from - first);
    kv_scales(p, row, kv_head, from, count, 1, to.values + from - first);
  }
};

// A prefill task of more than kRows query rows.
template <class S>
void prefill_in_tiles(const Attention& p, const Task& task) {
  const int64_t rows = int64_t(task.tokens) * task.heads, kv_head = task.head / (p.heads / p.kv_heads), D = p.head_dim;
  const int64_t blocks = ceil_div(rows, kQueryRows);
  char* memory = static_cast<char*>(hr_scratch(prefill_bytes(D, blocks, kQuantized<S>), 1));
  const PrefillMemory m = prefill_memory(memory, D, blocks, kQuantized<S>);
  alignas(64) int32_t position[kMaxPrefillRows];
  for (int64_t i = 0; i < blocks * kQueryRows; ++i) position[i] = int32_t(last_position(p, task, smaller(i, rows - 1)));
  for (int64_t b = 0; b < 2 * blocks; ++b) {
    alignas(64) float max[16], total[16];
    for (int64_t i = 0; i < 16; ++i) begin_row(p, task, smaller(b * 16 + i, rows - 1), max[i], total[i]);
    m.rows[b] = begin_rows(max, total);
  }
  for (int64_t i = 0; i < blocks * D * 32; i += kLanes) store(m.sums + i, F{});
  const TileTask job{rows, D, task.low, task.high, p.window, p.scale, p.softcap, position};
  const bf16* q = static_cast<const bf16*>(p.q);
  const int64_t start = p.query_start[task.row] + task.token;
  pack_queries(job, [&](int64_t row) {
    return q + (start + row / task.heads) * p.q_token_stride + (task.head + row % task.heads) * p.q_head_stride;
  }, m.queries);
  if (rows % kQueryRows != 0 && rows % kQueryRows <= kTile)  // the last rows' other half is none
    __builtin_memset(m.queries + (2 * blocks - 1) * D * 32, 0, size_t(D * 32));
  prefill_attend(job, m, TileKV<S>{p, task.row, kv_head, nullptr});
  for (int64_t b = 0; b < ceil_div(rows, kTile); ++b) {
    F total = m.rows[b].total;
    if (!p.causal) total = select(total == 0.0f, splat(1.0f), total);
    for (int64_t d = 0; d < D; d += 16) {
      const float* sums = m.sums + b / 2 * D * 32 + d * 32 + b % 2 * 256;
      __m512i r[16];
      HR_UNROLL for (int i = 0; i < 16; ++i) r[i] = (__m512i)(load(sums + i * 16) / total);
      transpose16(r);
      for (int64_t i = 0; i < smaller(rows - b * 16, kTile); ++i) {
        const int64_t row = b * 16 + i;
        store(static_cast<bf16*>(p.out) + ((start + row / task.heads) * p.heads + task.head + row % task.heads) * D + d,
              (F)r[i]);
      }
    }
    for (int64_t i = 0; p.lse && i < smaller(rows - b * 16, kTile); ++i) {
      const int64_t row = b * 16 + i;
      const Running& seen = m.rows[b];
      store_lse(p, start + row / task.heads, task.head + row % task.heads, seen.base[i] / kLog2E, seen.total[i]);
    }
  }
}

// A task with matrix tiles.
template <class S>
void attend_in_tiles(const Attention& p, const Task& task) {
  const int64_t rows = int64_t(task.tokens) * task.heads, kv_head = task.head / (p.heads / p.kv_heads), D = p.head_dim;
  alignas(64) char memory[2 * kMaxHead * 32 + 2 * kMaxHead * 64 + 4 * kTileBytes + 64 * 32 * 4 + 2 * kMaxHead * 64];
  alignas(64) int32_t position[kRows];
  alignas(64) float max[kRows], total[kRows];
  for (int64_t m = 0; m < kRows; ++m) {
    // A part is seen whole by each of several rows. Of one row the position is its own.
    const bool shared = task.part == kPartOfRows && task.tokens > 1;
    position[m] = int32_t(shared ? task.high - 1 : last_position(p, task, smaller(m, rows - 1)));
    begin_row(p, task, smaller(m, rows - 1), max[m], total[m]);
  }
  const TileTask job{rows, D, task.low, task.high, p.window, p.scale, p.softcap, position};
  const TileMemory m = tile_memory(memory, D);
  const bf16* q = static_cast<const bf16*>(p.q);
  const int64_t start = p.query_start[task.row] + task.token;
  pack_queries(job, [&](int64_t row) {
    return q + (start + row / task.heads) * p.q_token_stride + (task.head + row % task.heads) * p.q_head_stride;
  }, m.queries);
  alignas(64) bf16 wide[kQuantized<S> ? 3 * 16 * kMaxHead : 1];
  const TileKV<S> kv{p, task.row, kv_head, wide};
  if (rows > kTile) tile_attend<2>(job, m, kv, max, total);
  else tile_attend<1>(job, m, kv, max, total);
  for (int64_t row = 0; row < rows; ++row) {
    const float* sums = m.sums + row / kTile * D * 16 + row % kTile * 16;
    if (task.part != kWholeRow) {
      float* to = part_at(p, task, row);
      to[0] = max[row], to[1] = total[row];
      for (int64_t d = 0; d < D; d += kLanes) store(to + 2 + d, load(sums + d * 16));
      continue;
    }
    const int64_t token = start + row / task.heads, head = task.head + row % task.heads;
    const float by = divisor(p, total[row]);
    store_lse(p, token, head, max[row], total[row]);
    bf16* to = static_cast<bf16*>(p.out) + (token * p.heads + head) * D;
    for (int64_t d = 0; d < D; d += kLanes) store(to + d, load(sums + d * 16) / by);
  }
}

// Task i, with matrix tiles or by `otherwise`.
template <class S, HrTask otherwise>
void attend_anyhow(void* context, int64_t i) {
  const Attention& p = *static_cast<const Attention*>(context);
  const Task& task = p.tasks[i];
  if (int64_t(task.tokens) * task.heads > kRows) prefill_in_tiles<S>(p, task);
  else if (few_fit_tiles<S>(p)) attend_in_tiles<S>(p, task);
  else otherwise(context, i);
}

// Query rows of a prefill task: as many as the second-level cache takes, but several tasks for each thread.
HR_INLINE int64_t rows_per_task(const Attention& p) {
  const int64_t most = smaller(kMaxPrefillRows, 65536 / p.head_dim), all = p.query_start[p.rows] * p.heads;
  return smaller(most, larger<int64_t>(all / (4 * hr_pool_threads()) / kQueryRows * kQueryRows, 2 * kQueryRows));
}

}  // namespace
#endif
