// Causal attention over the paged KV cache, for rows with one query (decode) and with many (prefill).
//
// One task is one KV head of one row and a tile of at most 32 query rows: tokens x the query heads that share the KV head,
// so K and V are read once per tile. KV goes by in tiles of 64 tokens with a running maximum and sum (Milakov &
// Gimelshein 2018; Dao et al. 2022, algorithm 1). A decode row longer than kSplit is cut at fixed positions and the
// parts are merged in order, so a row's result depends neither on the other rows nor on the number of threads. Neighbouring
// rows whose part lies in the same blocks (a shared prefix) go by in one task: as many rows of a tile, one reading.
// Only positions a tile can see are touched: what lies in freed or unused places may be NaN. Where there are matrix tiles, a
// prompt's rows go by in hundreds (amx_prefill.h).
//
// The cache holds the queries' type T, or one-byte values with a float32 scale per token and head (S, its element, is then
// int8_t, fp8 or e5m2): a block's head is [block_tokens][head_dim] values, then [block_tokens] scales. They are exact in T, so
// keys are dequantized without their scales, four at a time, on the way into the same products; scales go onto scores and
// weights. 4-bit numbers become T a tile of positions at a time, and the tile is read as a cache of its own.

#include "../native/amx_tasks.h"
#include "../native/dot_tile.h"
#include "../native/kv_forms.h"

namespace {

constexpr int kValueVectors = kRegisters == 32 ? 4 : 2;

// `count` floats of each of `rows` rows of scores or weights times a scale per column.
HR_INLINE void scale_columns(float* values, int64_t rows, int64_t count, const float* scales) {
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t j = 0; j < count; ++j) values[m * kTokens + j] *= scales[j];
}

// NB keys in the type of the queries: where they lie, or dequantized into `wide`.
template <class T, int NB>
HR_INLINE const T* keys_as(const T* k, int64_t, T*) { return k; }
template <class T, int NB, class S>
HR_INLINE const T* dequantized(const S* k, int64_t head_dim, T* wide) {
  const int64_t count = NB * head_dim;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(wide + i, load(k + i));
  if (i < count) store_part(wide + i, load_part(k + i, count - i), count - i);
  return wide;
}

template <class T, int NB>
HR_INLINE const T* keys_as(const int8_t* k, int64_t head_dim, T* wide) { return dequantized<T, NB>(k, head_dim, wide); }
template <class T, int NB>
HR_INLINE const T* keys_as(const fp8* k, int64_t head_dim, T* wide) { return dequantized<T, NB>(k, head_dim, wide); }
template <class T, int NB>
HR_INLINE const T* keys_as(const e5m2* k, int64_t head_dim, T* wide) { return dequantized<T, NB>(k, head_dim, wide); }

template <class T, int MB, int NB>
HR_INLINE void score_tile(const char* panel, const T* k, int64_t head_dim, float* scores) {
  float out[MB][(NB + 3) / 4 * 4];
  dot_tile<T, MB, NB, 0>(panel, k, head_dim, head_dim, nullptr, out);
  for (int m = 0; m < MB; ++m)
    for (int n = 0; n < NB; ++n) scores[m * kTokens + n] = out[m][n];
}

// scores[rows][NB] of NB consecutive keys.
template <class T, int NB>
HR_INLINE void score_keys(const char* panels, const T* k, int64_t rows, int64_t head_dim, float* scores) {
  for (int64_t m = 0; m < rows; m += 4) {
    const char* panel = panels + panel_bytes<T>(m, head_dim);
    float* to = scores + m * kTokens;
    switch (smaller<int64_t>(rows - m, 4)) {
      case 4: score_tile<T, 4, NB>(panel, k, head_dim, to); break;
      case 3: score_tile<T, 3, NB>(panel, k, head_dim, to); break;
      case 2: score_tile<T, 2, NB>(panel, k, head_dim, to); break;
      default: score_tile<T, 1, NB>(panel, k, head_dim, to);
    }
  }
}

template <class T>
HR_INLINE void fetch_ahead(const T* from, int64_t count) {
  for (int64_t i = 0; i < count * int64_t(sizeof(T)); i += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(from) + i, 0, 2);
}

