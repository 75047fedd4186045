// y[M,N] = x[M,K] w[N,K]^T + bias[N] with packed e4m3 weights (layout.py) and plain activations.
//
// Weights are dequantized in registers to bf16, which holds them exactly (fp8.h), and multiplied by rows of bf16, or, where
// there is no instruction for that and with rows of another type, of float32. The scale of an output multiplies its
// finished sum; where groups of inputs have a scale, a panel is one such panel for each group, whose results are added. As
// for int8 weights a panel of 64 outputs is one stream of bytes, lanes are outputs, and a result is one chain of operations
// whatever the rows beside it.
//
// By vectors few rows have their weights dequantized on the way: four vectors of outputs at a time, or, so that more rows share
// what was dequantized, two. For many rows a stretch of inputs is dequantized into the first-level cache and all rows go by.
// The products and their order are the same.
//
// With matrix tiles 32 inputs of a panel become the right operand of four tiles in the first-level cache, for a single row
// too: a tile's sums are rounded in another order than the vector instruction's. For many rows 512 inputs are dequantized,
// and all rows go by before the next ones.

#include "../native/amx_rows.h"
#include "../native/fp8.h"
#include "../native/panel_calls.h"
#include "../native/panel_product.h"

namespace {

constexpr int64_t kStepBytes = kPanel * 4;  // 4 weights of 64 outputs
constexpr int64_t kChunkBytes = 96 * 1024, kRowBlock = 512;
constexpr int64_t kPadded = 32;  // x has zeros up to a multiple of it: the inputs of a tile
constexpr int64_t kFetched = 16 * kStepBytes;        // how far ahead
// Rows of x per tile of kVectors vectors of sums: as many as leave registers for what is dequantized.
constexpr int kRows = kRegisters == 32 ? 4 : 2;
constexpr int kWideRows = kRegisters == 32 ? 12 : 4;        // beside two vectors
constexpr int kDequantizedRows = kRegisters == 32 ? 6 : 2;  // where it was dequantized before
constexpr int64_t kFewRows = 64, kStretch = 128;            // inputs that are dequantized at once for more rows

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HR_BF16_DOT 1
#endif

struct Gemm {
  const char* x;  // [M, x_stride bytes]: bf16 or float32, padded with zeros
  int64_t x_stride;
  const uint8_t* w;
  const void* bias;
  void* y;
  int64_t M, N, K, y_stride, panel_bytes, panels, panels_per_chunk, row_blocks;
  int64_t group;       // inputs that share a scale of an output
  int32_t activation;  // -1, or the first half of the outputs gates the second
  const Top* top;      // null, or where the best results are kept, and y is memory of a chunk
  int64_t y_first;     // the output that y begins with
  // For copying x in parallel.
  const void* source;
  int64_t source_stride, rows_per_chunk;
};

template <class X>
HR_INLINE int64_t padded_bytes(int64_t K) { return ceil_div(K, kPadded) * kPadded * int64_t(sizeof(X)); }

// acc += x[0] * (the lower halves of w) + x[1] * (the upper ones).
HR_INLINE F add_pair(F acc, const float* x, U w) {
  acc = fma((F)(w << 16), x[0], acc);
  return fma((F)(w & 0xffff0000u), x[1], acc);
}
HR_INLINE F add_pair(F acc, const bf16* x, U w) {
  uint32_t pair;
  __builtin_memcpy(&pair, x, 4);
  return Dot<bf16>::add(acc, U{} + pair, w);
}

// MB rows against V vectors of outputs, from `column` of the panel on.
template <class X, int MB, int V>
HR_INLINE void tile(const Gemm& p, const uint8_t* panel, int64_t column, int64_t m, bool fetch, float* results) {
  F acc[MB][V] = {};
  const X* x[MB];
  HR_UNROLL for (int i = 0; i < MB; ++i) x[i] = reinterpret_cast<const X*>(p.x + (m + i) * p.x_stride);
  const uint8_t* w = panel + kPanel * 4 + column * 4;
  for (int64_t k = 0; k < p.K; k += 4, w += kStepBytes) {
    if (fetch) HR_UNROLL for (int j = 0; j < V; ++j) __builtin_prefetch(w + kFetched + j * sizeof(U), 0, 3);
    U first[V], second[V];
    HR_UNROLL for (int j = 0; j < V; ++j) dequantize_pairs(w + j * sizeof(U), first[j], second[j]);
    HR_UNROLL for (int i = 0; i < MB; ++i) HR_UNROLL for (int j = 0; j < V; ++j)
      acc[i][j] = add_pair(acc[i][j], x[i] + k, first[j]);
    HR_UNROLL for (int i = 0; i < MB; ++i) HR_UNROLL for (int j = 0; j < V; ++j)
      acc[i][j] = add_pair(acc[i][j], x[i] + k + 2, second[j]);
  }
  HR_UNROLL for (int j = 0; j < V; ++j) {
    const F scale = load_raw<F>(panel + (column + j * kLanes) * 4);
    HR_UNROLL for (int i = 0; i < MB; ++i) {
      const F v = acc[i][j] * scale;
      __builtin_memcpy(results + i * kPanel + column + j * kLanes, &v, sizeof v);
    }
  }
}

// Inputs k .. of a panel, as many as a stretch holds, as pairs [pair of inputs][64 outputs].
HR_INLINE void dequantize_stretch(const uint8_t* panel, int64_t k, int64_t count, U* to) {
  const uint8_t* w = panel + kPanel * 4 + k / 4 * kStepBytes;
  constexpr int across = kPanel / kLanes;
  for (int64_t i = 0; i < count; i += 4, w += kStepBytes, to += 2 * across)
    HR_UNROLL for (int j = 0; j < across; ++j) {
      __builtin_prefetch(w + kStretch / 4 * kStepBytes + j * sizeof(U), 0, 3);
      dequantize_pairs(w + j * sizeof(U), to[j], to[across + j]);
    }
}

// The products of MB rows with a stretch, on top of the sums in `results` but for the first stretch.
template <class X, int MB>
HR_INLINE void stretch_tile(const Gemm& p, const U* pairs, int64_t column, int64_t m, int64_t k, int64_t count, float* results) {
  F acc[MB][kVectors] = {};
  const X* x[MB];
  HR_UNROLL for (int i = 0; i < MB; ++i) x[i] = reinterpret_cast<const X*>(p.x + (m + i) * p.x_stride) + k;
  if (k > 0) HR_UNROLL for (int i = 0; i < MB; ++i) HR_UNROLL for (int j = 0; j < kVectors; ++j)
    acc[i][j] = load_raw<F>(results + i * kPanel + column + j * kLanes);
  const U* w = pairs + column / kLanes;
  for (int64_t at = 0; at < count; at += 2, w += kPanel / kLanes)
    HR_UNROLL for (int j = 0; j < kVectors; ++j) HR_UNROLL for (int i = 0; i < MB; ++i)
      acc[i][j] = add_pair(acc[i][j], x[i] + at, w[j]);
  HR_UNROLL for (int i = 0; i < MB; ++i) HR_UNROLL for (int j = 0; j < kVectors; ++j)
    __builtin_memcpy(results + i * kPanel + column + j * kLanes, &acc[i][j], sizeof(F));
}

// results[rows][64] of more than kRows rows.
template <class X>
void dequantized_rows(const Gemm& p, const uint8_t* panel, int64_t m, int64_t rows, float* results) {
  alignas(64) U pairs[kStretch / 2 * (kPanel / kLanes)];
  const int64_t padded = ceil_div(p.K, int64_t(4)) * 4;
  for (int64_t k = 0; k < padded; k += kStretch) {
    const int64_t count = smaller(kStretch, padded - k);
    dequantize_stretch(panel, k, count, pairs);
    for (int64_t i = 0; i < rows;) {
      const int64_t part = ceil_div(rows - i, ceil_div(rows - i, int64_t(kDequantizedRows)));
      constexpr int most = kDequantizedRows;
      float* to = results + i * kPanel;
      for (int64_t column = 0; column < kPanel; column += kVectors * kLanes) {
        if (most >= 6 && part == 6) stretch_tile<X, most >= 6 ? 6 : 1>(p, pairs, column, m + i, k, count, to);
        if (most >= 5 && part == 5) stretch_tile<X, most >= 5 ? 5 : 1>(p, pairs, column, m + i, k, count, to);
        if (most >= 4 && part == 4) stretch_tile<X, most >= 4 ? 4 : 1>(p, pairs, column, m + i, k, count, to);
        if (most >= 3 && part == 3) stretch_tile<X, most >= 3 ? 3 : 1>(p, pairs, column, m + i, k, count, to);
        if (part == 2) stretch_tile<X, 2>(p, pairs, column, m + i, k, count, to);
        if (part == 1) stretch_tile<X, 1>(p, pairs, column, m + i, k, count, to);
      }
      i += part;
    }
  }
  for (int64_t column = 0; column < kPanel; column += kLanes) {
    const F scale = load_raw<F>(panel + column * 4);
    for (int64_t i = 0; i < rows; ++i) {
      const F v = load_raw<F>(results + i * kPanel + column) * scale;
      __builtin_memcpy(results + i * kPanel + column, &v, sizeof v);
    }
  }
}

// The tile of so many rows, at most MB.
template <class X, int MB, int V>
HR_INLINE void tile_of(int64_t rows, const Gemm& p, const uint8_t* panel, int64_t column, int64_t m, bool fetch, float* results) {
  if (rows == MB) return tile<X, MB, V>(p, panel, column, m, fetch, results);
  if constexpr (MB > 1) tile_of<X, MB - 1, V>(rows, p, panel, column, m, fetch, results);
}

// results[rows][64]: rows [m, m + rows) against one panel.
template <class X, int MB, int V>
HR_INLINE void rows_of(const Gemm& p, const uint8_t* panel, int64_t m, int64_t rows, float* results) {
  const int64_t end = m + rows;
  for (bool fetch = true; m < end; fetch = false) {
    const int64_t count = ceil_div(end - m, ceil_div(end - m, int64_t(MB)));
    for (int64_t column = 0; column < kPanel; column += V * kLanes)
      tile_of<X, MB, V>(count, p, panel, column, m, fetch, results);
    m += count, results += count * kPanel;
  }
}
template <class X>
HR_INLINE void vector_rows(const Gemm& p, const uint8_t* panel, int64_t m, int64_t rows, float* results) {
  if (rows <= kRows) rows_of<X, kRows, kVectors>(p, panel, m, rows, results);
  else if (rows <= kFewRows) rows_of<X, kWideRows, 2>(p, panel, m, rows, results);
  else dequantized_rows<X>(p, panel, m, rows, results);
}

#if defined(HR_AMX)
constexpr int64_t kTileSteps = kPadded / 4;  // of 4 inputs in one tile
constexpr int64_t kBlockTiles = 16;          // of inputs that are dequantized at once for many rows
constexpr int64_t kTilesFetched = 64 * kStepBytes;  // how far ahead, into the second-level cache

// 32 inputs of 16 TILES outputs, of which `steps` of 4 inputs are there, as tiles [16 pairs of inputs][16 outputs].
template <int TILES>
HR_INLINE void dequantize_tiles(const uint8_t* w, int64_t steps, bool fetch, char* to) {
  for (int64_t s = 0; s < kTileSteps; ++s, w += kStepBytes, to += 128) {
    HR_UNROLL for (int t = 0; t < TILES; ++t) {
      U first{}, second{};
      if (s < steps) dequantize_pairs(w + t * 64, first, second);
      if (fetch) __builtin_prefetch(w + kTilesFetched + t * 64, 0, 2);
      __builtin_memcpy(to + t * kTileBytes, &first, 64);
      __builtin_memcpy(to + t * kTileBytes + 64, &second, 64);
    }
  }
}

// At most 32 rows: each stretch of 32 inputs is dequantized, multiplied and forgotten.
template <bool TWO>
HR_INLINE void few_rows(const Gemm& p, const uint8_t* panel, int64_t m, float* results) {
  alignas(64) char tiles[2][4 * kTileBytes];  // dequantized into the one while the other is read
  const int64_t steps = ceil_div(p.K, int64_t(4));
  for (int64_t column = 0; column < kPanel; column += TWO ? 32 : 64) {
    const uint8_t* w = panel + kPanel * 4 + column * 4;
    const char* x = p.x + m * p.x_stride;
    zero_tiles();
    for (int64_t s = 0, turn = 0; s < steps; s += kTileSteps, turn ^= 1, w += kTileSteps * kStepBytes, x += 64) {
      if (s + kTileSteps <= steps) dequantize_tiles<TWO ? 2 : 4>(w, kTileSteps, true, tiles[turn]);
      else dequantize_tiles<TWO ? 2 : 4>(w, steps - s, false, tiles[turn]);
      const TileRows rows{x, p.x_stride, kTile * p.x_stride, 64};
      step_tiles<TWO>(rows, tiles[turn]);
    }
    each_result<TWO>(results, column, store_tiles);
  }
}

HR_INLINE void many_rows(const Gemm& p, const uint8_t* panel, int64_t m, int64_t rows, char* tiles, float* results) {
  const int64_t steps = ceil_div(p.K, int64_t(4)), all = ceil_div(steps, kTileSteps);
  for (int64_t t = 0; t < all; t += kBlockTiles) {
    const int64_t count = smaller(all - t, kBlockTiles);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t s = (t + i) * kTileSteps;
      dequantize_tiles<4>(panel + kPanel * 4 + s * kStepBytes, steps - s, true, tiles + i * 4 * kTileBytes);
    }
    int64_t shaped = 0;
    for (int64_t i = 0; i < rows; i += 2 * kTile) {
      const int64_t block = smaller(rows - i, 2 * kTile);
      if (block != shaped) tile_shapes(shaped = block);
      const TileRows x{p.x + (m + i) * p.x_stride + t * 64, p.x_stride, kTile * p.x_stride, 64};
      if (block <= kTile) block_rows<false>(x, tiles, 0, count, t == 0, results + i * kPanel);
      else for (int64_t column = 0; column < kPanel; column += 32)
        block_rows<true>(x, tiles, column, count, t == 0, results + i * kPanel);
    }
  }
}

