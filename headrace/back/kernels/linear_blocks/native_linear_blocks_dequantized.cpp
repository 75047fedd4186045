// y[M,N] = x[M,K] w[N,K]^T + bias[N] for many rows of bf16, where w is block-quantized (block_panels.h).
//
// A part of 16 or 32 inputs has a scale of its own, so as int8 its sums must leave the matrix tiles before the next ones
// begin. For many rows it is less work to dequantize the weights: code * scale - minimum, rounded to bf16, a stretch of a
// panel at a time, and then all rows of x go by as they are, from the second-level cache too. Sums stay in the tiles'
// float32 along a stretch. Only for instruction sets with matrix tiles.

#include "../native/amx_rows.h"
#include "../native/block_gemm.h"

#if defined(HR_AMX)

namespace {

constexpr int64_t kStep = 32;                   // inputs of a tile
constexpr int64_t kStretchSteps = 32;           // that are dequantized at once: 128 KB, a part of the second-level cache
constexpr int64_t kRowsBytes = 1024 * 1024;     // of x, that stay in the second-level cache
constexpr int64_t kMostRows = 512, kLeastRows = 64;

struct Dequantized {
  Gemm p;
  char* rows;  // of x: blocks of 16 rows, each `steps` tiles
  int64_t steps, panels;
};

// The halves of a lane: an even input's value below, the next one's above, both rounded to bf16.
alignas(64) constexpr uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
HR_INLINE U pair_bf16(F even, F odd) {
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (U)_mm512_permutexvar_epi16(_mm512_load_si512(kPairs), (__m512i)both);
}

// 32 inputs of a panel, at `group` of the block at `super`, as four tiles [16 pairs of inputs][16 outputs].
//
// A code of `bits` bits becomes the mantissa's first bits of a float between `one` and its double: no conversion. What is
// too much leaves in the same fused step, exactly, or, where the scale has too many bits for that, before it.
template <class C>
HR_INLINE void dequantize_group(const uint8_t* super, const uint8_t* group, char* to) {
  constexpr int bits = C::wide ? 8 : C::bits, parts = C::sub < 32 ? 32 / C::sub : 1;
  constexpr bool at_once = !C::minimum && !C::two_level;
  constexpr float more = float(1 << bits) + (C::wide ? 128 : C::offset);
  const I mask = I{} + (((1 << bits) - 1) << (23 - bits)), exponent = I{} + ((127 + bits) << 23);
  HR_UNROLL for (int j = 0; j < 4; ++j, to += kTileBytes) {
    const auto* d = reinterpret_cast<const typename C::Scale*>(super) + j * kLanes;
    F scale[parts], less[parts];
    HR_UNROLL for (int h = 0; h < parts; ++h) {
      scale[h] = part_scales<C>(load(d), super, group, h, j * kLanes), less[h] = C::minimum ? load(d + kPanel) : F{};
      if (C::two_level && C::minimum) less[h] *= small_floats(group + (parts + h) * kPanel + j * kLanes);
      less[h] = at_once ? scale[h] * -more : -less[h];
    }
    I b[8];
    load_quantized<C>(group + scale_bytes<C>(), j * kLanes, b);
    HR_UNROLL for (int s = 0; s < 8; ++s) {
      F value[4];
      HR_UNROLL for (int i = 0; i < 4; ++i) {
        const int up = 23 - bits - 8 * i;
        const I code = (up >= 0 ? b[s] << (up & 31) : (I)((U)b[s] >> (-up & 31))) & mask;
        value[i] = fma((F)(code | exponent) - (at_once ? 0.0f : more), scale[s * parts / 8], less[s * parts / 8]);
      }
      const U first = pair_bf16(value[0], value[1]), second = pair_bf16(value[2], value[3]);
      __builtin_memcpy(to + 2 * s * 64, &first, 64);
      __builtin_memcpy(to + (2 * s + 1) * 64, &second, 64);
    }
  }
}

// `count` steps of a panel from step `from` on.
template <class C>
HR_INLINE void dequantize_steps(const uint8_t* panel, int64_t from, int64_t count, char* to) {
  for (int64_t k = from * kStep; count > 0; --count, k += kStep, to += 4 * kTileBytes) {
    const uint8_t* super = panel + k / C::block * super_bytes<C>();
    dequantize_group<C>(super, super + header_bytes<C>() + k % C::block / 32 * group_bytes<C>(), to);
  }
}

// A panel against rows [m, m + rows): sums [rows][64].
void dequantized_panel(const Dequantized& w, const Place& at, int64_t m, int64_t rows, char* tiles, float* sums) {
  for (int64_t from = 0; from < w.steps; from += kStretchSteps) {
    const int64_t count = smaller(w.steps - from, kStretchSteps);
    with_coding(at.segment->coding, [&](auto coding) {
      using C = decltype(coding);
      dequantize_steps<C>(at.segment->panels + at.panel * panel_bytes<C>(w.p), from, count, tiles);
    });
    const int64_t pairs = rows / (2 * kTile) * 2 * kTile, block = w.steps * kTileBytes;
    const char* x = w.rows + (m / kTile * w.steps + from) * kTileBytes;
    for (int64_t column = 0; column < kPanel; column += 32)
      for (int64_t i = 0; i < pairs; i += 2 * kTile)
        block_rows<true>({x + i / kTile * block, 64, block, kTileBytes}, tiles, column, count, from == 0, sums + i * kPanel);
    if (pairs < rows)
      block_rows<false>({x + pairs / kTile * block, 64, 0, kTileBytes}, tiles, 0, count, from == 0, sums + pairs * kPanel);
  }
}

// One panel of results for one block of rows.
void dequantized_task(void* context, int64_t task) {
  const Dequantized& w = *static_cast<const Dequantized*>(context);
  const Gemm& p = w.p;
  const int64_t m = task / w.panels * p.row_block, rows = smaller(p.row_block, p.M - m);
  const int64_t whole = ceil_div(rows, kTile) * kTile, sums_bytes = whole * kSumsStride;
  char* memory = static_cast<char*>(hr_scratch(kStretchSteps * 4 * kTileBytes + 2 * sums_bytes, 1));
  if (memory == nullptr) __builtin_trap();
  float* sums = reinterpret_cast<float*>(memory + kStretchSteps * 4 * kTileBytes);
  float* ups = sums + whole * kPanel;
  Place at = panel_at(p, task % w.panels);
  const int64_t n = at.n + at.panel * kPanel;
  tile_shapes(2 * kTile);
  dequantized_panel(w, at, m, whole, memory, sums);
  if (p.activation >= 0) dequantized_panel(w, place_of(p, n + p.outputs / 2), m, whole, memory, ups);
  tiles_release();
  if (p.activation >= 0) put_gated(p, m, rows, n, sums, ups);
  else put_panel(p, m, rows, n, at.segment->outputs - at.panel * kPanel, sums);
}

// 16 rows of x as tiles; zeros beyond M and K.
void tile_rows(void* context, int64_t block) {
  const Dequantized& w = *static_cast<const Dequantized*>(context);
  const Gemm& p = w.p;
  char* to = w.rows + block * w.steps * kTileBytes;
  for (int64_t i = 0; i < kTile; ++i) {
    const int64_t m = block * kTile + i;
    const bf16* x = static_cast<const bf16*>(p.source) + m * p.source_stride;
    for (int64_t s = 0; s < w.steps; ++s) {
      const int64_t left = m < p.M ? smaller(p.K - s * kStep, kStep) : 0;
      const __m512i v = left == kStep ? _mm512_loadu_si512(x + s * kStep)
                                      : _mm512_maskz_loadu_epi16(__mmask32((1ull << left) - 1), x + s * kStep);
      _mm512_store_si512(to + s * kTileBytes + i * 64, v);
    }
  }
}

// Rows of a task: their part of x stays in the second-level cache, and there are tasks for all threads.
int64_t rows_at_once(const Dequantized& w) {
  const int64_t cached = kRowsBytes / (w.steps * kTileBytes) * kTile;
  const int64_t threads = hr_pool_threads(), shared = w.p.M * w.panels / (threads > 1 ? 4 * threads : 1);
  const int64_t most = smaller(smaller(cached, shared), kMostRows);
  const int64_t blocks = ceil_div(w.p.M, larger(most, kLeastRows));
  return ceil_div(ceil_div(w.p.M, blocks), 2 * kTile) * 2 * kTile;
}

}  // namespace