// Scores of all query rows against the KV positions [low, low + count). Blocks lie anywhere, so the hardware does not see
// them coming: the values of these positions and the keys of the next tile are fetched ahead (1.9x at 33 MB of KV).
// A function of its own, as mix_all: a call for each tile of KV, and the forms of caches share them. In each of thirty
// attend() they were half of what the compiler did for all kernels.
template <class T, class S>
__attribute__((noinline)) void score(const Attention& p, const Task& task, int64_t kv_head, const char* panels, int64_t rows, int64_t low,
                     int64_t count, float* scores) {
  const int64_t D = p.head_dim;
  alignas(64) T wide[kQuantized<S> ? 4 * kMaxHead : 1];
  for (int64_t j = 0; j < count;) {
    const int64_t run = smaller(count - j, p.block_tokens - (low + j) % p.block_tokens);
    const S* k = kv_at<S>(p, task.row, kv_head, low + j, 0);
    const S* v = kv_at<S>(p, task.row, kv_head, low + j, 1);
    const S* next = low + j + kTokens < task.high ? kv_at<S>(p, task.row, kv_head, low + j + kTokens, 0) : v;
    int64_t i = 0;
    for (; i + 4 <= run; i += 4) {
      fetch_ahead(v + i * D, 4 * D);
      fetch_ahead(next + i * D, 4 * D);
      score_keys<T, 4>(panels, keys_as<T, 4>(k + i * D, D, wide), rows, D, scores + j + i);
    }
    for (; i < run; ++i) score_keys<T, 1>(panels, keys_as<T, 1>(k + i * D, D, wide), rows, D, scores + j + i);
    j += run;
  }
}

constexpr F lane_numbers() {
  F numbers{};
  for (int i = 0; i < kLanes; ++i) numbers[i] = float(i);
  return numbers;
}

// Adds the bias of each key's distance to the unscaled scores of a query at `position` against the keys from `low` on.
HR_INLINE void add_bias(const Attention& p, int64_t head, int64_t position, int64_t low, int64_t count, float* s) {
  const float* bias = p.bias + head * p.bias_width;
  const float by = 1.0f / p.scale;
  const int64_t last = p.bias_width - 1, seen = smaller(count, position - low + 1);
  for (int64_t j = 0; j < seen; ++j) s[j] += bias[smaller(position - low - j, last)] * by;
}

// The same where the bias follows from the states of the query, `token`.
HR_INLINE void add_state_bias(const Attention& p, int64_t token, int64_t head, int64_t position, int64_t low, int64_t count,
                              float* s) {
  const float* states = p.states + (token * p.heads + head) * p.bias_rank;
  const int64_t shift = p.bias_width - 1 - position + low, seen = smaller(count, position - low + 1);
  for (int64_t r = 0; r < p.bias_rank; ++r) {
    const float by = states[r] / p.scale;
    const float* bias = p.bias + r * p.bias_width + shift;
    for (int64_t j = larger<int64_t>(-shift, 0); j < seen; ++j) s[j] += bias[j] * by;
  }
}

// Turns one row's scores into weights e^(s - max) where [from, to) is visible; returns what the row's earlier sums must
// be multiplied by. slope: times the distance from the query, `first` of the first position, it goes onto a score.
HR_INLINE float soften(const Attention& p, float* s, int64_t from, int64_t to, int64_t count, float slope, int64_t first,
                       float& max, float& total) {
  for (int64_t j = 0; j < from; ++j) s[j] = -__builtin_inff();
  for (int64_t j = to; j < ceil_div(count, kLanes) * kLanes; ++j) s[j] = -__builtin_inff();
  if (from >= to) {
    for (int64_t j = 0; j < count; ++j) s[j] = 0;
    return 1.0f;
  }
  F best = splat(-__builtin_inff());
  for (int64_t j = 0; j < count; j += kLanes) {
    F v = load(s + j) * p.scale;
    if (p.softcap > 0) v = p.softcap * vtanh(v / p.softcap);
    // The cap would make a hidden position visible again.
    if (p.softcap > 0) v = select(load(s + j) == -__builtin_inff(), load(s + j), v);
    if (slope != 0) v += slope * (lane_numbers() + float(first + j));
    store(s + j, v);
    best = vmax(v, best);
  }
  const float top = larger(largest(best), max);
  const float factor = max == -__builtin_inff() ? 0.0f : vexp(splat(max - top))[0];
  F sums{};
  for (int64_t j = 0; j < count; j += kLanes) {
    F v = load(s + j);
    F weight = select(v == -__builtin_inff(), F{}, vexp(v - top));
    store(s + j, weight);
    sums += weight;
  }
  max = top;
  total = total * factor + sum(sums);
  return factor;
}

