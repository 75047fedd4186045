// y[M,N] = x[M,K] w[N,K]^T + bias[N] with packed int8 weights (layout.py) and int8 activations.
//
// Rows of x become int8 first, with one scale per row, unless the norm before has left them so (linear_quant_codes). Then
// each thread takes panels of 64 outputs: a panel is one stream of bytes, read from memory once and, for more rows than
// a tile holds, again from the second-level cache; so the same loop serves one row and a whole prompt. Lanes are outputs:
// there is no sum over lanes, and a result is one fixed chain of operations whatever the rows beside it.
//
// Weight codes are stored with an offset (+128) because the dot product instruction multiplies unsigned by signed;
// the accumulator starts at -offset * sum(x), which takes it out again exactly.

#include "../native/amx.h"
#include "../native/int8.h"
#include "../native/panel_calls.h"

namespace {

constexpr int64_t kStepBytes = kPanel * 4;                         // 4 codes of 64 outputs
constexpr int64_t kChunkBytes = 96 * 1024, kRowBlock = 192;
// Vectors of outputs and rows of x per tile: as many accumulators as the registers hold.
constexpr int kVectors = 4;
constexpr int kRows = kRegisters == 32 ? 6 : 2;

struct Quantized {
  const int8_t* codes;   // [M, stride]
  const float* scales;   // [M]
  const int32_t* sums;   // of codes: [M]
  int64_t stride;
};

struct Product {
  Quantized x;
  const uint8_t* w;
  const void* bias;
  void* y;
  int64_t M, N, K, y_stride, panel_bytes, panels, panels_per_chunk, row_blocks;
  int32_t activation;  // -1, or the first half of the outputs gates the second
  const Top* top;  // null, or where the best results are kept, and y is memory of a chunk
  int64_t y_first;     // the output that y begins with
  // For quantizing in parallel.
  const void* source;
  int64_t source_stride, rows_per_chunk;
};

// MB rows against kVectors vectors of outputs, from `column` of the panel on.
template <int MB>
HR_INLINE void tile(const Product& p, const uint8_t* panel, int64_t column, int64_t m, bool fetch, float* results) {
  I acc[MB][kVectors];
  const int8_t* x[MB];
  HR_UNROLL for (int i = 0; i < MB; ++i) {
    x[i] = p.x.codes + (m + i) * p.x.stride;
    HR_UNROLL for (int j = 0; j < kVectors; ++j) acc[i][j] = I{} - kOffset8 * p.x.sums[m + i];
  }
  const uint8_t* w = panel + kPanel * 4 + column * 4;
  for (int64_t k = 0; k < p.K; k += 4, w += kStepBytes) {
    I b[kVectors];
    HR_UNROLL for (int j = 0; j < kVectors; ++j) b[j] = load_raw<I>(w + j * sizeof(I));
    if (fetch) HR_UNROLL for (int j = 0; j < kVectors; ++j)
      __builtin_prefetch(w + 16 * kStepBytes + j * sizeof(I), 0, 3);
    HR_UNROLL for (int i = 0; i < MB; ++i) {
      const I a = broadcast(x[i] + k);
      HR_UNROLL for (int j = 0; j < kVectors; ++j) acc[i][j] = dot8(acc[i][j], b[j], a);
    }
  }
  HR_UNROLL for (int j = 0; j < kVectors; ++j) {
    const F scale = load_raw<F>(panel + (column + j * kLanes) * 4);
    HR_UNROLL for (int i = 0; i < MB; ++i) {
      const F v = __builtin_convertvector(acc[i][j], F) * (scale * p.x.scales[m + i]);
      __builtin_memcpy(results + i * kPanel + column + j * kLanes, &v, sizeof v);
    }
  }
}

#if defined(HR_AMX)
// Matrix tiles, from so many rows of x on. The sums of products of codes are exact and what follows is the same chain of
// operations as in the tiles above: the same bits. Left operand: 16 rows of x codes; right: 16 steps of 16 outputs.
constexpr int64_t kTileRows = 8, kTileInputs = 64;

HR_INLINE void tile_shapes(int64_t rows, int64_t inputs) {
  TileShapes shapes;
  const int64_t first = smaller(rows, kTile), second = rows - first;
  // Two blocks of rows by two of outputs, or one by four.
  for (int t = 0; t < 4; ++t) TileShapes::set(shapes, t, second > 0 && t >= 2 ? second : first, 64);
  TileShapes::set(shapes, 4, first, inputs);
  TileShapes::set(shapes, 5, second > 0 ? second : inputs / 4, second > 0 ? inputs : 64);
  TileShapes::set(shapes, 6, inputs / 4, 64), TileShapes::set(shapes, 7, inputs / 4, 64);
  tiles_configure(shapes);
}

// results[outputs / 16][32 rows][16], the tiles of 64 outputs, or from `column` on 32.
HR_INLINE void tiles8_one(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, bool fetch) {
  for (int64_t s = 0; s < steps; ++s, x += kTileInputs, w += 16 * kStepBytes) {
    if (fetch) HR_UNROLL for (int line = 0; line < 64; ++line)
      __builtin_prefetch(w + 2 * 16 * kStepBytes + line * 64, 0, 2);
    HR_TILE_LOAD(4, x, x_stride);
    HR_TILE_LOAD(5, w, kStepBytes);
    HR_TILE_DOT_SU8(0, 4, 5);
    HR_TILE_LOAD(6, w + 64, kStepBytes);
    HR_TILE_DOT_SU8(1, 4, 6);
    HR_TILE_LOAD(7, w + 128, kStepBytes);
    HR_TILE_DOT_SU8(2, 4, 7);
    HR_TILE_LOAD(5, w + 192, kStepBytes);
    HR_TILE_DOT_SU8(3, 4, 5);
  }
}
HR_INLINE void tiles8_two(const int8_t* x, int64_t x_stride, const uint8_t* w, int64_t steps, bool fetch) {
  for (int64_t s = 0; s < steps; ++s, x += kTileInputs, w += 16 * kStepBytes) {
    if (fetch) HR_UNROLL for (int line = 0; line < 64; ++line)
      __builtin_prefetch(w + 2 * 16 * kStepBytes + line * 64, 0, 2);
    HR_TILE_LOAD(6, w, kStepBytes);
    HR_TILE_LOAD(4, x, x_stride);
    HR_TILE_DOT_SU8(0, 4, 6);
    HR_TILE_LOAD(7, w + 64, kStepBytes);
    HR_TILE_DOT_SU8(1, 4, 7);
    HR_TILE_LOAD(5, x + kTile * x_stride, x_stride);
    HR_TILE_DOT_SU8(2, 5, 6);
    HR_TILE_DOT_SU8(3, 5, 7);
  }
}

HR_INLINE void zero_tiles() {
  HR_TILE_ZERO(0);
  HR_TILE_ZERO(1);
  HR_TILE_ZERO(2);
  HR_TILE_ZERO(3);
}
HR_INLINE void store_tiles(int32_t* to) {
  HR_TILE_STORE(0, to, 64);
  HR_TILE_STORE(1, to + 256, 64);
  HR_TILE_STORE(2, to + 512, 64);
  HR_TILE_STORE(3, to + 768, 64);
}

// One tile of int8 sums, rows [m, m + rows), to the results.
HR_INLINE void scale_tile(const Product& p, const int32_t* sums, const uint8_t* panel, int64_t column, int64_t m,
                          int64_t rows, float* results) {
  const F scale = load_raw<F>(panel + column * 4);
  for (int64_t i = 0; i < rows; ++i) {
    const I dot = load_raw<I>(sums + i * 16) - kOffset8 * p.x.sums[m + i];
    const F v = __builtin_convertvector(dot, F) * (scale * p.x.scales[m + i]);
    __builtin_memcpy(results + i * kPanel + column, &v, sizeof v);
  }
}

// Rows [m, m + rows), at most 32, against a panel.
HR_INLINE void tile_rows(const Product& p, const uint8_t* panel, int64_t m, int64_t rows, bool fetch, float* results) {
  alignas(64) int32_t sums[4 * 256];
  alignas(64) uint8_t last[16 * kStepBytes];
  const int64_t whole = p.K / kTileInputs, left = ceil_div(p.K % kTileInputs, int64_t(4));
  const int8_t* x = p.x.codes + m * p.x.stride;
  const uint8_t* w = panel + kPanel * 4;
  if (left > 0) {
    __builtin_memcpy(last, w + whole * 16 * kStepBytes, size_t(left * kStepBytes));
    __builtin_memset(last + left * kStepBytes, 0, size_t((16 - left) * kStepBytes));
  }
  const bool two = rows > kTile;
  for (int64_t column = 0; column < kPanel; column += two ? 32 : 64) {
    zero_tiles();
    if (two) {
      tiles8_two(x, p.x.stride, w + column * 4, whole, fetch && column == 0);
      if (left > 0) tiles8_two(x + whole * kTileInputs, p.x.stride, last + column * 4, 1, false);
    } else {
      tiles8_one(x, p.x.stride, w, whole, fetch);
      if (left > 0) tiles8_one(x + whole * kTileInputs, p.x.stride, last, 1, false);
    }
    store_tiles(sums);
    for (int64_t t = 0; t < 4; ++t) {
      const int64_t from = two ? column + t % 2 * 16 : t * 16, down = two ? t / 2 * kTile : 0;
      scale_tile(p, sums + t * 256, panel, from, m + down, smaller(rows - down, kTile), results + down * kPanel);
    }
  }
}

constexpr int64_t kMostRows = 2 * kTile;
#else
constexpr int64_t kMostRows = kRows;
#endif

// Rows [m, m + rows) of one panel's results; rows is at most that of a tile.
HR_INLINE void panel_results(const Product& p, const uint8_t* panel, int64_t m, int64_t rows, bool fetch, float* results) {
#if defined(HR_AMX)
  if (p.M >= kTileRows) return tile_rows(p, panel, m, rows, fetch, results);
#endif
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

template <class Y>
void panels_chunk(void* context, int64_t i) {
  Product p = *static_cast<const Product*>(context);
  const int64_t first = i / p.row_blocks * p.panels_per_chunk, row = i % p.row_blocks * kRowBlock;
  const int64_t end = smaller(first + p.panels_per_chunk, p.panels), stop = smaller(p.M, row + kRowBlock);
  if (p.top != nullptr) {
    p.y = hr_scratch(p.M * p.y_stride * int64_t(sizeof(float)), 2), p.y_first = first * kPanel;
    if (p.y == nullptr) __builtin_trap();
  }
  alignas(64) float results[2][kMostRows * kPanel];
  int64_t most = kRows;
  [[maybe_unused]] int64_t shaped = 0;
#if defined(HR_AMX)
  if (p.M >= kTileRows) most = 2 * kTile;
#endif
  for (int64_t j = first; j < end; ++j)
    for (int64_t m = row; m < stop;) {
      const int64_t rows = most == kRows ? ceil_div(stop - m, ceil_div(stop - m, most)) : smaller(stop - m, most);
#if defined(HR_AMX)
      if (p.M >= kTileRows && rows != shaped) tile_shapes(rows, kTileInputs);
#endif
      shaped = rows;
      panel_results(p, p.w + j * p.panel_bytes, m, rows, m == row, results[0]);
      if (p.activation >= 0)
        panel_results(p, p.w + (j + p.panels) * p.panel_bytes, m, rows, m == row, results[1]);
      put_panel<Y>(p, j, m, rows, results[0], results[1]);
      m += rows;
    }
#if defined(HR_AMX)
  if (p.M >= kTileRows) tiles_release();
#endif
  if (p.top != nullptr)
    top_take(*p.top, i, static_cast<const float*>(p.y), p.y_stride, p.y_first, smaller(end * kPanel, p.N) - p.y_first);
}

// One chunk of rows of x, quantized into the scratch memory.
template <class T>
void quantize_chunk(void* context, int64_t i) {
  const Product& p = *static_cast<const Product*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.M);
  for (int64_t m = i * p.rows_per_chunk; m < end; ++m) {
    const T* x = static_cast<const T*>(p.source) + m * p.source_stride;
    quantize_row(x, p.K, const_cast<int8_t*>(p.x.codes) + m * p.x.stride, const_cast<float*>(p.x.scales) + m,
                 const_cast<int32_t*>(p.x.sums) + m);
  }
}

// The product with the rows of codes at p.x.
template <class Y>
int32_t multiply(Product& p) {
  // With an activation a chunk does panels of the first half, and those that they gate.
  if (p.activation >= 0) p.N /= 2;
  p.panels = ceil_div(p.N, kPanel);
  p.panel_bytes = kPanel * 4 + ceil_div(p.K, int64_t(4)) * kStepBytes;
  p.row_blocks = ceil_div(p.M, kRowBlock);
  p.panels_per_chunk = larger<int64_t>(1, p.M > kRows ? 1 : kChunkBytes / p.panel_bytes);
  if (p.top != nullptr) p.panels_per_chunk = kTopOutputs / kPanel, p.y_stride = kTopOutputs;
  hr_parallel(panels_chunk<Y>, &p, ceil_div(p.panels, p.panels_per_chunk) * p.row_blocks);
  return HR_OK;
}

template <class T, class Y>
int32_t run(Product& p) {
  p.x.stride = codes_stride(p.K);
  const int64_t codes = p.M * p.x.stride, facts = ceil_div(p.M, int64_t(16)) * 64;
  char* scratch = static_cast<char*>(hr_scratch(codes + 2 * facts));
  if (scratch == nullptr) return HR_NO_MEMORY;
  p.x.codes = reinterpret_cast<int8_t*>(scratch);
  p.x.scales = reinterpret_cast<float*>(scratch + codes);
  p.x.sums = reinterpret_cast<int32_t*>(scratch + codes + facts);
  p.rows_per_chunk = larger<int64_t>(1, 32 * 1024 / p.K);
  hr_parallel(quantize_chunk<T>, &p, ceil_div(p.M, p.rows_per_chunk));
  return multiply<Y>(p);
}

struct Run {
  template <class T, class Y>
  static int32_t of(Product& p) { return run<T, Y>(p); }
};

// 255 * 127 * K must stay below 2^31.
bool fits(int64_t M, int64_t N, int64_t K, int32_t activation, const void* bias) {
  return K <= 65536 && sound(M, N, K, activation, bias);
}

}  // namespace

