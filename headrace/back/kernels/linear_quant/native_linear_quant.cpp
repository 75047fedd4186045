// y[M,N] = x[M,K] w[N,K]^T + bias[N] with packed int8 or int4 weights (layout.py) and activations quantized here to int8.
//
// Rows of x become int8 first, with one scale per row (int8 weights) or one per row and 32 inputs (int4 weights). Then
// each thread takes panels of 64 outputs: a panel is one stream of bytes, read from memory once and, for more rows than
// a tile holds, again from the second-level cache; so the same loop serves one row and a whole prompt. Lanes are outputs:
// there is no sum over lanes, and a result is one fixed chain of operations whatever the rows beside it.
//
// Weight codes are stored with an offset (+128, +8) because the dot product instruction multiplies unsigned by signed;
// the accumulator starts at -offset * sum(x), which takes it out again exactly.

#include "../native/amx.h"
#include "../native/int8.h"

namespace {

constexpr int64_t kPanel = 64, kGroup = 32;
constexpr int64_t kStepBytes = kPanel * 4;                         // 4 codes of 64 outputs
constexpr int64_t kGroupBytes = kPanel * 2 + kGroup / 8 * kStepBytes;  // bf16 scales, then nibbles
constexpr int64_t kChunkBytes = 96 * 1024, kRowBlock = 192;
// Vectors of outputs and rows of x per tile: as many accumulators as the registers hold.
constexpr int kVectors = 4;
constexpr int kRows8 = kRegisters == 32 ? 6 : 2, kRows4 = kRegisters == 32 ? 4 : 1;

struct Quantized {
  const int8_t* codes;   // [M, stride]
  const float* scales;   // [M] or [M, groups]
  const int32_t* sums;   // of codes, the same shape
  int64_t stride, groups;
};

struct Product {
  Quantized x;
  const uint8_t* w;
  const void* bias;
  void* y;
  int64_t M, N, K, y_stride, panel_bytes, panels, panels_per_chunk, row_blocks;
  // For quantizing in parallel.
  const void* source;
  int64_t source_stride, rows_per_chunk;
};

HR_INLINE F scales_of(const uint8_t* group, int64_t column) {
  bf16 s[kLanes];
  __builtin_memcpy(s, group + column * 2, sizeof s);
  return load(s);
}

template <class Y>
HR_INLINE void put_row(const Product& p, int64_t m, int64_t n, F v) {
  const int64_t count = smaller<int64_t>(p.N - n, kLanes);
  if (count <= 0) return;
  const Y* bias = static_cast<const Y*>(p.bias);
  Y* y = static_cast<Y*>(p.y) + m * p.y_stride + n;
  if (count == kLanes) {
    if (bias != nullptr) v += load(bias + n);
    store(y, v);
  } else {
    if (bias != nullptr) v += load_part(bias + n, count);
    store_part(y, v, count);
  }
}

// MB rows against kVectors vectors of outputs, from `column` of the panel on.
template <class Y, int MB>
HR_INLINE void tile8(const Product& p, const uint8_t* panel, int64_t n, int64_t column, int64_t m) {
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
    if (MB == 1) HR_UNROLL for (int j = 0; j < kVectors; ++j)
      __builtin_prefetch(w + 8 * kStepBytes + j * sizeof(I), 0, 3);
    HR_UNROLL for (int i = 0; i < MB; ++i) {
      const I a = broadcast(x[i] + k);
      HR_UNROLL for (int j = 0; j < kVectors; ++j) acc[i][j] = dot8(acc[i][j], b[j], a);
    }
  }
  HR_UNROLL for (int j = 0; j < kVectors; ++j) {
    const F scale = load_raw<F>(panel + (column + j * kLanes) * 4);
    HR_UNROLL for (int i = 0; i < MB; ++i)
      put_row<Y>(p, m + i, n + column + j * kLanes,
                 __builtin_convertvector(acc[i][j], F) * (scale * p.x.scales[m + i]));
  }
}

