// y[M,N] = x[M,K] w[N,K]^T + bias[N] in bf16 with matrix tiles: the weights stay as they lie, row by row.
//
// The weights are the left operand: a tile is 16 weight rows by 32 of K, read in place. The rows of x are the right one:
// they are packed at each call, pairs of K side by side (a single row needs no packing at all). So nothing is repacked at
// load, and a tied embedding is held once. Each result is one chain of operations along K in a fixed order, whatever the
// rows beside it: the same for one row as for a thousand.
//
// Few rows of x: weights stream from memory, the next block is fetched ahead. Many: 32 weight rows are copied into tile
// order, a stretch of K at a time that stays in the first-level cache, and all rows of x go by from the second-level cache.
//
// Where the first half of the weights gates the second, the two blocks of 16 weight rows are one of gates and the one it gates.
#pragma once

#include "activation.h"
#include "amx.h"
#include "top.h"

#if defined(HR_AMX)

namespace {

constexpr int64_t kStepK = 32;                     // of K in one tile
constexpr int64_t kPair = 2 * kTile;               // weight rows, and rows of x, of one block of results
constexpr int64_t kFewRows = 64;                   // up to here the weights are read in place
constexpr int64_t kFewBytes = 384 * 1024;          // of weights per chunk then
constexpr int64_t kCachedSteps = 8;                // of K that stay in the first-level cache: 16 KB of weights
constexpr int64_t kCachedTokens = 1024 * 1024;     // bytes of x that stay in the second-level cache

struct TileLinear {
  const bf16 *w, *x;
  const void* bias;
  void* y;
  int64_t M, N, K, w_stride, x_stride, y_stride;
  int64_t steps;      // along K
  char* tokens;       // x packed: blocks of 16 rows, each `steps` tiles of 16 pairs by `width` rows
  int64_t rows_per_chunk;
  int64_t gated;       // 0, or so many outputs: those of y, and weight row n + gated belongs to n
  int32_t activation;  // then
  const Top* top;      // null, or where the best results are kept, and y is memory of a chunk
  int64_t y_first;     // the output that y begins with
};

// From one block of 16 weight rows to the other.
HR_INLINE int64_t to_second(const TileLinear& p) { return p.gated > 0 ? p.gated : kTile; }

// Rows of x in the block that starts at m.
HR_INLINE int64_t width_at(int64_t M, int64_t m) { return smaller(M - m, kTile); }

// Packs rows [16 i, 16 i + 16) of x.
void pack_tokens(void* context, int64_t i) {
  const TileLinear& p = *static_cast<const TileLinear*>(context);
  const int64_t m = i * kTile, width = width_at(p.M, m);
  const bf16* x = p.x + m * p.x_stride;
  char* to = p.tokens + i * p.steps * kTileBytes;
  const __mmask16 mask = __mmask16((1u << width) - 1);
  for (int64_t k = 0; k < p.K; k += kStepK, to += width * 64) {
    const int64_t left = smaller(p.K - k, kStepK);
    __m512i r[16];
    HR_UNROLL for (int j = 0; j < 16; ++j)
      r[j] = j < width ? _mm512_maskz_loadu_epi16(__mmask32((1ull << left) - 1), x + j * p.x_stride + k)
                       : _mm512_setzero_si512();
    if (width == 1) {
      _mm512_storeu_si512(to, r[0]);
      continue;
    }
    transpose16(r);
    HR_UNROLL for (int j = 0; j < 16; ++j) _mm512_mask_storeu_epi32(to + j * width * 4, mask, r[j]);
  }
}

// Where one side's two tiles lie for the first step, bytes from row to row of a tile, bytes from step to step.
struct Side {
  const char *first, *second;
  int64_t stride, step;
};

// tmm0 .. tmm3 += a0 b0, a0 b1, a1 b0, a1 b1 over `steps`. PF: cache lines fetched ahead per step, half of them from `next`
// and half from `second` on.
template <bool A1, bool B1, int PF>
HR_INLINE void multiply(Side a, Side b, int64_t steps, const char* next, const char* second) {
  for (int64_t k = 0; k < steps; ++k) {
    HR_UNROLL for (int i = 0; i < PF / 2; ++i) __builtin_prefetch(next + i * 64, 0, 2);
    HR_UNROLL for (int i = 0; i < PF / 2; ++i) __builtin_prefetch(second + i * 64, 0, 2);
    HR_TILE_LOAD(6, b.first, b.stride);
    HR_TILE_LOAD(4, a.first, a.stride);
    HR_TILE_DOT_BF16(0, 4, 6);
    if (A1) {
      HR_TILE_LOAD(5, a.second, a.stride);
      HR_TILE_DOT_BF16(2, 5, 6);
    }
    if (B1) {
      HR_TILE_LOAD(7, b.second, b.stride);
      HR_TILE_DOT_BF16(1, 4, 7);
      if (A1) HR_TILE_DOT_BF16(3, 5, 7);
    }
    a.first += a.step, a.second += a.step, b.first += b.step, b.second += b.step;
    next += PF / 2 * 64, second += PF / 2 * 64;
  }
}

// The four tiles of results: 16 weight rows of 16 rows of x each.
template <bool A1, bool B1>
HR_INLINE void zero_results() {
  HR_TILE_ZERO(0);
  if (B1) HR_TILE_ZERO(1);
  if (A1) HR_TILE_ZERO(2);
  if (A1 && B1) HR_TILE_ZERO(3);
}
template <bool A1, bool B1>
HR_INLINE void load_results(const char* c) {
  HR_TILE_LOAD(0, c, 64);
  if (B1) HR_TILE_LOAD(1, c + kTileBytes, 64);
  if (A1) HR_TILE_LOAD(2, c + 2 * kTileBytes, 64);
  if (A1 && B1) HR_TILE_LOAD(3, c + 3 * kTileBytes, 64);
}
template <bool A1, bool B1>
HR_INLINE void store_results(char* c, int64_t stride) {
  HR_TILE_STORE(0, c, stride);
  if (B1) HR_TILE_STORE(1, c + kTileBytes, stride);
  if (A1) HR_TILE_STORE(2, c + 2 * kTileBytes, stride);
  if (A1 && B1) HR_TILE_STORE(3, c + 3 * kTileBytes, stride);
}

// One tile of results, [outputs][rows of x] with `stride` bytes a row (64, or 4 for a single row of x), to rows m .. of y
// with the bias added.
template <class Y>
HR_INLINE void put_tile(const TileLinear& p, const char* c, int64_t stride, int64_t n, int64_t outputs, int64_t m,
                        int64_t rows) {
  const F bias = p.bias == nullptr ? F{} : load_part(static_cast<const bf16*>(p.bias) + n, outputs);
  Y* y = static_cast<Y*>(p.y) + m * p.y_stride + (n - p.y_first);
  if (stride == 4) {
    store_part(y, load(reinterpret_cast<const float*>(c)) + bias, outputs);
    return;
  }
  __m512i r[16];
  HR_UNROLL for (int j = 0; j < 16; ++j) r[j] = _mm512_load_si512(c + j * 64);
  transpose16(r);
  if (rows == kTile && outputs == kTile) {
    HR_UNROLL for (int j = 0; j < 16; ++j) store(y + j * p.y_stride, (F)r[j] + bias);
    return;
  }
  HR_UNROLL for (int j = 0; j < 16; ++j)
    if (j < rows) store_part(y + j * p.y_stride, (F)r[j] + bias, outputs);
}

// c[2] and c[3] gated by c[0] and c[1], to rows m .. of y.
template <class Y>
HR_INLINE void put_gated(const TileLinear& p, char* c, int64_t stride, int64_t n, int64_t m) {
  for (int64_t j = 0; j < 2 && m + j * kTile < p.M; ++j) {
    float* gates = reinterpret_cast<float*>(c + j * kTileBytes);
    const float* ups = reinterpret_cast<const float*>(c + (2 + j) * kTileBytes);
    for (int64_t i = 0; i < kTile * stride / 4; i += kLanes) store(gates + i, gate(p.activation, load(gates + i), load(ups + i)));
    put_tile<Y>(p, c + j * kTileBytes, stride, n, kTile, m + j * kTile, width_at(p.M, m + j * kTile));
  }
}

template <class Y>
HR_INLINE void put_results(const TileLinear& p, char* c, int64_t stride, int64_t n, int64_t m) {
  if (p.gated > 0) return put_gated<Y>(p, c, stride, n, m);
  for (int64_t i = 0; i < 2; ++i)
    for (int64_t j = 0; j < 2; ++j)
      if (n + i * kTile < p.N && m + j * kTile < p.M)
        put_tile<Y>(p, c + (2 * i + j) * kTileBytes, stride, n + i * kTile, smaller(p.N - n - i * kTile, kTile),
                    m + j * kTile, width_at(p.M, m + j * kTile));
}

// Tile shapes for a block of results at (n, m).
HR_INLINE void configure_block(const TileLinear& p, int64_t n, int64_t m) {
  TileShapes shapes;
  for (int i = 0; i < 2; ++i) {
    const int64_t outputs = p.gated > 0 ? kTile : larger<int64_t>(smaller(p.N - n - i * kTile, kTile), 0);
    const int64_t rows = larger<int64_t>(smaller(p.M - m - i * kTile, kTile), 0);
    for (int j = 0; j < 2; ++j) {
      const int64_t beside = larger<int64_t>(smaller(p.M - m - j * kTile, kTile), 0);
      if (outputs > 0 && beside > 0) TileShapes::set(shapes, 2 * i + j, outputs, beside * 4);
    }
    if (outputs > 0) TileShapes::set(shapes, 4 + i, outputs, 64);
    if (rows > 0) TileShapes::set(shapes, 6 + i, kTile, rows * 4);
  }
  tiles_configure(shapes);
}

HR_INLINE Side tokens_at(const TileLinear& p, int64_t m, int64_t step) {
  const int64_t width = width_at(p.M, m);  // of the first block; a second one is as wide
  const char* first = p.tokens + m * p.steps * (kTileBytes / kTile) + step * width * 64;
  return {first, first + p.steps * kTileBytes, width * 4, width * 64};
}

// The last step of K where it is not full: the weights' part is copied beside zeros.
HR_INLINE void copy_last(const TileLinear& p, int64_t n, char* to) {
  const int64_t k = (p.steps - 1) * kStepK;
  const __mmask32 mask = __mmask32((1ull << (p.K - k)) - 1);
  for (int64_t j = 0; j < kPair; ++j) {
    const int64_t row = n + j % kTile + j / kTile * to_second(p);
    if (row < p.N) _mm512_store_si512(to + j * 64, _mm512_maskz_loadu_epi16(mask, p.w + row * p.w_stride + k));
  }
}

// 32 weight rows at n, read in place, against rows [m, m + 32) of x.
template <class Y, bool A1, bool B1, int PF>
HR_INLINE void few_tile(const TileLinear& p, int64_t n, int64_t m, const char* next) {
  const int64_t across = to_second(p) * p.w_stride * 2;
  alignas(64) char c[4 * kTileBytes];
  const char* w = reinterpret_cast<const char*>(p.w + n * p.w_stride);
  const int64_t whole = p.K / kStepK;
  const Side a{w, w + across, p.w_stride * 2, 64}, b = tokens_at(p, m, 0);
  zero_results<A1, B1>();
  multiply<A1, B1, PF>(a, b, whole, next, next + across);
  if (whole < p.steps) {
    alignas(64) char last[2 * kTileBytes];
    copy_last(p, n, last);
    const Side rest = tokens_at(p, m, whole);
    multiply<A1, B1, 0>({last, last + kTileBytes, 64, 0}, rest, 1, nullptr, nullptr);
  }
  const int64_t stride = p.M - m == 1 ? 4 : 64;
  store_results<A1, B1>(c, stride);
  put_results<Y>(p, c, stride, n, m);
}

template <class Y, bool A1>
HR_INLINE void few_block(const TileLinear& p, int64_t n, const char* next) {
  // Pairs of full blocks of x; what is left is a single block, full or not.
  int64_t m = 0;
  const bool uneven = p.M % kTile != 0 || p.M > kPair;
  if (uneven) configure_block(p, n, m);
  for (; m + kPair <= p.M; m += kPair) {
    if (m == 0) few_tile<Y, A1, true, A1 ? 32 : 0>(p, n, m, next);
    else few_tile<Y, A1, true, 0>(p, n, m, next);
  }
  for (; m < p.M; m += kTile) {
    if (uneven) configure_block(p, n, m);
    if (m == 0) few_tile<Y, A1, false, A1 ? 32 : 0>(p, n, m, next);
    else few_tile<Y, A1, false, 0>(p, n, m, next);
  }
}

template <class Y>
void few_chunk(void* context, int64_t i) {
  TileLinear p = *static_cast<const TileLinear*>(context);
  const int64_t first = i * p.rows_per_chunk, end = smaller(first + p.rows_per_chunk, p.gated > 0 ? p.gated : p.N);
  if (p.top != nullptr) {
    p.y = hr_scratch(p.M * p.y_stride * int64_t(sizeof(float)), 2), p.y_first = first;
    if (p.y == nullptr) __builtin_trap();
  }
  configure_block(p, 0, 0);
  int64_t n = first;
  const int64_t outputs = p.gated > 0 ? kTile : kPair;
  for (; n + outputs <= end; n += outputs)
    few_block<Y, true>(p, n, reinterpret_cast<const char*>(p.w + (n + outputs) * p.w_stride));
  for (; n < end; n += kTile) {
    configure_block(p, n, 0);
    few_block<Y, false>(p, n, nullptr);
  }
  tiles_release();
  if (p.top != nullptr) top_take(*p.top, i, static_cast<const float*>(p.y), p.y_stride, first, end - first);
}

// 32 weight rows and `steps` of K as tiles, the two of a step side by side; zeros beyond N and K.
HR_INLINE void copy_weights(const TileLinear& p, int64_t n, int64_t step, int64_t steps, char* to) {
  for (int64_t j = 0; j < kPair; ++j) {
    const int64_t number = n + j % kTile + j / kTile * to_second(p);
    const bf16* w = p.w + number * p.w_stride + step * kStepK;
    char* row = to + j / kTile * kTileBytes + j % kTile * 64;
    for (int64_t k = 0; k < steps; ++k, w += kStepK, row += 2 * kTileBytes) {
      const int64_t left = number < p.N ? smaller(p.K - (step + k) * kStepK, kStepK) : 0;
      _mm512_store_si512(row, left == kStepK ? _mm512_loadu_si512(w)
                                             : _mm512_maskz_loadu_epi16(__mmask32((1ull << left) - 1), w));
    }
  }
}

// 32 weight rows against all rows of x, whose number is a multiple of 32 (padded with zeros).
template <class Y>
void many_chunk(void* context, int64_t i) {
  const TileLinear p = *static_cast<const TileLinear*>(context);
  const int64_t n = i * (p.gated > 0 ? kTile : kPair), blocks = ceil_div(p.M, kPair);
  char* w = static_cast<char*>(hr_scratch(kCachedSteps * 2 * kTileBytes + blocks * 4 * kTileBytes, 1));
  if (w == nullptr) __builtin_trap();
  char* results = w + kCachedSteps * 2 * kTileBytes;
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) TileShapes::set(shapes, t, kTile, 64);
  tiles_configure(shapes);
  for (int64_t step = 0; step < p.steps; step += kCachedSteps) {
    const int64_t steps = smaller(p.steps - step, kCachedSteps);
    copy_weights(p, n, step, steps, w);
    for (int64_t m = 0, block = 0; block < blocks; m += kPair, ++block) {
      char* c = results + block * 4 * kTileBytes;
      const char* x = p.tokens + (m * p.steps + step * kTile) * (kTileBytes / kTile);
      if (step == 0) zero_results<true, true>();
      else load_results<true, true>(c);
      multiply<true, true, 0>({w, w + kTileBytes, 64, 2 * kTileBytes}, {x, x + p.steps * kTileBytes, 64, kTileBytes}, steps,
                              nullptr, nullptr);
      store_results<true, true>(c, 64);
      if (step + steps == p.steps) put_results<Y>(p, c, 64, n, m);
    }
  }
  tiles_release();
}