// The same by matrix tiles. `tiles`: memory for what is dequantized.
HR_INLINE void tile_rows(const Gemm& p, const uint8_t* panel, int64_t m, int64_t rows, char* tiles, float* results) {
  if (rows > 2 * kTile) many_rows(p, panel, m, rows, tiles, results);
  else if (rows > kTile) few_rows<true>(p, panel, m, results);
  else few_rows<false>(p, panel, m, results);
  for (int64_t column = 0; column < kPanel; column += kLanes) {
    const F scale = load_raw<F>(panel + column * 4);
    for (int64_t i = 0; i < rows; ++i) store(results + i * kPanel + column, load(results + i * kPanel + column) * scale);
  }
}
#endif

template <class X>
constexpr bool kTiles =
#if defined(HR_AMX)
    sizeof(X) == 2;
#else
    false;
#endif

// results[rows][64] of inputs with a scale in common. `dequantized`: memory of this thread.
template <class X>
HR_INLINE void group_results(const Gemm& p, const uint8_t* panel, int64_t m, int64_t rows,
                             [[maybe_unused]] char* dequantized, float* results) {
#if defined(HR_AMX)
  if constexpr (kTiles<X>) return tile_rows(p, panel, m, rows, dequantized, results);
#endif
  vector_rows<X>(p, panel, m, rows, results);
}

