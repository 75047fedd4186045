// y[M,N] = x[M,K] w[N,K]^T + bias[N] with packed int8 weights (layout.py) and int8 activations.
//
// Rows of x become int8 first, with one scale per row, unless the norm before has left them so (linear_quant_int8_rows).
// Then each thread takes panels of 64 outputs: a panel is one stream of bytes, read from memory once and, for more rows
// than a tile holds, again from the second-level cache; so the same loop serves one row and a whole prompt. Lanes are
// outputs: there is no sum over lanes, and a result is one fixed chain of operations whatever the rows beside it.
//
// Weights are stored with an offset (+128) because the dot product instruction multiplies unsigned by signed;
// the accumulator starts at -offset * sum(x), which takes it out again exactly.

#include "../native/amx_rows.h"
#include "../native/int8.h"
#include "../native/panel_calls.h"
#include "../native/panel_product.h"

namespace {

constexpr int64_t kStepBytes = kPanel * 4;                         // 4 weights of 64 outputs
constexpr int64_t kChunkBytes = 96 * 1024, kRowBlock = 192;
// Rows of x per tile of kVectors vectors of outputs: as many accumulators as the registers hold.
constexpr int kRows = kRegisters == 32 ? 6 : 2;

struct Quantized {
  const int8_t* quantized;   // [M, stride]
  const float* scales;   // [M]
  const int32_t* sums;   // of quantized values: [M]
  int64_t stride;
};

struct Gemm {
  Quantized x;
  const uint8_t* w;
  const void* bias;
  void* y;
  int64_t M, N, K, y_stride, panel_bytes, panels, panels_per_chunk, row_block, threads;
  int32_t activation;  // -1, or the first half of the outputs gates the second
  const Top* top;  // null, or where the best results are kept, and y is memory of a chunk
  int64_t y_first;     // the output that y begins with
  // null, or what the sums of outputs begin with, of whole panels; x may hold -128.
  const int32_t* begin;
  bool full;
  float x_scale, x_zero;  // of all rows; 0: each has its own scale
  // For quantizing in parallel.
  const void* source;
  int64_t source_stride, rows_per_chunk;
};

// Adds the products of MB rows of x with kVectors vectors of outputs. FULL: see dot8.
template <bool FULL, int MB>
HR_INLINE void add_up(const Gemm& p, const int8_t* const (&x)[MB], const uint8_t* w, bool fetch, I (&acc)[MB][kVectors]) {
  for (int64_t k = 0; k < p.K; k += 4, w += kStepBytes) {
    I b[kVectors];
    HR_UNROLL for (int j = 0; j < kVectors; ++j) b[j] = load_raw<I>(w + j * sizeof(I));
    if (fetch) HR_UNROLL for (int j = 0; j < kVectors; ++j)
      __builtin_prefetch(w + 16 * kStepBytes + j * sizeof(I), 0, 3);
    HR_UNROLL for (int i = 0; i < MB; ++i) {
      const I a = broadcast(x[i] + k);
      HR_UNROLL for (int j = 0; j < kVectors; ++j) acc[i][j] = dot8(acc[i][j], b[j], a, FULL);
    }
  }
}

// MB rows against kVectors vectors of outputs, from `column` of the panel on.
template <int MB>
HR_INLINE void tile(const Gemm& p, const uint8_t* panel, int64_t column, int64_t m, bool fetch, float* results) {
  I acc[MB][kVectors];
  const int8_t* x[MB];
  HR_UNROLL for (int i = 0; i < MB; ++i) {
    x[i] = p.x.quantized + (m + i) * p.x.stride;
    HR_UNROLL for (int j = 0; j < kVectors; ++j) acc[i][j] = I{} - kOffset8 * p.x.sums[m + i];
  }
  if (p.begin != nullptr) HR_UNROLL for (int j = 0; j < kVectors; ++j) {
    const I more = load_raw<I>(p.begin + (panel - p.w) / p.panel_bytes * kPanel + column + j * kLanes);
    HR_UNROLL for (int i = 0; i < MB; ++i) acc[i][j] += more;
  }
  const uint8_t* w = panel + kPanel * 4 + column * 4;
  if (kOffset8 == 0 && p.full) add_up<true>(p, x, w, fetch, acc);
  else add_up<false>(p, x, w, fetch, acc);
  HR_UNROLL for (int j = 0; j < kVectors; ++j) {
    const F scale = load_raw<F>(panel + (column + j * kLanes) * 4);
    HR_UNROLL for (int i = 0; i < MB; ++i) {
      const F v = __builtin_convertvector(acc[i][j], F) * (scale * p.x.scales[m + i]);
      __builtin_memcpy(results + i * kPanel + column + j * kLanes, &v, sizeof v);
    }
  }
}

#if defined(HR_AMX)
// Matrix tiles, from so many rows of x on. The sums of products are exact and what follows is the same chain of
// operations as in the tiles above: the same bits. Left operand: 16 rows of quantized x; right: 16 steps of 16 outputs.
//
// A block of rows is multiplied over all inputs at once: parts of sums, of stretches of inputs that stay in the first-level
// cache, cost as much to store and load as that cache saves. The sums leave by vectors while tiles multiply the next block.
constexpr int64_t kTileRows = 8, kTileInputs = 64, kBlockRows = 2 * kTile;
constexpr int64_t kTileStep = 16 * kStepBytes;  // bytes of 64 inputs of a panel
constexpr int64_t kCachedBytes = 1024 * 1024;   // bytes of x that stay in the second-level cache

// The sums [rows][64] of a block of rows with a panel, and with the one it gates.
struct Leaving {
  alignas(64) int32_t sums[2][kBlockRows * kPanel];
  int64_t panel, m, rows = 0, left = 0;  // so many rows have left
};

// One row of sums with panel j, as results.
HR_INLINE void scale_sums(const Gemm& p, int64_t j, int64_t m, const int32_t* sums, F (&v)[kVectors]) {
  const float* scales = reinterpret_cast<const float*>(p.w + j * p.panel_bytes);
  for (int c = 0; c < kVectors; ++c) {
    I dot = load_raw<I>(sums + c * kLanes) - kOffset8 * p.x.sums[m];
    if (p.begin != nullptr) dot += load_raw<I>(p.begin + j * kPanel + c * kLanes);
    v[c] = __builtin_convertvector(dot, F) * (load_raw<F>(scales + c * kLanes) * p.x.scales[m]);
  }
}

template <class Y>
__attribute__((noinline)) void put_next(const Gemm& p, Leaving& from) {
  const int64_t i = from.left++, m = from.m + i;
  F v[kVectors], ups[kVectors] = {};
  scale_sums(p, from.panel, m, from.sums[0] + i * kPanel, v);
  if (p.activation >= 0) scale_sums(p, from.panel + p.panels, m, from.sums[1] + i * kPanel, ups);
  put_vectors<Y>(p, m, from.panel * kPanel, v, ups);
}

template <bool TWO>
HR_INLINE void step_tiles(const int8_t* x, int64_t x_stride, const uint8_t* w) {
  if (TWO) tiles_two<TileDot::su8>(x, x_stride, kTile * x_stride, w, kStepBytes, 64);
  else tiles_one<TileDot::su8>(x, x_stride, w, kStepBytes, 64);
}

// The sums of a block of at most 16 rows, or (TWO) 32, with a panel. `meanwhile`: done at each step of 64 inputs.
template <bool TWO, class Function>
HR_INLINE void block_sums(const Gemm& p, const uint8_t* panel, int64_t m, bool fetch, int32_t* sums, Function meanwhile) {
  alignas(64) uint8_t last[kTileStep];
  const int64_t whole = p.K / kTileInputs, left = ceil_div(p.K % kTileInputs, int64_t(4));
  const int8_t* x = p.x.quantized + m * p.x.stride;
  const uint8_t* w = panel + kPanel * 4;
  if (left > 0) {
    __builtin_memcpy(last, w + whole * kTileStep, size_t(left * kStepBytes));
    __builtin_memset(last + left * kStepBytes, 0, size_t((16 - left) * kStepBytes));
  }
  for (int64_t column = 0; column < kPanel; column += TWO ? 32 : 64) {
    zero_tiles();
    for (int64_t s = 0; s < whole; ++s) {
      if (fetch && column == 0) HR_UNROLL for (int line = 0; line < 64; ++line)
        __builtin_prefetch(w + (s + 2) * kTileStep + line * 64, 0, 2);
      step_tiles<TWO>(x + s * kTileInputs, p.x.stride, w + s * kTileStep + column * 4);
      meanwhile();
    }
    if (left > 0) step_tiles<TWO>(x + whole * kTileInputs, p.x.stride, last + column * 4);
    each_result<TWO>(sums, column, store_tiles);
  }
}

// Rows [row, stop) of panels first .. end.
template <class Y>
void tile_panels(const Gemm& p, int64_t first, int64_t end, int64_t row, int64_t stop) {
  Leaving blocks[2];
  int64_t turn = 0, shaped = 0;
  for (int64_t j = first; j < end; ++j)
    for (int64_t m = row; m < stop; m += kBlockRows, turn ^= 1) {
      Leaving &now = blocks[turn], &before = blocks[turn ^ 1];
      now.panel = j, now.m = m, now.rows = smaller(stop - m, kBlockRows), now.left = 0;
      if (now.rows != shaped) tile_shapes(shaped = now.rows);
      const bool two = now.rows > kTile;
      const int64_t halves = p.activation >= 0 ? 2 : 1, steps = halves * (two ? 2 : 1) * (p.K / kTileInputs);
      int64_t due = 0;
      const auto meanwhile = [&] {
        for (due += before.rows; due >= steps; due -= steps) put_next<Y>(p, before);
      };
      for (int64_t half = 0; half < halves; ++half) {
        const uint8_t* panel = p.w + (j + half * p.panels) * p.panel_bytes;
        if (two) block_sums<true>(p, panel, m, m == row, now.sums[half], meanwhile);
        else block_sums<false>(p, panel, m, m == row, now.sums[half], meanwhile);
      }
      while (before.left < before.rows) put_next<Y>(p, before);
    }
  tiles_release();
  for (Leaving& last = blocks[turn ^ 1]; last.left < last.rows;) put_next<Y>(p, last);
}

// Rows of x that a chunk multiplies: as many as stay in the second-level cache, but several chunks for each thread.
HR_INLINE int64_t tile_row_block(const Gemm& p) {
  const int64_t fit = kCachedBytes / p.x.stride, share = p.M * p.panels / (4 * p.threads);
  const int64_t most = larger(smaller(fit, share) / kBlockRows, int64_t(2)) * kBlockRows;
  return ceil_div(ceil_div(p.M, ceil_div(p.M, most)), kBlockRows) * kBlockRows;
}
#endif

// Rows [m, m + rows) of one panel's results; rows is at most kRows.
HR_INLINE void panel_results(const Gemm& p, const uint8_t* panel, int64_t m, int64_t rows, bool fetch, float* results) {
  constexpr int most = kRows;
  for (int64_t column = 0; column < kPanel; column += kVectors * kLanes) {
    if (most >= 6 && rows == 6) tile<most >= 6 ? 6 : 1>(p, panel, column, m, fetch, results);
    if (most >= 5 && rows == 5) tile<most >= 5 ? 5 : 1>(p, panel, column, m, fetch, results);
    if (most >= 4 && rows == 4) tile<most >= 4 ? 4 : 1>(p, panel, column, m, fetch, results);
    if (most >= 3 && rows == 3) tile<most >= 3 ? 3 : 1>(p, panel, column, m, fetch, results);
    if (most >= 2 && rows == 2) tile<most >= 2 ? 2 : 1>(p, panel, column, m, fetch, results);
    if (rows == 1) tile<1>(p, panel, column, m, fetch, results);
  }
}

// Rows [row, stop) of panels first .. end.
template <class Y>
void vector_panels(const Gemm& p, int64_t first, int64_t end, int64_t row, int64_t stop) {
  alignas(64) float results[2][kRows * kPanel];
  for (int64_t j = first; j < end; ++j)
    for (int64_t m = row; m < stop;) {
      const int64_t rows = ceil_div(stop - m, ceil_div(stop - m, int64_t(kRows)));
      panel_results(p, p.w + j * p.panel_bytes, m, rows, m == row, results[0]);
      if (p.activation >= 0)
        panel_results(p, p.w + (j + p.panels) * p.panel_bytes, m, rows, m == row, results[1]);
      put_panel<Y>(p, j, m, rows, results[0], results[1]);
      m += rows;
    }
}

// A block of rows goes by all panels before the next one: it stays in the second-level cache. Threads have parts of the panels
// each: the neighbouring lines of y that two of them write would be fetched by both.
template <class Y>
void panels_chunk(void* context, int64_t i) {
  Gemm p = *static_cast<const Gemm*>(context);
  const int64_t chunks = ceil_div(p.panels, p.panels_per_chunk), part = i % chunks % p.threads;
  const int64_t chunk = part * (chunks / p.threads) + smaller(part, chunks % p.threads) + i % chunks / p.threads;
  const int64_t first = chunk * p.panels_per_chunk, row = i / chunks * p.row_block;
  const int64_t end = smaller(first + p.panels_per_chunk, p.panels), stop = smaller(p.M, row + p.row_block);
  if (p.top != nullptr) {
    p.y = hr_scratch(p.M * p.y_stride * int64_t(sizeof(float)), 2), p.y_first = first * kPanel;
    if (p.y == nullptr) __builtin_trap();
  }
#if defined(HR_AMX)
  if (p.M >= kTileRows) tile_panels<Y>(p, first, end, row, stop);
  else
#endif
    vector_panels<Y>(p, first, end, row, stop);
  if (p.top != nullptr)
    top_take(*p.top, chunk, static_cast<const float*>(p.y), p.y_stride, p.y_first, smaller(end * kPanel, p.N) - p.y_first);
}

// One chunk of rows of x, quantized into the scratch memory.
template <class T>
void quantize_chunk(void* context, int64_t i) {
  const Gemm& p = *static_cast<const Gemm*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.M);
  for (int64_t m = i * p.rows_per_chunk; m < end; ++m) {
    const T* x = static_cast<const T*>(p.source) + m * p.source_stride;
    int8_t* to = const_cast<int8_t*>(p.x.quantized) + m * p.x.stride;
    float* scale = const_cast<float*>(p.x.scales) + m;
    int32_t* sum = const_cast<int32_t*>(p.x.sums) + m;
    if (p.full) quantize_fixed(x, p.K, ceil_div(p.K, int64_t(64)) * 64, p.x_scale, p.x_zero, to, scale, sum);
    else quantize_row(x, p.K, to, scale, sum);
  }
}

