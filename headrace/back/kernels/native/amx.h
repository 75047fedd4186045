// Matrix tiles (AMX): eight registers of 16 rows of 64 bytes, and what is needed around them.
//
// The instructions are written as assembly: the compiler's intrinsics do not tell it which memory a tile load reads, and it
// would drop the stores that fill that memory. A thread configures its tiles at the start of a chunk and releases them at
// its end; nothing survives in between.
#pragma once

#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HR_AMX 1

namespace {

constexpr int64_t kTile = 16;         // rows of a tile
constexpr int64_t kTileBytes = 1024;  // of a full tile

// Shapes of the eight registers: rows, and bytes of a row.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  HR_INLINE void set(TileShapes& shapes, int tile, int64_t rows, int64_t bytes) {
    shapes.rows[tile] = uint8_t(rows), shapes.bytes[tile] = uint16_t(bytes);
  }
};

HR_INLINE void tiles_configure(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes)); }
HR_INLINE void tiles_release() { __asm__ volatile("tilerelease" ::); }

#define HR_TILE_LOAD(t, p, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"(int64_t(stride)) : "memory")
#define HR_TILE_STORE(t, p, stride) \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"(int64_t(stride)) : "memory")
#define HR_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define HR_TILE_DOT_BF16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define HR_TILE_DOT_SS8(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
// Signed bytes of a times unsigned bytes of b.
#define HR_TILE_DOT_SU8(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

HR_INLINE void zero_tiles() {
  HR_TILE_ZERO(0);
  HR_TILE_ZERO(1);
  HR_TILE_ZERO(2);
  HR_TILE_ZERO(3);
}

enum class TileDot { bf16, ss8, su8 };
#define HR_TILE_DOT(dot, c, a, b)                        \
  if constexpr ((dot) == TileDot::bf16)                      \
    HR_TILE_DOT_BF16(c, a, b);                           \
  else if constexpr ((dot) == TileDot::ss8)                  \
    HR_TILE_DOT_SS8(c, a, b);                            \
  else                                                   \
    HR_TILE_DOT_SU8(c, a, b)

// One step of sums 0 .. 3, rows of x by rows of w. A block of rows by four of outputs, `across` bytes from one to the next:
template <TileDot DOT>
HR_INLINE void tiles_one(const void* x, int64_t x_stride, const void* w, int64_t w_stride, int64_t across) {
  const char* from = static_cast<const char*>(w);
  HR_TILE_LOAD(4, x, x_stride);
  HR_TILE_LOAD(5, from, w_stride);
  HR_TILE_DOT(DOT, 0, 4, 5);
  HR_TILE_LOAD(6, from + across, w_stride);
  HR_TILE_DOT(DOT, 1, 4, 6);
  HR_TILE_LOAD(7, from + 2 * across, w_stride);
  HR_TILE_DOT(DOT, 2, 4, 7);
  HR_TILE_LOAD(5, from + 3 * across, w_stride);
  HR_TILE_DOT(DOT, 3, 4, 5);
}
// Two blocks of rows, `second` bytes apart, by two of outputs.
template <TileDot DOT>
HR_INLINE void tiles_two(const void* x, int64_t x_stride, int64_t second, const void* w, int64_t w_stride, int64_t across) {
  HR_TILE_LOAD(6, w, w_stride);
  HR_TILE_LOAD(4, x, x_stride);
  HR_TILE_DOT(DOT, 0, 4, 6);
  HR_TILE_LOAD(7, static_cast<const char*>(w) + across, w_stride);
  HR_TILE_DOT(DOT, 1, 4, 7);
  HR_TILE_LOAD(5, static_cast<const char*>(x) + second, x_stride);
  HR_TILE_DOT(DOT, 2, 5, 6);
  HR_TILE_DOT(DOT, 3, 5, 7);
}

// 16 vectors of 16 words, transposed in registers.
HR_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  HR_UNROLL for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  HR_UNROLL for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  HR_UNROLL for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  HR_UNROLL for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

}  // namespace
#endif