// acc[MB][NV] += weights x values for `run` consecutive values; `part` < kLanes: only so many of the last vector exist.
template <class T, int MB, int NV, bool Part>
HR_INLINE void add_values(const T* v, int64_t run, int64_t head_dim, const float* weights, int64_t part, F (&acc)[MB][NV]) {
  for (int64_t j = 0; j < run; ++j, v += head_dim) {
    F value[NV];
    HR_UNROLL for (int n = 0; n < NV; ++n) value[n] = Part ? load_part(v, part) : load(v + n * kLanes);
    HR_UNROLL for (int m = 0; m < MB; ++m) {
      const F weight = splat(weights[m * kTokens + j]);
      HR_UNROLL for (int n = 0; n < NV; ++n) acc[m][n] = fma(weight, value[n], acc[m][n]);
    }
  }
}

// sums[MB][kMaxHead] = sums * factor + weights x V for dimensions [d, d + NV * kLanes).
template <class T, int MB, int NV, bool Part>
HR_INLINE void mix_columns(const Attention& p, const Task& task, int64_t kv_head, int64_t low, int64_t count,
                           const float* weights, const float* factors, int64_t d, float* sums) {
  F acc[MB][NV];
  HR_UNROLL for (int m = 0; m < MB; ++m)
    HR_UNROLL for (int n = 0; n < NV; ++n) acc[m][n] = load(sums + m * sums_stride(p) + d + n * kLanes) * factors[m];
  for (int64_t j = 0; j < count;) {
    const int64_t run = smaller(count - j, p.block_tokens - (low + j) % p.block_tokens);
    const T* v = kv_at<T>(p, task.row, kv_head, low + j, 1) + d;
    add_values<T, MB, NV, Part>(v, run, p.head_dim, weights + j, p.value_dim - d, acc);
    j += run;
  }
  HR_UNROLL for (int m = 0; m < MB; ++m)
    HR_UNROLL for (int n = 0; n < NV; ++n) store(sums + m * sums_stride(p) + d + n * kLanes, acc[m][n]);
}

template <class T, int MB>
HR_INLINE void mix(const Attention& p, const Task& task, int64_t kv_head, int64_t low, int64_t count, const float* weights,
                   const float* factors, float* sums) {
  constexpr int NV = kValueVectors;
  int64_t d = 0;
  for (; d + NV * kLanes <= p.value_dim; d += NV * kLanes)
    mix_columns<T, MB, NV, false>(p, task, kv_head, low, count, weights, factors, d, sums);
  for (; d + kLanes <= p.value_dim; d += kLanes)
    mix_columns<T, MB, 1, false>(p, task, kv_head, low, count, weights, factors, d, sums);
  if (d < p.value_dim) mix_columns<T, MB, 1, true>(p, task, kv_head, low, count, weights, factors, d, sums);
}

template <class T>
__attribute__((noinline)) void mix_all(const Attention& p, const Task& task, int64_t kv_head, int64_t rows, int64_t low, int64_t count,
                       const float* weights, const float* factors, float* sums) {
  for (int64_t m = 0; m < rows; m += 4) {
    const float* w = weights + m * kTokens;
    switch (smaller<int64_t>(rows - m, 4)) {
      case 4: mix<T, 4>(p, task, kv_head, low, count, w, factors + m, sums + m * sums_stride(p)); break;
      case 3: mix<T, 3>(p, task, kv_head, low, count, w, factors + m, sums + m * sums_stride(p)); break;
      case 2: mix<T, 2>(p, task, kv_head, low, count, w, factors + m, sums + m * sums_stride(p)); break;
      default: mix<T, 1>(p, task, kv_head, low, count, w, factors + m, sums + m * sums_stride(p));
    }
  }
}

// S: the type of the cache; of a rotated one queries are rotated likewise.
template <class T, class S = T>
HR_INLINE void fill_queries(const Attention& p, const Task& task, char* panels) {
  const int64_t rows = int64_t(task.tokens) * task.heads;
  const T* q = static_cast<const T*>(p.q);
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t token = p.query_start[task.row] + task.token + m / task.heads;
    const int64_t first = m / 4 * 4;
    const T* row = q + token * p.q_token_stride + (task.head + m % task.heads) * p.q_head_stride;
    alignas(64) T rotated[kIsRotated<S> ? kMaxHead : 1];
    if constexpr (kIsRotated<S>) {
      alignas(64) float wide[kMaxHead];
      rotate(row, p.head_dim, wide);
      for (int64_t k = 0; k < p.head_dim; k += kLanes) store(rotated + k, load(wide + k));
      row = rotated;
    }
    fill_panel_row(row, p.head_dim, m % 4, smaller<int64_t>(rows - first, 4), panels + panel_bytes<T>(first, p.head_dim));
  }
}