template <class Y, int MB>
HR_INLINE void tile4(const Product& p, const uint8_t* panel, int64_t n, int64_t column, int64_t m) {
  F acc[MB][kVectors] = {};
  const uint8_t* group = panel;
  for (int64_t g = 0; g < p.x.groups; ++g, group += kGroupBytes) {
    if (MB == 1) HR_UNROLL for (int line = 0; line < int(kGroupBytes / 64); ++line)
      __builtin_prefetch(group + 2 * kGroupBytes + line * 64, 0, 3);
    HR_UNROLL for (int j = 0; j < kVectors; ++j) {
      const uint8_t* w = group + kPanel * 2 + (column + j * kLanes) * 4;
      I b[8];
      HR_UNROLL for (int s = 0; s < 4; ++s) {
        const I both = load_raw<I>(w + s * kStepBytes);
        b[2 * s] = both & 0x0f0f0f0f;
        b[2 * s + 1] = (both >> 4) & 0x0f0f0f0f;
      }
      const F scale = scales_of(group, column + j * kLanes);
      HR_UNROLL for (int i = 0; i < MB; ++i) {
        const int8_t* x = p.x.codes + (m + i) * p.x.stride + g * kGroup;
        const int64_t at = (m + i) * p.x.groups + g;
        I dot = I{} - 8 * p.x.sums[at];
        HR_UNROLL for (int s = 0; s < 8; ++s) dot = dot4(dot, b[s], broadcast(x + 4 * s));
        acc[i][j] += __builtin_convertvector(dot, F) * (scale * p.x.scales[at]);
      }
    }
  }
  HR_UNROLL for (int j = 0; j < kVectors; ++j)
    HR_UNROLL for (int i = 0; i < MB; ++i) put_row<Y>(p, m + i, n + column + j * kLanes, acc[i][j]);
}

template <class Y, int BITS, int MB>
HR_INLINE void tile(const Product& p, const uint8_t* panel, int64_t n, int64_t column, int64_t m) {
  if (BITS == 8) tile8<Y, MB>(p, panel, n, column, m);
  else tile4<Y, MB>(p, panel, n, column, m);
}

#if defined(HR_AMX)
// Matrix tiles, from so many rows of x on (int4 has its scales to apply per group, whatever the product costs). The sums of products of codes are exact and what follows is the same chain of
// operations as in the tiles above: the same bits. Left operand: 16 rows of x codes; right: 16 steps of 16 outputs.
constexpr int64_t kTileRows8 = 8, kTileRows4 = 32, kTileInputs = 64;

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

// One tile of int8 sums to y.
template <class Y>
HR_INLINE void put_tile8(const Product& p, const int32_t* sums, const uint8_t* panel, int64_t n, int64_t column, int64_t m,
                         int64_t rows) {
  const F scale = load_raw<F>(panel + column * 4);
  for (int64_t i = 0; i < rows; ++i) {
    const I dot = load_raw<I>(sums + i * 16) - kOffset8 * p.x.sums[m + i];
    put_row<Y>(p, m + i, n + column, __builtin_convertvector(dot, F) * (scale * p.x.scales[m + i]));
  }
}

// Rows [m, m + rows), at most 32, against a panel.
template <class Y>
HR_INLINE void tile_rows8(const Product& p, const uint8_t* panel, int64_t n, int64_t m, int64_t rows, bool fetch) {
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
      if (n + from < p.N) put_tile8<Y>(p, sums + t * 256, panel, n, from, m + down, smaller(rows - down, kTile));
    }
  }
}

// The nibbles of a panel as bytes: per group 8 steps of 64 outputs.
HR_INLINE void unpack4(const uint8_t* panel, int64_t groups, uint8_t* to) {
  for (int64_t g = 0; g < groups; ++g, panel += kGroupBytes)
    for (int64_t r = 0; r < 4; ++r, to += 2 * kStepBytes)
      HR_UNROLL for (int j = 0; j < 4; ++j) {
        const I both = load_raw<I>(panel + kPanel * 2 + r * kStepBytes + j * 64);
        const I low = both & 0x0f0f0f0f, high = (both >> 4) & 0x0f0f0f0f;
        __builtin_memcpy(to + j * 64, &low, 64);
        __builtin_memcpy(to + kStepBytes + j * 64, &high, 64);
      }
}