// The bytes of whole tiles of results.
HR_INLINE int64_t results_bytes(int64_t rows) { return ceil_div(rows, int64_t(32)) * 32 * kPanel * 4; }
template <class X>
constexpr int64_t kDequantizedBytes = kTiles<X> ? 64 * 1024 : 0;

// results[rows][64]. `memory` of this thread: kDequantizedBytes, and results of a group.
template <class X>
void panel_results(const Gemm& p, const uint8_t* panel, int64_t m, int64_t rows, char* memory, float* results) {
  float* one = reinterpret_cast<float*>(memory + kDequantizedBytes<X>);
  for (int64_t k = 0; k < p.K; k += p.group) {
    Gemm group = p;
    group.K = smaller(p.group, p.K - k), group.x += k * int64_t(sizeof(X));
    group_results<X>(group, panel, m, rows, memory, k == 0 ? results : one);
    panel += kPanel * 4 + group.K / 4 * kStepBytes;
    if (k > 0) for (int64_t i = 0; i < rows * kPanel; i += kLanes) store(results + i, load(results + i) + load(one + i));
  }
}

template <class X, class Y>
void panels_chunk(void* context, int64_t i) {
  Gemm p = *static_cast<const Gemm*>(context);
  const int64_t first = i / p.row_blocks * p.panels_per_chunk, row = i % p.row_blocks * kRowBlock;
  const int64_t end = smaller(first + p.panels_per_chunk, p.panels), rows = smaller(p.M - row, kRowBlock);
  if (p.top != nullptr) {
    p.y = hr_scratch(p.M * p.y_stride * int64_t(sizeof(float)), 2), p.y_first = first * kPanel;
    if (p.y == nullptr) __builtin_trap();
  }
  const int64_t bytes = results_bytes(rows);
  char* memory = static_cast<char*>(hr_scratch(3 * bytes + kDequantizedBytes<X>, 1));
  if (memory == nullptr) __builtin_trap();
  float* results = reinterpret_cast<float*>(memory);
  float* ups = reinterpret_cast<float*>(memory + bytes);
  memory += 2 * bytes;
#if defined(HR_AMX)
  if (kTiles<X>) tile_shapes(smaller<int64_t>(rows, 2 * kTile));
#endif
  for (int64_t j = first; j < end; ++j) {
    panel_results<X>(p, p.w + j * p.panel_bytes, row, rows, memory, results);
    if (p.activation >= 0) panel_results<X>(p, p.w + (j + p.panels) * p.panel_bytes, row, rows, memory, ups);
    put_panel<Y>(p, j, row, rows, results, ups);
  }
#if defined(HR_AMX)
  if (kTiles<X>) tiles_release();
#endif
  if (p.top != nullptr)
    top_take(*p.top, i, static_cast<const float*>(p.y), p.y_stride, p.y_first, smaller(end * kPanel, p.N) - p.y_first);
}

