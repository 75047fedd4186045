// Rows of bf16 against panels of 64 outputs by matrix tiles, where the panel's weights were dequantized to bf16: what
// products with quantized weights share. A tile of weights is 16 pairs of inputs by 16 outputs; the sums are [rows][64]
// floats.
#pragma once

#include "amx.h"

#if defined(HR_AMX)

namespace {

constexpr int64_t kSumsStride = 64 * 4;  // bytes from row to row of sums

// Tile shapes for at most 32 rows: two blocks of rows by two of outputs, or one by four.
HR_INLINE void tile_shapes(int64_t rows) {
  TileShapes shapes;
  const int64_t first = smaller(rows, kTile), second = rows - first;
  for (int t = 0; t < 4; ++t) TileShapes::set(shapes, t, second > 0 && t >= 2 ? second : first, 64);
  TileShapes::set(shapes, 4, first, 64);
  TileShapes::set(shapes, 5, second > 0 ? second : kTile, 64);
  TileShapes::set(shapes, 6, kTile, 64), TileShapes::set(shapes, 7, kTile, 64);
  tiles_configure(shapes);
}

// Rows of x: bytes from row to row, to the second 16 of them, and from 32 inputs to the next.
struct TileRows {
  const char* x;
  int64_t stride, second, step;
};

// One step of 32 inputs; w: tiles of neighbouring outputs.
template <bool TWO>
HR_INLINE void step_tiles(const TileRows& rows, const char* w) {
  if (TWO) tiles_two<TileDot::bf16>(rows.x, rows.stride, rows.second, w, 64, kTileBytes);
  else tiles_one<TileDot::bf16>(rows.x, rows.stride, w, 64, kTileBytes);
}

// Where the four tiles' sums lie; `column`: of the two by two.
template <bool TWO, class Sum, class Function>
HR_INLINE void each_result(Sum* sums, int64_t column, Function f) {
  f(sums + column, sums + column + 16, sums + (TWO ? kTile * 64 + column : 32), sums + (TWO ? kTile * 64 + column + 16 : 48));
}
HR_INLINE void store_tiles(void* a, void* b, void* c, void* d) {
  HR_TILE_STORE(0, a, kSumsStride);
  HR_TILE_STORE(1, b, kSumsStride);
  HR_TILE_STORE(2, c, kSumsStride);
  HR_TILE_STORE(3, d, kSumsStride);
}
HR_INLINE void load_tiles(const void* a, const void* b, const void* c, const void* d) {
  HR_TILE_LOAD(0, a, kSumsStride);
  HR_TILE_LOAD(1, b, kSumsStride);
  HR_TILE_LOAD(2, c, kSumsStride);
  HR_TILE_LOAD(3, d, kSumsStride);
}

// `count` steps of 32 inputs, whose four tiles lie at `tiles` side by side, for one block of rows (TWO: from `column` on);
// the sums go on from those that are there.
template <bool TWO>
HR_INLINE void block_rows(TileRows rows, const char* tiles, int64_t column, int64_t count, bool begin, float* sums) {
  if (begin) zero_tiles();
  else each_result<TWO>(sums, column, load_tiles);
  const char* w = tiles + column / 16 * kTileBytes;
  for (int64_t i = 0; i < count; ++i, w += 4 * kTileBytes, rows.x += rows.step) step_tiles<TWO>(rows, w);
  each_result<TWO>(sums, column, store_tiles);
}

}  // namespace
#endif
