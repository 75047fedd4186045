// Products with block-quantized weights by matrix tiles, for several rows of x.
//
// A panel of 64 outputs goes by in stretches of inputs. Of a stretch the weights become signed bytes and the scales floats,
// in the first-level cache and once for all rows; then every 16 rows of x meet it: the tiles give the exact sums of
// products of quantized values, part by part, and the same chain of operations as for a single row turns them into floats:
// the same bits.
#pragma once

#include "amx.h"
#include "block_gemm.h"

#if defined(HR_AMX)

namespace {

constexpr int64_t kTileRowBlock = 64;  // rows of x whose results stay in the first-level cache

template <class C>
struct Stretch {
  static constexpr int64_t inputs = C::sub == 16 ? 64 : 128, parts = inputs / C::sub;
  static constexpr int64_t depth = C::sub < 64 ? C::sub : 64;  // inputs of one tile
};

struct TileBuffers {
  alignas(64) uint8_t quantized[128 * kPanel];     // [steps of 4 inputs][64 outputs][4]
  alignas(64) float scales[4][kPanel];         // of each part
  alignas(64) float minima[4][kPanel];
  alignas(64) int32_t sums[4 * 4 * 256];       // [parts][64 outputs / 16][16 rows][16]
};

HR_INLINE I signed_bytes(I quantized, int offset) {
  return (I)_mm512_sub_epi8((__m512i)quantized, _mm512_set1_epi8(char(offset)));
}

// Quantized values and scales of `parts` parts of a panel from input k on.
template <class C>
HR_INLINE void unpack_stretch(const uint8_t* panel, int64_t k, int64_t parts, TileBuffers& to) {
  for (int64_t at = 0; at < parts * C::sub; at += 32) {
    const uint8_t* super = panel + (k + at) / C::block * super_bytes<C>();
    const uint8_t* group = super + header_bytes<C>() + (k + at) % C::block / 32 * group_bytes<C>();
    HR_UNROLL for (int j = 0; j < 4; ++j) {
      I b[8];
      load_quantized<C>(group + scale_bytes<C>(), j * kLanes, b);
      HR_UNROLL for (int s = 0; s < 8; ++s) {
        const I code = C::wide ? signed_bytes(b[s], 128) : C::offset ? signed_bytes(b[s], C::offset) : b[s];
        __builtin_memcpy(to.quantized + (at / 4 + s) * kPlane + j * 64, &code, 64);
      }
    }
    constexpr int64_t mine = C::sub < 32 ? 32 / C::sub : 1;
    for (int64_t h = 0; h < mine; ++h) HR_UNROLL for (int j = 0; j < 4; ++j) {
      const auto* d = reinterpret_cast<const typename C::Scale*>(super) + j * kLanes;
      const F scale = part_scales<C>(load(d), super, group, int(h), j * kLanes);
      F minimum = C::minimum ? load(d + kPanel) : F{};
      if (C::two_level && C::minimum) minimum *= small_floats(group + (mine + h) * kPanel + j * kLanes);
      const int64_t part = at / C::sub + h;
      __builtin_memcpy(&to.scales[part][j * kLanes], &scale, 64);
      if (C::minimum) __builtin_memcpy(&to.minima[part][j * kLanes], &minimum, 64);
    }
  }
}

HR_INLINE void block_tile_shapes(int64_t rows, int64_t depth) {
  TileShapes shapes;
  for (int t = 0; t < 4; ++t) TileShapes::set(shapes, t, rows, 64);
  TileShapes::set(shapes, 4, rows, depth);
  for (int t = 5; t < 8; ++t) TileShapes::set(shapes, t, depth / 4, 64);
  tiles_configure(shapes);
}

// The sums of one part for the rows at x, all 64 outputs.
template <class C>
HR_INLINE void tile_sums(const int8_t* x, int64_t stride, const uint8_t* w, int32_t* to) {
  zero_tiles();
  for (int64_t k = 0; k < C::sub; k += Stretch<C>::depth, w += Stretch<C>::depth / 4 * kPlane)
    tiles_one<TileDot::ss8>(x + k, stride, w, kPlane, 64);
  HR_TILE_STORE(0, to, 64);
  HR_TILE_STORE(1, to + 256, 64);
  HR_TILE_STORE(2, to + 512, 64);
  HR_TILE_STORE(3, to + 768, 64);
}

// Adds the sums of a stretch from input k on, times their scales, to the results of rows [m, m + rows).
template <class C>
HR_INLINE void add_sums(const Gemm& p, const TileBuffers& from, int64_t k, int64_t parts, int64_t m, int64_t rows,
                        float* results) {
  for (int64_t i = 0; i < rows; ++i, results += kPanel) {
    F acc[4];
    HR_UNROLL for (int j = 0; j < 4; ++j) acc[j] = k == 0 ? F{} : load_raw<F>(results + j * kLanes);
    for (int64_t h = 0; h < parts; ++h) {
      const int64_t fact = (m + i) * p.groups + (k + h * C::sub) / C::x_group;
      const float x_scale = p.scales[fact];
      const int32_t* sums = p.sums + fact * 2;
      const float less = C::minimum ? -(x_scale * float(C::sub < 32 ? sums[h % 2] : sums[0] + sums[1])) : 0;
      HR_UNROLL for (int j = 0; j < 4; ++j) {
        const I dot = load_raw<I>(from.sums + ((h * 4 + j) * 16 + i) * 16);
        acc[j] = fma(__builtin_convertvector(dot, F), load_raw<F>(&from.scales[h][j * kLanes]) * x_scale, acc[j]);
        if (C::minimum) acc[j] = fma(load_raw<F>(&from.minima[h][j * kLanes]), less, acc[j]);
      }
    }
    HR_UNROLL for (int j = 0; j < 4; ++j) __builtin_memcpy(results + j * kLanes, &acc[j], 64);
  }
}

// A part's share of the panel's bytes some parts ahead: a few lines at a time, which memory can take.
template <class C>
HR_INLINE void fetch_part(const uint8_t* panel, int64_t part) {
  constexpr int64_t bytes = C::sub * super_bytes<C>() / C::block, distance = 8192;
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(panel + part * bytes + distance + line, 0, 2);
}

// One panel against rows [row, stop), at most kTileRowBlock.
template <class C>
void tile_panel(const Gemm& p, const uint8_t* panel, int64_t row, int64_t stop, TileBuffers& buffers, float* results) {
  using S = Stretch<C>;
  const int64_t inputs = ceil_div(p.K, int64_t(C::block)) * C::block;
  const int64_t each = ceil_div(stop - row, ceil_div(stop - row, kTile));
  int64_t shaped = 0;
  for (int64_t k = 0; k < inputs; k += S::inputs) {
    const int64_t parts = smaller(S::parts, (inputs - k) / C::sub);
    unpack_stretch<C>(panel, k, parts, buffers);
    for (int64_t m = row; m < stop; m += each) {
      const int64_t rows = smaller(stop - m, each);
      if (rows != shaped) block_tile_shapes(rows, S::depth), shaped = rows;
      for (int64_t h = 0; h < parts; ++h) {
        if (m == 0) fetch_part<C>(panel, k / C::sub + h);
        tile_sums<C>(p.quantized + m * p.stride + k + h * C::sub, p.stride, buffers.quantized + h * C::sub / 4 * kPlane,
                     buffers.sums + h * 4 * 256);
      }
      add_sums<C>(p, buffers, k, parts, m, rows, results + (m - row) * kPanel);
    }
  }
}

}  // namespace
#endif