// x is bf16, y too, or it is float32 and there is no bias; else as linear_blocks.
HR_PUBLIC int32_t HR_EXPORT(linear_blocks_dequantized)(const void* x, const Segment* segments, const void* bias, void* y,
                                                       int64_t M, int64_t K, int64_t x_stride, int64_t y_stride,
                                                       int64_t num_segments, int32_t activation, int32_t y_dtype) {
  Dequantized w{};
  Gemm& p = w.p;
  const int32_t status = take_weight(p, segments, num_segments, K, activation, bias);
  if (status != HR_OK || M < 0) return M < 0 ? int32_t(HR_BAD_SHAPE) : status;
  if (y_dtype != HR_BF16 && (y_dtype != HR_F32 || bias != nullptr)) return HR_BAD_DTYPE;
  if (M == 0) return HR_OK;
  p.source = x, p.y = y, p.M = M, p.source_stride = x_stride, p.y_stride = y_stride, p.dtype = y_dtype;
  w.steps = ceil_div(K, kStep), w.panels = num_panels(p);
  w.rows = static_cast<char*>(hr_scratch(ceil_div(M, kTile) * w.steps * kTileBytes));
  if (w.rows == nullptr) return HR_NO_MEMORY;
  p.row_block = rows_at_once(w);
  hr_parallel(tile_rows, &w, ceil_div(M, kTile));
  hr_parallel(dequantized_task, &w, ceil_div(M, p.row_block) * w.panels);
  return HR_OK;
}
HR_REPLAYABLE(linear_blocks_dequantized)
#endif