// 16 rows at most against 16 outputs of a panel, four groups of inputs at a time.
template <class Y>
HR_INLINE void tile_rows4(const Product& p, const uint8_t* panel, const uint8_t* codes, int64_t n, int64_t column, int64_t m,
                          int64_t rows) {
  alignas(64) int32_t sums[4 * 256];
  F acc[kTile] = {};
  const int8_t* x = p.x.codes + m * p.x.stride;
  const uint8_t* w = codes + column * 4;
  for (int64_t g = 0; g < p.x.groups; g += 4, x += 4 * kGroup, w += 4 * 8 * kStepBytes) {
    zero_tiles();
    HR_TILE_LOAD(4, x, p.x.stride);
    HR_TILE_LOAD(6, w, kStepBytes);
    HR_TILE_DOT_SU8(0, 4, 6);
    if (g + 1 < p.x.groups) {
      HR_TILE_LOAD(4, x + kGroup, p.x.stride);
      HR_TILE_LOAD(7, w + 8 * kStepBytes, kStepBytes);
      HR_TILE_DOT_SU8(1, 4, 7);
    }
    if (g + 2 < p.x.groups) {
      HR_TILE_LOAD(4, x + 2 * kGroup, p.x.stride);
      HR_TILE_LOAD(6, w + 16 * kStepBytes, kStepBytes);
      HR_TILE_DOT_SU8(2, 4, 6);
    }
    if (g + 3 < p.x.groups) {
      HR_TILE_LOAD(4, x + 3 * kGroup, p.x.stride);
      HR_TILE_LOAD(7, w + 24 * kStepBytes, kStepBytes);
      HR_TILE_DOT_SU8(3, 4, 7);
    }
    store_tiles(sums);
    for (int64_t t = 0; t < smaller<int64_t>(4, p.x.groups - g); ++t) {
      const F scale = scales_of(panel + (g + t) * kGroupBytes, column);
      const int64_t at = m * p.x.groups + g + t;
      HR_UNROLL for (int i = 0; i < kTile; ++i) {
        if (i >= rows) break;
        const I dot = load_raw<I>(sums + t * 256 + i * 16) - 8 * p.x.sums[at + i * p.x.groups];
        acc[i] += __builtin_convertvector(dot, F) * (scale * p.x.scales[at + i * p.x.groups]);
      }
    }
  }
  for (int64_t i = 0; i < rows; ++i) put_row<Y>(p, m + i, n + column, acc[i]);
}

template <class Y, int BITS>
void tile_chunk(void* context, int64_t i) {
  const Product p = *static_cast<const Product*>(context);
  const int64_t first = i / p.row_blocks * p.panels_per_chunk, block = i % p.row_blocks;
  const int64_t end = smaller(first + p.panels_per_chunk, p.panels);
  const int64_t stop = smaller(p.M, (block + 1) * kRowBlock);
  uint8_t* codes = nullptr;
  if (BITS == 4) {
    codes = static_cast<uint8_t*>(hr_scratch(p.x.groups * 8 * kStepBytes, 1));
    if (codes == nullptr) __builtin_trap();
  }
  const int64_t most = BITS == 8 ? 2 * kTile : kTile, inputs = BITS == 8 ? kTileInputs : kGroup;
  int64_t shaped = 0;
  for (int64_t j = first; j < end; ++j) {
    const uint8_t* panel = p.w + j * p.panel_bytes;
    if (BITS == 4) unpack4(panel, p.x.groups, codes);
    for (int64_t m = block * kRowBlock; m < stop; m += most) {
      const int64_t rows = smaller(stop - m, most);
      if (rows != shaped) tile_shapes(rows, inputs), shaped = rows;
      if (BITS == 8) tile_rows8<Y>(p, panel, j * kPanel, m, rows, m == block * kRowBlock);
      else
        for (int64_t column = 0; column < kPanel && j * kPanel + column < p.N; column += kTile)
          tile_rows4<Y>(p, panel, codes, j * kPanel, column, m, rows);
    }
  }
  tiles_release();
}
#endif

template <class Y, int BITS>
void panels_chunk(void* context, int64_t i) {
  const Product& p = *static_cast<const Product*>(context);
  constexpr int most = BITS == 8 ? kRows8 : kRows4;
  const int64_t first = i / p.row_blocks * p.panels_per_chunk, block = i % p.row_blocks;
  const int64_t end = smaller(first + p.panels_per_chunk, p.panels);
  const int64_t stop = smaller(p.M, (block + 1) * kRowBlock);
  for (int64_t j = first; j < end; ++j) {
    const uint8_t* panel = p.w + j * p.panel_bytes;
    for (int64_t m = block * kRowBlock; m < stop;) {
      const int64_t rows = ceil_div(stop - m, ceil_div(stop - m, int64_t(most)));
      for (int64_t column = 0; column < kPanel && j * kPanel + column < p.N; column += kVectors * kLanes) {
        if (most >= 6 && rows == 6) tile<Y, BITS, most >= 6 ? 6 : 1>(p, panel, j * kPanel, column, m);
        if (most >= 5 && rows == 5) tile<Y, BITS, most >= 5 ? 5 : 1>(p, panel, j * kPanel, column, m);
        if (most >= 4 && rows == 4) tile<Y, BITS, most >= 4 ? 4 : 1>(p, panel, j * kPanel, column, m);
        if (most >= 3 && rows == 3) tile<Y, BITS, most >= 3 ? 3 : 1>(p, panel, j * kPanel, column, m);
        if (most >= 2 && rows == 2) tile<Y, BITS, most >= 2 ? 2 : 1>(p, panel, j * kPanel, column, m);
        if (rows == 1) tile<Y, BITS, 1>(p, panel, j * kPanel, column, m);
      }
      m += rows;
    }
  }
}