// x and bias share a dtype; y has it too, or is float32 (without a bias then). Strides count elements, rows are contiguous.
// w: panels as layout.py packs them. activation: -1, or its number (activation.h): y has N / 2 outputs then, the first half of
// the weight's gates the second; panels are full and there is no bias.
HR_PUBLIC int32_t HR_EXPORT(linear_quant)(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N,
                                          int64_t K, int64_t x_stride, int64_t y_stride, int32_t activation,
                                          int32_t dtype, int32_t y_dtype) {
  if (!fits(M, N, K, activation, bias)) return HR_BAD_SHAPE;
  if (M == 0 || N == 0) return HR_OK;
  Product p{};
  p.w = static_cast<const uint8_t*>(w), p.bias = bias, p.y = y, p.source = x;
  p.M = M, p.N = N, p.K = K, p.activation = activation, p.y_stride = y_stride, p.source_stride = x_stride;
  return run_typed<Run>(p, dtype, y_dtype);
}
HR_REPLAYABLE(linear_quant)

// The same with rows that are int8 already: codes [M, stride], zeros from K to a multiple of 64; scales and sums of codes [M].
HR_PUBLIC int32_t HR_EXPORT(linear_quant_codes)(const int8_t* codes, const float* scales, const int32_t* sums, const void* w,
                                                const void* bias, void* y, int64_t M, int64_t N, int64_t K,
                                                int64_t codes_stride, int64_t y_stride, int32_t activation,
                                                int32_t y_dtype) {
  if (!fits(M, N, K, activation, bias) || codes_stride < ceil_div(K, int64_t(64)) * 64) return HR_BAD_SHAPE;
  if (M == 0 || N == 0) return HR_OK;
  Product p{};
  p.x = {codes, scales, sums, codes_stride};
  p.w = static_cast<const uint8_t*>(w), p.bias = bias, p.y = y;
  p.M = M, p.N = N, p.K = K, p.activation = activation, p.y_stride = y_stride;
  if (y_dtype == HR_BF16) return multiply<bf16>(p);
  if (y_dtype == HR_F16) return multiply<fp16>(p);
  if (y_dtype == HR_F32) return multiply<float>(p);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(linear_quant_codes)

// The `count` best of the results that `linear_quant` would give in float32: outputs and values [M, count], best first.
HR_PUBLIC int32_t HR_EXPORT(linear_quant_top)(const void* x, const void* w, int64_t* ids, float* values, int64_t M,
                                              int64_t N, int64_t K, int64_t x_stride, int64_t count, int32_t dtype) {
  if (!fits(M, N, K, -1, nullptr)) return HR_BAD_SHAPE;
  Product p{};
  p.w = static_cast<const uint8_t*>(w), p.source = x;
  p.M = M, p.N = N, p.K = K, p.activation = -1, p.source_stride = x_stride;
  return run_top<Run>(p, ids, values, count, dtype);
}
HR_REPLAYABLE(linear_quant_top)