HR_INLINE void copy_values(const bf16* from, int64_t count, bf16* to) { __builtin_memcpy(to, from, size_t(count) * 2); }
template <class T>
HR_INLINE void copy_values(const T* from, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += kLanes) store(to + k, k + kLanes <= count ? load(from + k) : load_part(from + k, count - k));
}

// One chunk of rows of x into the scratch memory.
template <class T, class X>
void copy_chunk(void* context, int64_t i) {
  const Gemm& p = *static_cast<const Gemm*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.M);
  for (int64_t m = i * p.rows_per_chunk; m < end; ++m) {
    X* to = reinterpret_cast<X*>(const_cast<char*>(p.x) + m * p.x_stride);
    __builtin_memset(to + p.K / 16 * 16, 0, size_t(padded_bytes<X>(p.K) - p.K / 16 * 16 * int64_t(sizeof(X))));
    copy_values(static_cast<const T*>(p.source) + m * p.source_stride, p.K, to);
  }
}

template <class T, class X, class Y>
int32_t multiply(Gemm& p) {
  // A line more than the values take: rows a power of two apart would meet in the same few sets of a cache.
  p.x_stride = padded_bytes<X>(p.K) + 64;
  p.x = static_cast<const char*>(hr_scratch(p.M * p.x_stride));
  if (p.x == nullptr) return HR_NO_MEMORY;
  p.rows_per_chunk = larger<int64_t>(1, 32 * 1024 / p.K);
  hr_parallel(copy_chunk<T, X>, &p, ceil_div(p.M, p.rows_per_chunk));
  // With an activation a chunk does panels of the first half, and those that they gate.
  if (p.activation >= 0) p.N /= 2;
  p.panels = ceil_div(p.N, kPanel);
  p.panel_bytes = ceil_div(p.K, p.group) * kPanel * 4 + ceil_div(p.K, int64_t(4)) * kStepBytes;
  p.row_blocks = ceil_div(p.M, kRowBlock);
  p.panels_per_chunk = larger<int64_t>(1, p.M > kRows ? 1 : kChunkBytes / p.panel_bytes);
  if (p.top != nullptr) p.panels_per_chunk = kTopOutputs / kPanel, p.y_stride = kTopOutputs;
  hr_parallel(panels_chunk<X, Y>, &p, ceil_div(p.panels, p.panels_per_chunk) * p.row_blocks);
  return HR_OK;
}