// One chunk of rows of x, quantized into the scratch memory.
template <class T, int BITS>
void quantize_chunk(void* context, int64_t i) {
  const Product& p = *static_cast<const Product*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.M);
  for (int64_t m = i * p.rows_per_chunk; m < end; ++m) {
    const T* x = static_cast<const T*>(p.source) + m * p.source_stride;
    int8_t* codes = const_cast<int8_t*>(p.x.codes) + m * p.x.stride;
    float* scales = const_cast<float*>(p.x.scales) + m * p.x.groups;
    int32_t* sums = const_cast<int32_t*>(p.x.sums) + m * p.x.groups;
    if (BITS == 8) quantize(x, p.K, ceil_div(p.K, int64_t(64)) * 64, codes, scales, sums);
    else for (int64_t g = 0; g < p.x.groups; ++g)
      quantize(x + g * kGroup, smaller(kGroup, p.K - g * kGroup), kGroup, codes + g * kGroup, scales + g, sums + g);
  }
}

template <class T, class Y, int BITS>
int32_t run(Product& p) {
  // Rows a power of two apart would share the sets of the first-level cache: one line more.
  p.x.stride = ceil_div(p.K, 64) * 64 + 64;
  p.x.groups = BITS == 8 ? 1 : ceil_div(p.K, kGroup);
  const int64_t codes = p.M * p.x.stride, facts = ceil_div(p.M * p.x.groups, 16) * 64;
  char* scratch = static_cast<char*>(hr_scratch(codes + 2 * facts));
  if (scratch == nullptr) return HR_NO_MEMORY;
  p.x.codes = reinterpret_cast<int8_t*>(scratch);
  p.x.scales = reinterpret_cast<float*>(scratch + codes);
  p.x.sums = reinterpret_cast<int32_t*>(scratch + codes + facts);
  p.rows_per_chunk = larger<int64_t>(1, 32 * 1024 / p.K);
  hr_parallel(quantize_chunk<T, BITS>, &p, ceil_div(p.M, p.rows_per_chunk));
  p.panels = ceil_div(p.N, kPanel);
  p.panel_bytes = BITS == 8 ? kPanel * 4 + ceil_div(p.K, int64_t(4)) * kStepBytes : p.x.groups * kGroupBytes;
  p.row_blocks = ceil_div(p.M, kRowBlock);
  p.panels_per_chunk = larger<int64_t>(1, p.M > kRows8 ? 1 : kChunkBytes / p.panel_bytes);
  const HrTask task =
#if defined(HR_AMX)
      p.M >= (BITS == 8 ? kTileRows8 : kTileRows4) ? tile_chunk<Y, BITS> :
#endif
      panels_chunk<Y, BITS>;
  hr_parallel(task, &p, ceil_div(p.panels, p.panels_per_chunk) * p.row_blocks);
  return HR_OK;
}

}  // namespace

// x and bias share a dtype; y has it too, or is float32 (without a bias then). Strides count elements, rows are contiguous.
// w: panels as layout.py packs them.
HR_PUBLIC int32_t HR_EXPORT(linear_quant)(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N,
                                          int64_t K, int64_t x_stride, int64_t y_stride, int32_t dtype, int32_t y_dtype,
                                          int32_t bits) {
  // 255 * 127 * K must stay below 2^31.
  if (M < 0 || N < 0 || K <= 0 || K > 65536) return HR_BAD_SHAPE;
  if (M == 0 || N == 0) return HR_OK;
  Product p{};
  p.w = static_cast<const uint8_t*>(w), p.bias = bias, p.y = y, p.source = x;
  p.M = M, p.N = N, p.K = K, p.y_stride = y_stride, p.source_stride = x_stride;
  if (bits != 8 && bits != 4) return HR_BAD_DTYPE;
  const bool eight = bits == 8;
  if (dtype == HR_BF16 && y_dtype == HR_BF16) return eight ? run<bf16, bf16, 8>(p) : run<bf16, bf16, 4>(p);
  if (dtype == HR_BF16 && y_dtype == HR_F32 && bias == nullptr) return eight ? run<bf16, float, 8>(p) : run<bf16, float, 4>(p);
  if (dtype == HR_F16 && y_dtype == HR_F16) return eight ? run<fp16, fp16, 8>(p) : run<fp16, fp16, 4>(p);
  if (dtype == HR_F16 && y_dtype == HR_F32 && bias == nullptr) return eight ? run<fp16, float, 8>(p) : run<fp16, float, 4>(p);
  if (dtype == HR_F32 && y_dtype == HR_F32) return eight ? run<float, float, 8>(p) : run<float, float, 4>(p);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(linear_quant)