template <class T>
HR_INLINE void finish(const Attention& p, const Task& task, const float* max, const float* total, const float* sums) {
  for (int64_t m = 0; m < int64_t(task.tokens) * task.heads; ++m) {
    const float* from = sums + m * sums_stride(p);
    if (task.part != kWholeRow) {
      float* to = part_at(p, task, m);
      to[0] = max[m], to[1] = total[m];
      __builtin_memcpy(to + 2, from, size_t(p.value_dim) * sizeof(float));
      continue;
    }
    const int64_t token = p.query_start[task.row] + task.token + m / task.heads;
    const int64_t head = task.head + m % task.heads;
    const float by = divisor(p, total[m]);
    store_lse(p, token, head, max[m], total[m]);
    T* to = static_cast<T*>(p.out) + (token * p.heads + head) * p.value_dim;
    for (int64_t d = 0; d < p.value_dim; d += kLanes)
      store_part(to + d, load(from + d) / by, smaller<int64_t>(p.value_dim - d, kLanes));
  }
}

// Most: the largest head_dim there is room for.
template <class T, class S, int Most>
void attend(void* context, int64_t i) {
  const Attention& p = *static_cast<const Attention*>(context);
  const Task& task = p.tasks[i];
  const int64_t rows = int64_t(task.tokens) * task.heads, kv_head = task.head / (p.heads / p.kv_heads);
  alignas(64) char panels[kRows * Most * sizeof(float)];
  alignas(64) float sums[kRows * Most];
  alignas(64) float scores[kRows * kTokens];
  alignas(64) T tile[kByTile<S> ? 2 * kTokens * Most : 1];
  float max[kRows], total[kRows], factors[kRows];
  fill_queries<T, S>(p, task, panels);
  for (int64_t m = 0; m < rows; ++m) {
    begin_row(p, task, m, max[m], total[m]);
    for (int64_t d = 0; d < p.value_dim; d += kLanes) store(sums + m * sums_stride(p) + d, F{});
  }
  for (int64_t low = task.low; low < task.high; low += kTokens) {
    const int64_t count = smaller<int64_t>(kTokens, task.high - low);
    if constexpr (kByTile<S>) {
      dequantize_tile<T, S>(p, task.row, kv_head, low, count, tile);
      const TileCall<T> one(p, task, count, tile);
      score<T, T>(one.call, one.task, 0, panels, rows, 0, count, scores);
    } else score<T, S>(p, task, kv_head, panels, rows, low, count, scores);
    float scales[kTokens];
    if (kQuantized<S> && !kByTile<S>) {
      kv_scales(p, task.row, kv_head, low, count, 0, scales);
      scale_columns(scores, rows, count, scales);
      kv_scales(p, task.row, kv_head, low, count, 1, scales);
    }
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t position = last_position(p, task, m);
      const int64_t lowest = first_seen(p.window, own_position(p, task, m));
      const int64_t from = smaller(larger<int64_t>(lowest - low, 0), count);
      const int64_t to = smaller(larger<int64_t>(position + 1 - low, 0), count);
      const int64_t head = task.head + m % task.heads;
      if (p.states != nullptr) {
        const int64_t token = p.query_start[task.row] + task.token + m / task.heads;
        add_state_bias(p, token, head, position, low, count, scores + m * kTokens);
      } else if (p.bias != nullptr) add_bias(p, head, position, low, count, scores + m * kTokens);
      const float slope = p.slopes ? p.slopes[head] : 0.0f;
      factors[m] = soften(p, scores + m * kTokens, from, to, count, slope, low - position, max[m], total[m]);
    }
    if constexpr (kByTile<S>) {
      const TileCall<T> one(p, task, count, tile);
      mix_all<T>(one.call, one.task, 0, rows, 0, count, scores, factors, sums);
      continue;
    }
    if (kQuantized<S>) scale_columns(scores, rows, count, scales);
    if constexpr (!kByTile<S>) mix_all<S>(p, task, kv_head, rows, low, count, scores, factors, sums);
  }
  if constexpr (kIsRotated<S>)
    for (int64_t m = 0; m < rows; ++m) rotate_back(sums + m * sums_stride(p), p.head_dim);
  finish<T>(p, task, max, total, sums);
}

// One task of merging: the parts of one query and head, in order.
struct Merge {
  int64_t part, part_stride, count, token, head;
};

struct Merges {
  const Attention* attention;
  const Merge* merges;
};