// The GEMM with the quantized rows at p.x.
template <class Y>
int32_t multiply(Gemm& p) {
  // With an activation a chunk does panels of the first half, and those that they gate.
  if (p.activation >= 0) p.N /= 2;
  p.panels = ceil_div(p.N, kPanel);
  p.panel_bytes = kPanel * 4 + ceil_div(p.K, int64_t(4)) * kStepBytes;
  p.threads = hr_pool_threads(), p.row_block = kRowBlock;
#if defined(HR_AMX)
  if (p.M >= kTileRows) p.row_block = tile_row_block(p);
#endif
  p.panels_per_chunk = larger<int64_t>(1, p.M > kRows ? 1 : kChunkBytes / p.panel_bytes);
  if (p.top != nullptr) p.panels_per_chunk = kTopOutputs / kPanel, p.y_stride = kTopOutputs;
  hr_parallel(panels_chunk<Y>, &p, ceil_div(p.panels, p.panels_per_chunk) * ceil_div(p.M, p.row_block));
  return HR_OK;
}

template <class T, class Y>
int32_t run(Gemm& p) {
  p.x.stride = quantized_stride(p.K);
  const int64_t quantized = p.M * p.x.stride, facts = ceil_div(p.M, int64_t(16)) * 64;
  char* scratch = static_cast<char*>(hr_scratch(quantized + 2 * facts));
  if (scratch == nullptr) return HR_NO_MEMORY;
  p.x.quantized = reinterpret_cast<int8_t*>(scratch);
  p.x.scales = reinterpret_cast<float*>(scratch + quantized);
  p.x.sums = reinterpret_cast<int32_t*>(scratch + quantized + facts);
  p.rows_per_chunk = larger<int64_t>(1, 32 * 1024 / p.K);
  hr_parallel(quantize_chunk<T>, &p, ceil_div(p.M, p.rows_per_chunk));
  return multiply<Y>(p);
}

