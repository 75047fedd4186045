// One task of attention in bf16 with matrix tiles: at most 32 query rows against KV tiles of 64 tokens.
//
// Scores come out transposed, S^T = K Q^T: keys are read in place, 16 at a time, and a lane of a vector is a query row, so
// maximum, exponential and sum need no step across lanes. Weights go back as rows of bf16, values are interleaved by pairs
// of tokens, and O = P V runs over the same tiles for one query as for many: a row's bits depend on no other row. KV tiles
// begin at multiples of 64 tokens whatever the window, and values outside [low, high) count as zeros, for they may be NaN.
//
// Quantized values (int8, fp8) are exact in bf16: 16 tokens at a time they are dequantized on the way into the same tiles, once for all query
// rows of the task; the scale of a key goes onto its scores and that of a value onto its weights.
#pragma once

#include "amx.h"
#include "paged_attention.h"

#if defined(HR_AMX)

namespace {

constexpr int64_t kQueryRows = 32, kKeys = 64;

// What a task reads besides the paged cache.
struct TileTask {
  int64_t rows, head_dim, low, high, window;
  float scale, softcap;
  const int32_t* position;  // of each query row
};

// Memory of one task.
struct TileMemory {
  char* queries;   // [2][D / 32] tiles: pairs of dimensions by 16 rows
  char* values;    // [2 steps of 32 tokens][D / 16] tiles: pairs of tokens by 16 dimensions
  char* weights;   // [2 rows][2 steps] tiles
  float* scores;   // [64 tokens][32 rows]
  float* sums;     // [2][D / 16][16 rows][16]
};

HR_INLINE int64_t tile_memory_bytes(int64_t D) { return 2 * D * 32 + 2 * D * 64 + 4 * kTileBytes + 64 * 32 * 4 + 2 * D * 64; }

HR_INLINE TileMemory tile_memory(char* at, int64_t D) {
  TileMemory m;
  m.queries = at, at += 2 * D * 32;
  m.values = at, at += 2 * D * 64;
  m.weights = at, at += 4 * kTileBytes;
  m.scores = reinterpret_cast<float*>(at), at += 64 * 32 * 4;
  m.sums = reinterpret_cast<float*>(at);
  return m;
}

HR_INLINE void full_tiles() {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) TileShapes::set(shapes, t, kTile, 64);
  tiles_configure(shapes);
}

// Scores of 32 keys, 16 at k0 and 16 at k1, for NQ blocks of 16 query rows.
template <int NQ>
HR_INLINE void tile_scores(const bf16* k0, const bf16* k1, const char* queries, int64_t D, float* scores) {
  HR_TILE_ZERO(0);
  HR_TILE_ZERO(2);
  if (NQ > 1) HR_TILE_ZERO(1);
  if (NQ > 1) HR_TILE_ZERO(3);
  for (int64_t d = 0; d < D; d += 32, queries += kTileBytes) {
    HR_TILE_LOAD(4, k0 + d, D * 2);
    HR_TILE_LOAD(6, queries, 64);
    HR_TILE_DOT_BF16(0, 4, 6);
    HR_TILE_LOAD(5, k1 + d, D * 2);
    HR_TILE_DOT_BF16(2, 5, 6);
    if (NQ > 1) {
      HR_TILE_LOAD(7, queries + D * 32, 64);
      HR_TILE_DOT_BF16(1, 4, 7);
      HR_TILE_DOT_BF16(3, 5, 7);
    }
  }
  HR_TILE_STORE(0, scores, 128);
  HR_TILE_STORE(2, scores + 16 * 32, 128);
  if (NQ > 1) HR_TILE_STORE(1, scores + 16, 128);
  if (NQ > 1) HR_TILE_STORE(3, scores + 16 * 32 + 16, 128);
}