template <class T>
void merge(void* context, int64_t i) {
  const Attention& p = *static_cast<const Merges*>(context)->attention;
  const Merge& job = static_cast<const Merges*>(context)->merges[i];
  const float* parts = p.parts + job.part;
  float top = -__builtin_inff(), total = 0;
  for (int64_t j = 0; j < job.count; ++j) top = larger(parts[j * job.part_stride], top);
  const float base = top == -__builtin_inff() ? 0.0f : top;
  alignas(64) float sums[kMaxLatent + kLanes] = {};
  for (int64_t j = 0; j < job.count; ++j) {
    const float* part = parts + j * job.part_stride;
    const float factor = vexp(splat(part[0] - base))[0];
    total += factor * part[1];
    for (int64_t d = 0; d < p.value_dim; d += kLanes) {
      F v = load_part(part + 2 + d, smaller<int64_t>(p.value_dim - d, kLanes));
      store(sums + d, fma(v, factor, load(sums + d)));
    }
  }
  store_lse(p, job.token, job.head, top, total);
  const float by = divisor(p, total);
  T* to = static_cast<T*>(p.out) + (job.token * p.heads + job.head) * p.value_dim;
  for (int64_t d = 0; d < p.value_dim; d += kLanes)
    store_part(to + d, load(sums + d) / by, smaller<int64_t>(p.value_dim - d, kLanes));
}

// The tasks of all rows, written to the arrays; with null arrays only counted. A plan of two passes keeps the hot path
// free of growing containers.
struct Counts {
  int64_t tasks = 0, merges = 0, part_floats = 0;
};

HR_INLINE int64_t lowest(const Attention& p, int64_t position) { return first_seen(p.window, position); }

// The parts that `queries` queries at the end of a row see; one, of no positions, of a row without any.
HR_INLINE RowParts parts_of(const Attention& p, int64_t row, int64_t queries = 1) {
  const int64_t last = p.kv_len[row] - 1, first = lowest(p, last - queries + 1) / kSplit;
  return {0, first, last / kSplit - first + 1};
}

// Where the parts of one query of a row are merged, for each of its heads.
HR_INLINE void plan_merges(const Attention& p, const RowParts& parts, int64_t row, int64_t query, int64_t head,
                           int64_t heads, Counts& n, Merge* merges) {
  for (int64_t h = 0; h < heads; ++h, ++n.merges)
    if (merges)
      merges[n.merges] = {parts.base + ((query * p.heads + head) * parts.count + h) * part_floats(p),
                          heads * part_floats(p), parts.count, p.query_start[row] + query, head + h};
}

// Whether decode rows a and b see part c whole and in the same blocks, so that one task can serve both.
HR_INLINE bool same_part(const Attention& p, int64_t a, int64_t b, int64_t c) {
  const int64_t from = c * kSplit, to = from + kSplit;
  const RowParts of_a = parts_of(p, a), of_b = parts_of(p, b);
  if (of_a.count < 2 || of_b.count < 2 || (of_a.first == c) != (of_b.first == c)) return false;
  if (from < lowest(p, larger(p.kv_len[a], p.kv_len[b]) - 1) || to > smaller(p.kv_len[a], p.kv_len[b])) return false;
  const int64_t block = from / p.block_tokens, blocks = ceil_div(to, p.block_tokens) - block;
  return __builtin_memcmp(p.block_table + a * p.table_stride + block, p.block_table + b * p.table_stride + block,
                          size_t(blocks) * sizeof(int32_t)) == 0;
}

// A task for each group of query heads that share a KV head, at most kRows of them.
template <class Emit>
HR_INLINE void each_heads(const Attention& p, Emit emit) {
  const int64_t group = p.heads / p.kv_heads, most = smaller<int64_t>(group, kRows);
  for (int64_t base = 0; base < p.heads; base += group)
    for (int64_t g = 0; g < group; g += most) emit(base + g, smaller(most, group - g));
}