struct Run {
  template <class T, class Y>
  static int32_t of(Gemm& p) { return run<T, Y>(p); }
};

// 255 * 127 * K must stay below 2^31.
bool fits(int64_t M, int64_t N, int64_t K, int32_t activation, const void* bias) {
  return K <= 65536 && sound(M, N, K, activation, bias);
}

}  // namespace

// See panel_product.h.
void HR_EXPORT(int8_panel)(const PanelRows& rows, int64_t K, const uint8_t* panel, int64_t count, float* results) {
  Gemm p{};
  p.x = {static_cast<const int8_t*>(rows.x), rows.scales, rows.sums, rows.stride};
  p.w = panel, p.K = K, p.M = count;
#if defined(HR_AMX)
  if (count >= kTileRows) {
    alignas(64) int32_t sums[kBlockRows * kPanel];
    for (int64_t m = 0; m < count; m += kBlockRows) {
      const int64_t part = smaller(count - m, kBlockRows);
      tile_shapes(part);
      if (part > kTile) block_sums<true>(p, panel, m, m == 0, sums, [] {});
      else block_sums<false>(p, panel, m, m == 0, sums, [] {});
      for (int64_t i = 0; i < part; ++i) {
        F v[kVectors];
        scale_sums(p, 0, m + i, sums + i * kPanel, v);
        for (int c = 0; c < kVectors; ++c) __builtin_memcpy(results + (m + i) * kPanel + c * kLanes, &v[c], sizeof(F));
      }
    }
    tiles_release();
    return;
  }
#endif
  for (int64_t m = 0; m < count;) {
    const int64_t part = ceil_div(count - m, ceil_div(count - m, int64_t(kRows)));
    panel_results(p, panel, m, part, m == 0, results + m * kPanel);
    m += part;
  }
}