template <class T, class Y>
int32_t run(Gemm& p) { return multiply<T, float, Y>(p); }
#if defined(HR_BF16_DOT)
template <>
int32_t run<bf16, bf16>(Gemm& p) { return multiply<bf16, bf16, bf16>(p); }
template <>
int32_t run<bf16, float>(Gemm& p) { return multiply<bf16, bf16, float>(p); }
#endif

struct Run {
  template <class T, class Y>
  static int32_t of(Gemm& p) { return run<T, Y>(p); }
};

// Inputs that share a scale, as the kernel counts them; false: there is no such group.
bool take_group(Gemm& p, int64_t group) {
  p.group = group > 0 && group < p.K ? group : p.K;
  return group >= 0 && group % kPadded == 0;
}

template <class X>
HR_INLINE void panel_of_rows(const PanelRows& rows, int64_t K, int64_t group, const uint8_t* panel, int64_t count, float* results) {
  Gemm p{};
  p.x = static_cast<const char*>(rows.x), p.x_stride = rows.stride, p.w = panel, p.K = K, p.M = count;
  char* memory = static_cast<char*>(hr_scratch(results_bytes(count) + kDequantizedBytes<X>, 1));
  if (memory == nullptr || !take_group(p, group)) __builtin_trap();
#if defined(HR_AMX)
  if (kTiles<X>) tile_shapes(smaller<int64_t>(count, 2 * kTile));
#endif
  panel_results<X>(p, panel, 0, count, memory, results);
#if defined(HR_AMX)
  if (kTiles<X>) tiles_release();
#endif
}

}  // namespace