// Decode rows [begin, end): every part of every row, but a part that neighbours share goes by once for all of them.
HR_INLINE void plan_decodes(const Attention& p, int64_t begin, int64_t end, Counts& n, Task* tasks, Merge* merges,
                            RowParts* all) {
  const int64_t rows_per_task = larger<int64_t>(kRows / smaller<int64_t>(p.heads / p.kv_heads, kRows), 1);
  int64_t lowest_part = INT64_MAX, highest_part = 0;
  for (int64_t row = begin; row < end; ++row) {
    RowParts parts = parts_of(p, row);
    parts.base = n.part_floats;
    if (all) all[row] = parts;
    lowest_part = smaller(lowest_part, parts.first);
    highest_part = larger(highest_part, parts.first + parts.count - 1);
    if (parts.count == 1) continue;
    each_heads(p, [&](int64_t head, int64_t heads) { plan_merges(p, parts, row, 0, head, heads, n, merges); });
    n.part_floats += p.heads * parts.count * part_floats(p);
  }
  for (int64_t c = lowest_part; c <= highest_part; ++c)
    for (int64_t row = begin, count; row < end; row += count) {
      count = 1;
      const RowParts parts = parts_of(p, row);
      if (c < parts.first || c >= parts.first + parts.count) continue;
      while (count < rows_per_task && row + count < end && same_part(p, row, row + count, c)) ++count;
      const int64_t from = larger(c * kSplit, lowest(p, p.kv_len[row] - 1));
      const int64_t to = smaller((c + 1) * kSplit, int64_t(p.kv_len[row]));
      each_heads(p, [&](int64_t head, int64_t heads) {
        if (tasks)
          tasks[n.tasks] = {int32_t(row), 0, int32_t(count), int32_t(head), int32_t(heads), int32_t(from), int32_t(to),
                            c == parts.first, parts.count > 1 ? kPartOfRows : kWholeRow};
        ++n.tasks;
      });
    }
}

// A row with a few queries (speculative verification): cut like a decode row, and each part read once for as many queries
// as make a tile.
HR_INLINE void plan_few_queries(const Attention& p, int64_t row, int64_t queries, Counts& n, Task* tasks, Merge* merges,
                                RowParts* all) {
  RowParts parts = parts_of(p, row, queries);
  parts.base = n.part_floats;
  if (all) all[row] = parts;
  n.part_floats += queries * p.heads * parts.count * part_floats(p);
  const int64_t length = p.kv_len[row];
  each_heads(p, [&](int64_t head, int64_t heads) {
    const int64_t most = larger<int64_t>(kRows / heads, 1);
    for (int64_t query = 0; query < queries; ++query) plan_merges(p, parts, row, query, head, heads, n, merges);
    for (int64_t c = parts.first; c < parts.first + parts.count; ++c)
      for (int64_t token = 0; token < queries; token += most) {
        const int64_t tokens = smaller(most, queries - token), first = length - queries + token;
        const int64_t seen = p.causal ? first + tokens : length;
        int64_t from = larger(c * kSplit, lowest(p, first)), to = smaller((c + 1) * kSplit, seen);
        if (from >= to) from = to = c * kSplit;  // a part of none leaves empty sums
        if (tasks)
          tasks[n.tasks] = {int32_t(row), int32_t(token), int32_t(tokens), int32_t(head), int32_t(heads),
                            int32_t(from), int32_t(to), c == parts.first, kPartOfQueries};
        ++n.tasks;
      }
  });
}

// One KV head after the other, so that its KV stays in the cache; the longest tasks first.
HR_INLINE void plan_prefill(const Attention& p, int64_t row, int64_t queries, Counts& n, Task* tasks) {
  const bool single = p.whole && p.window != INT32_MAX;  // tiles of KV start where the window of their query does
  const int64_t most =
      single ? 1 : larger<int64_t>(p.prefill_rows / smaller<int64_t>(p.heads / p.kv_heads, kRows), 1);
  each_heads(p, [&](int64_t head, int64_t heads) {
    for (int64_t end = queries, tokens; end > 0; end -= tokens) {
      tokens = (end - 1) % most + 1;
      const int64_t token = end - tokens, length = p.kv_len[row];
      const int64_t first = length - queries + token, seen = p.causal ? first + tokens : length;
      if (tasks)
        tasks[n.tasks] = {int32_t(row), int32_t(token), int32_t(tokens), int32_t(head), int32_t(heads),
                          int32_t(lowest(p, first)), int32_t(seen), 1, kWholeRow};
      ++n.tasks;
    }
  });
}

Counts plan(const Attention& p, Task* tasks, Merge* merges, RowParts* parts) {
  Counts n;
  const auto queries = [&](int64_t row) { return p.query_start[row + 1] - p.query_start[row]; };
  for (int64_t row = 0; row < p.rows;) {
    const int64_t count = queries(row);
    if (count != 1 || p.whole) {
      const bool cut = !p.whole && count > 1 && count <= kFewQueries && parts_of(p, row, count).count > 1;
      if (cut) plan_few_queries(p, row, count, n, tasks, merges, parts);
      else plan_prefill(p, row, count, n, tasks);
      ++row;
      continue;
    }
    int64_t end = row + 1;
    while (end < p.rows && queries(end) == 1) ++end;
    plan_decodes(p, row, end, n, tasks, merges, parts);
    row = end;
  }
  return n;
}