// x and bias share a dtype; y has it too, or is float32 (without a bias then). Strides count elements, rows are contiguous.
// w: panels as layout.py packs them. activation: -1, or its number (activation.h): y has N / 2 outputs then, the first half of
// the weight's gates the second; panels are full and there is no bias. x_scale: of all rows, with x_zero added to their
// integers (0: each has its own); begin: null, or what the sums of outputs begin with, int32 of whole panels.
HR_PUBLIC int32_t HR_EXPORT(linear_quant)(const void* x, const void* w, const void* bias, void* y, const int32_t* begin,
                                          int64_t M, int64_t N, int64_t K, int64_t x_stride, int64_t y_stride,
                                          int32_t activation, float x_scale, float x_zero, int32_t dtype,
                                          int32_t y_dtype) {
  if (!fits(M, N, K, activation, bias)) return HR_BAD_SHAPE;
  if (M == 0 || N == 0) return HR_OK;
  Gemm p{};
  p.begin = begin, p.full = x_scale != 0, p.x_scale = x_scale, p.x_zero = x_zero;
  p.w = static_cast<const uint8_t*>(w), p.bias = bias, p.y = y, p.source = x;
  p.M = M, p.N = N, p.K = K, p.activation = activation, p.y_stride = y_stride, p.source_stride = x_stride;
  return run_typed<Run>(p, dtype, y_dtype);
}
HR_REPLAYABLE(linear_quant)