// See panel_product.h.
bool HR_EXPORT(fp8_takes_bf16)() {
#if defined(HR_BF16_DOT)
  return true;
#else
  return false;
#endif
}
void HR_EXPORT(fp8_panel)(const PanelRows& rows, int64_t K, int64_t group, const uint8_t* panel, int64_t count, bool is_bf16,
                         float* results) {
#if defined(HR_BF16_DOT)
  if (is_bf16) return panel_of_rows<bf16>(rows, K, group, panel, count, results);
#endif
  if (!is_bf16) panel_of_rows<float>(rows, K, group, panel, count, results);
}

// As `linear_quant`, with panels of e4m3 values; `group` inputs, a multiple of 32, share a scale, 0: all.
HR_PUBLIC int32_t HR_EXPORT(linear_fp8)(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N,
                                        int64_t K, int64_t group, int64_t x_stride, int64_t y_stride, int32_t activation,
                                        int32_t dtype, int32_t y_dtype) {
  Gemm p{};
  p.K = K;
  if (!sound(M, N, K, activation, bias) || !take_group(p, group)) return HR_BAD_SHAPE;
  if (M == 0 || N == 0) return HR_OK;
  p.w = static_cast<const uint8_t*>(w), p.bias = bias, p.y = y, p.source = x;
  p.M = M, p.N = N, p.activation = activation, p.y_stride = y_stride, p.source_stride = x_stride;
  return run_typed<Run>(p, dtype, y_dtype);
}
HR_REPLAYABLE(linear_fp8)

// The `count` best of the results that `linear_fp8` would give in float32: outputs and values [M, count], best first.
HR_PUBLIC int32_t HR_EXPORT(linear_fp8_top)(const void* x, const void* w, int64_t* ids, float* values, int64_t M,
                                            int64_t N, int64_t K, int64_t group, int64_t x_stride, int64_t count,
                                            int32_t dtype) {
  Gemm p{};
  p.K = K;
  if (!sound(M, N, K, -1, nullptr) || !take_group(p, group)) return HR_BAD_SHAPE;
  p.w = static_cast<const uint8_t*>(w), p.source = x;
  p.M = M, p.N = N, p.activation = -1, p.source_stride = x_stride;
  return run_top<Run>(p, ids, values, count, dtype);
}
HR_REPLAYABLE(linear_fp8_top)