// Every row's lengths make sense and every block it will read exists.
HR_INLINE bool sound(const Attention& p, int64_t num_blocks, int64_t num_tokens) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t start = p.query_start[row], queries = p.query_start[row + 1] - start, length = p.kv_len[row];
    if (start < 0 || queries < 0 || start + queries > num_tokens || length < 0) return false;
    if (p.causal && length < queries) return false;
    if (length > p.table_stride * p.block_tokens) return false;
    const int64_t low = first_seen(p.window, length - queries);
    for (int64_t j = low / p.block_tokens; j < ceil_div(length, p.block_tokens); ++j) {
      const int64_t block = p.block_table[row * p.table_stride + j];
      if (block < 0 || block >= num_blocks) return false;
    }
  }
  return true;
}

int32_t run_tasks(Attention& p, HrTask attend_task, HrTask merge_task) {
  const Counts n = plan(p, nullptr, nullptr, nullptr);
  const int64_t bytes = n.merges * int64_t(sizeof(Merge)) + p.rows * int64_t(sizeof(RowParts)) +
                        n.tasks * int64_t(sizeof(Task)) + n.part_floats * 4;
  char* memory = static_cast<char*>(hr_scratch(bytes));
  if (memory == nullptr && bytes > 0) return HR_NO_MEMORY;
  Merge* merges = reinterpret_cast<Merge*>(memory);
  RowParts* row_parts = reinterpret_cast<RowParts*>(merges + n.merges);
  Task* tasks = reinterpret_cast<Task*>(row_parts + p.rows);
  p.parts = reinterpret_cast<float*>(tasks + n.tasks);
  p.tasks = tasks, p.row_parts = row_parts;
  plan(p, tasks, merges, row_parts);
  hr_parallel(attend_task, &p, n.tasks);
  Merges all{&p, merges};
  hr_parallel(merge_task, &all, n.merges);
  return HR_OK;
}

template <class T, class S = T, int Most = kMaxHead>
int32_t run(Attention& p) {
  HrTask task = attend<T, S, Most>;
#if defined(HR_AMX)
  if constexpr (kIsBf16<T> && kInTiles<S> && Most == kMaxHead)
    if (fits_tiles<S>(p)) {
      p.prefill_rows = rows_per_task(p);
      task = attend_anyhow<S, attend<T, S, Most>>;
    }
#endif
  return run_tasks(p, task, merge<T>);
}

// Values that are the beginning of the keys, one KV head.
int32_t run_latent(Attention& p, int32_t dtype) {
  if (dtype == HR_BF16) return run<bf16, bf16, kMaxLatent>(p);
  if (dtype == HR_F16) return run<fp16, fp16, kMaxLatent>(p);
  if (dtype == HR_F32) return run<float, float, kMaxLatent>(p);
  return HR_BAD_DTYPE;
}

template <class S>
int32_t run_quantized(Attention& p, int32_t dtype) {
  if (dtype == HR_BF16) return run<bf16, S>(p);
  if (dtype == HR_F16) return run<fp16, S>(p);
  if (dtype == HR_F32) return run<float, S>(p);
  return HR_BAD_DTYPE;
}

}  // namespace