// The same with rows that are int8 already: quantized [M, stride], zeros from K to a multiple of 64; scales [M] and
// sums of quantized values [M]. full: values may be -128.
HR_PUBLIC int32_t HR_EXPORT(linear_quant_int8_rows)(const int8_t* quantized, const float* scales, const int32_t* sums, const void* w,
                                                    const void* bias, void* y, const int32_t* begin, int64_t M,
                                                    int64_t N, int64_t K, int64_t quantized_stride, int64_t y_stride,
                                                    int32_t activation, int32_t full, int32_t y_dtype) {
  if (!fits(M, N, K, activation, bias) || quantized_stride < ceil_div(K, int64_t(64)) * 64) return HR_BAD_SHAPE;
  if (M == 0 || N == 0) return HR_OK;
  Gemm p{};
  p.x = {quantized, scales, sums, quantized_stride};
  p.begin = begin, p.full = full != 0;
  p.w = static_cast<const uint8_t*>(w), p.bias = bias, p.y = y;
  p.M = M, p.N = N, p.K = K, p.activation = activation, p.y_stride = y_stride;
  if (y_dtype == HR_BF16) return multiply<bf16>(p);
  if (y_dtype == HR_F16) return multiply<fp16>(p);
  if (y_dtype == HR_F32) return multiply<float>(p);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(linear_quant_int8_rows)

// The `count` best of the results that `linear_quant` would give in float32: outputs and values [M, count], best first.
HR_PUBLIC int32_t HR_EXPORT(linear_quant_top)(const void* x, const void* w, int64_t* ids, float* values,
                                              const int32_t* begin, int64_t M, int64_t N, int64_t K, int64_t x_stride,
                                              int64_t count, float x_scale, float x_zero, int32_t dtype) {
  if (!fits(M, N, K, -1, nullptr)) return HR_BAD_SHAPE;
  Gemm p{};
  p.begin = begin, p.full = x_scale != 0, p.x_scale = x_scale, p.x_zero = x_zero;
  p.w = static_cast<const uint8_t*>(w), p.source = x;
  p.M = M, p.N = N, p.K = K, p.activation = -1, p.source_stride = x_stride;
  return run_top<Run>(p, ids, values, count, dtype);
}
HR_REPLAYABLE(linear_quant_top)