// Packs 16 rows of x, those beyond M as zeros.
void pack_padded(void* context, int64_t i) {
  const TileLinear& p = *static_cast<const TileLinear*>(context);
  const int64_t m = i * kTile;
  char* to = p.tokens + i * p.steps * kTileBytes;
  for (int64_t k = 0; k < p.K; k += kStepK, to += kTileBytes) {
    const __mmask32 mask = __mmask32((1ull << smaller(p.K - k, kStepK)) - 1);
    __m512i r[16];
    HR_UNROLL for (int j = 0; j < 16; ++j)
      r[j] = _mm512_maskz_loadu_epi16(m + j < p.M ? mask : 0, p.x + (m + j) * p.x_stride + k);
    transpose16(r);
    HR_UNROLL for (int j = 0; j < 16; ++j) _mm512_store_si512(to + j * 64, r[j]);
  }
}

template <class Y>
int32_t tile_linear(TileLinear p) {
  p.steps = ceil_div(p.K, kStepK);
  if (p.M <= kFewRows) {
    p.tokens = static_cast<char*>(hr_scratch(ceil_div(p.M, kTile) * p.steps * kTileBytes, 0));
    if (p.tokens == nullptr) return HR_NO_MEMORY;
    for (int64_t i = 0; i < ceil_div(p.M, kTile); ++i) pack_tokens(&p, i);
    const int64_t outputs = p.gated > 0 ? p.gated : p.N, each = p.K * (p.gated > 0 ? 4 : 2);
    const int64_t share = ceil_div(outputs, int64_t(hr_pool_threads()));  // a small weight is no chunk or two but one each
    if (p.top != nullptr) p.rows_per_chunk = p.y_stride = kTopOutputs;
    else p.rows_per_chunk = ceil_div(larger<int64_t>(smaller(kFewBytes / each, share), 1), kPair) * kPair;
    hr_parallel(few_chunk<Y>, &p, ceil_div(outputs, p.rows_per_chunk));
    return HR_OK;
  }
  const int64_t most = larger<int64_t>(kCachedTokens / (p.steps * kStepK * 2) / kPair, 2) * kPair;
  const int64_t rounds = ceil_div(p.M, most), rows = ceil_div(ceil_div(p.M, rounds), kPair) * kPair;
  p.tokens = static_cast<char*>(hr_scratch(rows * p.steps * kStepK * 2, 0));
  if (p.tokens == nullptr) return HR_NO_MEMORY;
  for (int64_t m = 0; m < p.M; m += rows) {
    TileLinear part = p;
    part.x += m * p.x_stride, part.y = static_cast<Y*>(p.y) + m * p.y_stride, part.M = smaller(p.M - m, rows);
    hr_parallel(pack_padded, &part, ceil_div(part.M, kPair) * 2);
    hr_parallel(many_chunk<Y>, &part, p.gated > 0 ? p.gated / kTile : ceil_div(p.N, kPair));
  }
  return HR_OK;
}

}  // namespace
#endif