// Word i of the one vector beside word i of the other, for their lower or upper halves.
alignas(64) constexpr uint16_t kInterleave[2][32] = {
    {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
    {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
     24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
HR_INLINE __m512i interleave(int half) { return _mm512_load_si512(kInterleave[half]); }

// Two tokens' values side by side, dimension by dimension; null: zeros.
HR_INLINE void pair_values(const bf16* even, const bf16* odd, int64_t D, char* to) {
  const __m512i low = interleave(0), high = interleave(1);
  for (int64_t d = 0; d < D; d += 32, to += 2 * kTileBytes) {
    const __m512i a = even ? _mm512_loadu_si512(even + d) : _mm512_setzero_si512();
    const __m512i b = odd ? _mm512_loadu_si512(odd + d) : _mm512_setzero_si512();
    _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
    _mm512_store_si512(to + kTileBytes, _mm512_permutex2var_epi16(a, high, b));
  }
}

// What 16 query rows have seen so far, a row per lane: their weights are 2^(score - base), the sum of those is total. Scores
// are in units of log 2. base is a score not far below the largest.
struct Running {
  F base, total;
};

// Results too small for normal numbers become zeros while this lives, and such operands count as zeros: each would cost some
// hundred cycles of microcode, and every hidden key would be one.
struct NoDenormals {
  uint32_t before;
  NoDenormals() : before(_mm_getcsr()) { set(before | 0x8040); }
  ~NoDenormals() { set(before); }
  static void set(uint32_t state) { __asm__ volatile("ldmxcsr %0" ::"m"(state) : "memory"); }
};

constexpr float kLog2E = 1.44269504088896341f;

// 2^t for t <= 8 or so (and NaN), 0 below -127: relative error below 8e-5, far below the weights' bf16.
HR_INLINE F fast_exp2(F x) {
  const __m512 t = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // NaN stays
  const F r = (F)_mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // t less its floor
  F y = fma(splat(7.8024521e-2f), r, splat(2.2606716e-1f));
  y = fma(y, r, splat(6.9583356e-1f));
  y = fma(y, r, splat(9.9992520e-1f));
  return (F)_mm512_scalef_ps((__m512)y, t);  // rounds t down
}

// Where the next tile's keys and values lie, 16 tokens each: with few query rows a task waits for memory, and the hardware
// does not see blocks coming that lie anywhere. They are fetched evenly over the work on scores.
struct Ahead {
  const char *keys[4], *values[4];
  int64_t bytes;  // of a token's vector
};
HR_INLINE void fetch_bytes(const char* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// The scales of a KV tile's tokens, where the cache is quantized; 0 outside [low, high).
struct TileScales {
  alignas(64) float keys[kKeys], values[kKeys];
};

// 16 tokens' values as bf16.
template <class S>
HR_INLINE const bf16* dequantize_rows(const S* quantized, int64_t D, bf16* to) {
  for (int64_t i = 0; i < 16 * D; i += 32)
    _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh((__m512)load(quantized + i + 16), (__m512)load(quantized + i)));
  return to;
}

// Whether scores need more than a factor on the way to the exponent.
template <bool QUANTIZED>
HR_INLINE bool plain_scores(const TileTask& p) { return !QUANTIZED && !(p.softcap > 0) && p.scale > 0; }

// Makes 16 rows' scores of a KV tile from token `first` on ready for weights, and finds the largest: scales of keys and the
// soft cap go onto them, hidden ones become -Inf.
template <bool QUANTIZED>
HR_INLINE F mask_scores(const TileTask& p, float* scores, const TileScales& scales, int64_t first, const int32_t* position) {
  const F none = splat(-__builtin_inff());
  if (!plain_scores<QUANTIZED>(p)) {
    for (int64_t j = 0; j < kKeys; ++j) {
      F v = load(scores + j * 32) * p.scale;
      if (QUANTIZED) v *= scales.keys[j];
      if (p.softcap > 0) v = p.softcap * vtanh(v / p.softcap);
      store(scores + j * 32, v);
    }
  }
  F best[4] = {none, none, none, none};
  // Positions rise from lane to lane.
  if (first + kKeys - 1 <= position[0] && first >= first_seen(p.window, position[kLanes - 1])) {
    for (int64_t j = 0; j < kKeys; j += 4)
      HR_UNROLL for (int i = 0; i < 4; ++i) best[i] = vmax(load(scores + (j + i) * 32), best[i]);
  } else {
    const I at = load_raw<I>(position);
    I least = at - int32_t(smaller<int64_t>(p.window, INT32_MAX) - 1);  // the first visible position
    if (p.window < 0) {
      alignas(64) int32_t chunk[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) chunk[i] = int32_t(first_seen(p.window, position[i]));
      least = load_raw<I>(chunk);
    }
    for (int64_t j = 0; j < kKeys; ++j) {
      const int32_t key = int32_t(first + j);
      const F v = select((at >= key) & (least <= key), load(scores + j * 32), none);
      store(scores + j * 32, v);
      best[j % 4] = vmax(v, best[j % 4]);
    }
  }
  return vmax(vmax(best[0], best[1]), vmax(best[2], best[3]));
}

// How scores become weights: 2^(score * unit - base); and what the rows' earlier sums must be multiplied by.
struct Raised {
  F factor, base;
  float unit;
  bool changed;
};

// Moves a row's base only where weights would grow beyond 2^8: it hardly ever does after the first KV tiles.
template <bool QUANTIZED>
HR_INLINE Raised raise(const TileTask& p, F best, Running& run) {
  Raised to;
  const F none = splat(-__builtin_inff());
  to.unit = plain_scores<QUANTIZED>(p) ? p.scale * kLog2E : kLog2E;
  const F top = best * to.unit;
  const F base = select(top > run.base + 8.0f, top, run.base);
  to.base = select(base == none, F{}, base);
  to.changed = _mm512_cmp_ps_mask((__m512)base, (__m512)run.base, _CMP_NEQ_UQ) != 0;
  to.factor = splat(1.0f);
  if (to.changed) {
    const F less = vexp((run.base - to.base) * 0.693147180559945309f);
    to.factor = select(run.base == none, F{}, select(base == run.base, to.factor, less));
  }
  run.base = base;
  return to;
}

HR_INLINE F weight_of(const Raised& by, const float* score) { return fast_exp2(fma(load(score), by.unit, -by.base)); }

// Lane i of even beside lane i of odd, as bf16.
alignas(64) constexpr uint16_t kHalves[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
HR_INLINE __m512i interleave_halves() { return _mm512_load_si512(kHalves); }
HR_INLINE __m512i pair_weights(__m512i order, F even, F odd) {
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

// Scores of a KV tile from token `first` on become weights in the tiles of `weights`; returns what the earlier sums must be
// multiplied by.
template <bool FETCH, bool QUANTIZED>
HR_INLINE F tile_soften(const TileTask& p, float* scores, const TileScales& scales, const Ahead& ahead, int64_t first,
                        const int32_t* position, Running& run, char* weights) {
  for (int64_t j = 0; FETCH && j < kKeys; ++j) fetch_bytes(ahead.keys[j / 16] + j % 16 * ahead.bytes, ahead.bytes);
  const Raised raised = raise<QUANTIZED>(p, mask_scores<QUANTIZED>(p, scores, scales, first, position), run);
  F sums[2] = {};
  const __m512i order = interleave_halves();
  for (int64_t step = 0; step < 2; ++step) {
    __m512i rows[16];
    HR_UNROLL for (int i = 0; i < 16; ++i) {
      const int64_t j = step * 32 + 2 * i;
      if (FETCH) fetch_bytes(ahead.values[j / 16] + j % 16 * ahead.bytes, 2 * ahead.bytes);
      F even = weight_of(raised, scores + j * 32), odd = weight_of(raised, scores + (j + 1) * 32);
      sums[0] += even;
      sums[1] += odd;
      if (QUANTIZED) even *= scales.values[j], odd *= scales.values[j + 1];
      rows[i] = pair_weights(order, even, odd);
    }
    transpose16(rows);
    HR_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(weights + step * kTileBytes + i * 64, rows[i]);
  }
  run.total = fma(run.total, raised.factor, sums[0] + sums[1]);
  return raised.factor;
}

// Multiplies 16 rows of sums by their factors.
HR_INLINE void scale_sums(F factor, float* sums, int64_t D) {
  if (_mm512_cmp_ps_mask((__m512)factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
  for (int64_t t = 0; t < D / 16; ++t)
    HR_UNROLL for (int i = 0; i < 16; ++i) {
      float* row = sums + t * 256 + i * 16;
      store(row, load(row) * splat(factor[i]));
    }
}

// sums += weights x values.
template <int NQ>
HR_INLINE void tile_mix(const TileMemory& m, int64_t D) {
  HR_TILE_LOAD(0, m.weights, 64);
  HR_TILE_LOAD(1, m.weights + kTileBytes, 64);
  if (NQ > 1) HR_TILE_LOAD(2, m.weights + 2 * kTileBytes, 64);
  if (NQ > 1) HR_TILE_LOAD(3, m.weights + 3 * kTileBytes, 64);
  for (int64_t t = 0; t < D / 16; ++t) {
    float *c0 = m.sums + t * 256, *c1 = c0 + D * 16;
    HR_TILE_LOAD(6, c0, 64);
    HR_TILE_LOAD(4, m.values + t * kTileBytes, 64);
    HR_TILE_DOT_BF16(6, 0, 4);
    if (NQ > 1) HR_TILE_LOAD(7, c1, 64);
    if (NQ > 1) HR_TILE_DOT_BF16(7, 2, 4);
    HR_TILE_LOAD(5, m.values + (D / 16 + t) * kTileBytes, 64);
    HR_TILE_DOT_BF16(6, 1, 5);
    if (NQ > 1) HR_TILE_DOT_BF16(7, 3, 5);
    HR_TILE_STORE(6, c0, 64);
    if (NQ > 1) HR_TILE_STORE(7, c1, 64);
  }
}

// The queries of a task as right operands: query(row) is where a row's vector lies, rows beyond are zeros.
template <class Query>
HR_INLINE void pack_queries(const TileTask& p, Query query, char* to) {
  for (int64_t q = 0; q < ceil_div(p.rows, kTile); ++q)
    for (int64_t d = 0; d < p.head_dim; d += 32) {
      __m512i r[16];
      HR_UNROLL for (int i = 0; i < 16; ++i)
        r[i] = q * kTile + i < p.rows ? _mm512_loadu_si512(query(q * kTile + i) + d) : _mm512_setzero_si512();
      transpose16(r);
      char* tile = to + q * p.head_dim * 32 + d * 32;
      HR_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + i * 64, r[i]);
    }
}

// The running state that 16 rows begin with, and what it says of their maximum.
HR_INLINE Running begin_rows(const float* max, const float* total) { return {load(max) * kLog2E, load(total)}; }

// The whole task. kv.rows(token, half, slot): the keys (0) or values (1) of 16 tokens, of a multiple of 16 on, in bf16, valid
// until the slot (0 .. 2) is used again; kv.where: where they lie; kv.scales: of a tile's tokens. Leaves sums (not divided by
// total) in m.sums; maximum and total per row in max and total, which hold what each row begins with.
template <int NQ, class KV>
HR_INLINE void tile_attend(const TileTask& p, const TileMemory& m, const KV& kv, float* max, float* total) {
  const int64_t D = p.head_dim;
  Running run[NQ];
  for (int q = 0; q < NQ; ++q) run[q] = begin_rows(max + q * 16, total + q * 16);
  for (int64_t i = 0; i < NQ * D * 16; i += kLanes) store(m.sums + i, F{});
  const NoDenormals here;
  full_tiles();
  for (int64_t first = p.low / kKeys * kKeys; first < p.high; first += kKeys) {
    // 16 tokens without a visible one are not read: their block may be anyone's. Their scores are masked.
    for (int64_t j = 0; j < kKeys; j += 32) {
      const int64_t a = first + j, b = a + 16;
      const bool has_a = a < p.high && a + 16 > p.low, has_b = b < p.high && b + 16 > p.low;
      if (!has_a && !has_b) {
        for (int64_t i = 0; i < 32 * 32; i += kLanes) store(m.scores + j * 32 + i, F{});
        continue;
      }
      const bf16 *ka = kv.rows(has_a ? a : b, 0, 0), *kb = has_a && has_b ? kv.rows(b, 0, 1) : ka;
      tile_scores<NQ>(ka, kb, m.queries, D, m.scores + j * 32);
    }
    for (int64_t j = 0; j < kKeys; j += 16) {
      const int64_t token = first + j;
      const bool any = token < p.high && token + 16 > p.low;
      const bf16* v = any ? kv.rows(token, 1, 2) : nullptr;
      for (int64_t i = 0; i < 16; i += 2) {
        const bool even = any && token + i >= p.low && token + i < p.high;
        const bool odd = any && token + i + 1 >= p.low && token + i + 1 < p.high;
        char* to = m.values + j / 32 * D * 64 + (j % 32 + i) / 2 * 64;
        pair_values(even ? v + i * D : nullptr, odd ? v + (i + 1) * D : nullptr, D, to);
      }
    }
    TileScales scales;
    if (KV::bytes == 1) kv.scales(first, p.low, p.high, scales);
    Ahead ahead;
    ahead.bytes = D * KV::bytes;
    for (int64_t j = 0; NQ == 1 && j < 4; ++j) {
      const int64_t token = smaller(first + kKeys + j * 16, p.high - 1);
      ahead.keys[j] = kv.where(token / 16 * 16, 0), ahead.values[j] = kv.where(token / 16 * 16, 1);
    }
    for (int q = 0; q < NQ; ++q) {
      const F factor = tile_soften<NQ == 1, KV::bytes == 1>(p, m.scores + q * 16, scales, ahead, first, p.position + q * 16,
                                                       run[q], m.weights + q * 2 * kTileBytes);
      scale_sums(factor, m.sums + q * D * 16, D);
    }
    tile_mix<NQ>(m, D);
  }
  tiles_release();
  for (int q = 0; q < NQ; ++q) {
    store(max + q * 16, run[q].base * 0.693147180559945309f);
    store(total + q * 16, run[q].total);
  }
}

}  // namespace
#endif