// q [num_tokens, heads, head_dim] with strides in elements and contiguous head_dim; out the same, contiguous.
// lse [num_tokens, heads], or null: the natural logarithm of each query's sum of exponentials of its scores, the sink's among
// them; -Inf of one that sees nothing.
// slopes: ALiBi's per query head, or null; causal queries only.
// bias [heads, bias_width] float32, or null: what is added to the scaled score of a key, by how many positions it stands before
// its query; from bias_width - 1 on it is the same. With states [num_tokens, heads, bias_rank] float32 it is [bias_rank,
// bias_width], the farthest distance first: see paged_attention.h.
// kv: block b, half h (0 keys, 1 values), head k, token t at b * block_stride + h * value_offset + k * head_stride +
// t * head_dim, strides in elements of the cache. window 0: all positions; -C: chunks of C. softcap 0: none. mode: 0 a cache of the queries' type,
// 1 int8, 2 e4m3, 3 e5m2, 16 4 bits, 17 e2m1, 18 and 19 rotated 4 and 3 bits, 32 and 33 levels of so many; plus 4 for results that do not depend on how many queries of a row are computed together; plus 8 if
// every query of a row sees all of its positions.
HR_PUBLIC int32_t HR_EXPORT(attention)(const void* q, const void* kv, void* out, const int32_t* query_start,
                                       const int32_t* kv_len, const int32_t* block_table, const float* sinks,
                                       const float* slopes, const float* bias, const float* states, float* lse,
                                       int64_t bias_width, int64_t bias_rank, int64_t rows, int64_t table_stride, int64_t num_tokens, int64_t num_blocks, int64_t heads,
                                       int64_t kv_heads, int64_t head_dim, int64_t block_tokens, int64_t q_token_stride,
                                       int64_t q_head_stride, int64_t block_stride, int64_t value_offset,
                                       int64_t head_stride, int64_t window, float scale, float softcap, int32_t dtype,
                                       int32_t mode) {
  if (head_dim < 1 || head_dim > kMaxHead || kv_heads < 1 || heads < 1 || heads % kv_heads || block_tokens < 1)
    return HR_BAD_SHAPE;
  if (bias != nullptr && (bias_width < 1 || scale == 0 || softcap > 0 || (mode & 8) != 0)) return HR_BAD_SHAPE;
  if (states != nullptr && (bias == nullptr || bias_rank < 1)) return HR_BAD_SHAPE;
  Attention p{q, kv, out, query_start, kv_len, block_table, sinks, lse, rows, table_stride, heads, kv_heads, head_dim,
              head_dim, block_tokens, q_token_stride, q_head_stride, block_stride, value_offset, head_stride,
              window != 0 ? window : INT32_MAX, scale, softcap, kRows, (mode & 8) == 0, (mode & 4) != 0, nullptr, nullptr, nullptr};
  p.slopes = slopes;
  p.bias = bias, p.bias_width = bias_width;
  p.states = states, p.bias_rank = bias_rank;
  if (!sound(p, num_blocks, num_tokens)) return HR_BAD_INDEX;
  const int32_t form = (mode & 3) | (mode & 48) >> 2;
  if (form == 1) return run_quantized<int8_t>(p, dtype);
  if (form == 2) return run_quantized<fp8>(p, dtype);
  if (form == 3) return run_quantized<e5m2>(p, dtype);
  if (form == 4) return head_dim % 2 ? HR_BAD_SHAPE : run_quantized<nibbles>(p, dtype);
  if (form == 5) return head_dim % 2 ? HR_BAD_SHAPE : run_quantized<e2m1>(p, dtype);
  const bool whole = head_dim >= 16 && (head_dim & (head_dim - 1)) == 0;
  if (form == 6) return whole ? run_quantized<rotated4>(p, dtype) : int32_t(HR_BAD_SHAPE);
  if (form == 7) return whole ? run_quantized<rotated3>(p, dtype) : int32_t(HR_BAD_SHAPE);
  if (form == 8) return whole ? run_quantized<levels4>(p, dtype) : int32_t(HR_BAD_SHAPE);
  if (form == 9) return whole ? run_quantized<levels3>(p, dtype) : int32_t(HR_BAD_SHAPE);
  if (form != 0) return HR_BAD_DTYPE;
  if (dtype == HR_BF16) return run<bf16>(p);
  if (dtype == HR_F16) return run<fp16>(p);
  if (dtype == HR_F32) return run<float>(p);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(attention)

// Latent attention: one KV head for all query heads, whose values are the first value_dim elements of its keys.
// q [num_tokens, heads, head_dim], contiguous; out [num_tokens, heads, value_dim]; lse as above. kv: block b, token t at
// b * block_stride + t * head_dim. mode: 4 for results that do not depend on how many queries of a row are computed together.
HR_PUBLIC int32_t HR_EXPORT(latent_attention)(const void* q, const void* kv, void* out, const int32_t* query_start,
                                              const int32_t* kv_len, const int32_t* block_table, float* lse, int64_t rows,
                                              int64_t table_stride, int64_t num_tokens, int64_t num_blocks, int64_t heads,
                                              int64_t head_dim, int64_t value_dim, int64_t block_tokens,
                                              int64_t block_stride, float scale, int32_t dtype, int32_t mode) {
  if (head_dim < 1 || head_dim > kMaxLatent || value_dim < 1 || value_dim > head_dim || heads < 1 || block_tokens < 1)
    return HR_BAD_SHAPE;
  Attention p{q, kv, out, query_start, kv_len, block_table, nullptr, lse, rows, table_stride, heads, 1, head_dim, value_dim,
              block_tokens, heads * head_dim, head_dim, block_stride, 0, 0, INT32_MAX, scale, 0, kRows, true, (mode & 4) != 0,
              nullptr, nullptr, nullptr};
  if (!sound(p, num_blocks, num_tokens)) return HR_BAD_INDEX;
  return run_latent(p, dtype);
}
HR_REPLAYABLE(latent_attention)
