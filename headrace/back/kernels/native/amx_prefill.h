// One task of attention in bf16 with matrix tiles for many query rows: a KV head and some hundred rows of one request.
//
// KV goes by in stretches of 512 tokens that stay in the second-level cache. Of a stretch the values are transposed once for
// all rows; then 32 rows at a time meet its tiles of 64 tokens, in three overlapping stages: while the tiles multiply keys
// and queries of one step, and values and weights of the step before the last, the vector ports turn the scores between them
// into weights. Both products are transposed (S^T = K Q^T, O^T = V^T P^T): a lane is a query row throughout, and weights
// need no transposition.
//
// A row's result has the bits that tile_attend gives it: the same sums in the same order.
#pragma once

#include "amx_attention.h"

#if defined(HR_AMX)

namespace {

constexpr int64_t kStretch = 512;                      // KV tokens
constexpr int64_t kStretchTiles = kStretch / kKeys;
constexpr int64_t kMaxPrefillRows = 512;                // of a task
constexpr int64_t kMaxSteps = kMaxPrefillRows / kQueryRows * kStretchTiles;

// Memory of one task of `blocks` x 32 query rows.
struct PrefillMemory {
  char* queries;  // [blocks][2][D / 32] tiles: pairs of dimensions by 16 rows
  float* sums;    // [blocks][D / 16][2][16 dimensions][16 rows]
  char* values;   // [8 KV tiles][D / 16][2 steps of 32 tokens] tiles: 16 dimensions by 32 tokens
  char* keys;     // [32][D / 32] tiles: 16 keys by 32 dimensions
  bf16* wide;     // [32][D], where the cache is quantized
  float* scores;  // [2 in turn][64 tokens][32 rows]
  char* weights;  // [2 in turn][2][2 steps] tiles: pairs of tokens by 16 rows
  Running* rows;  // [blocks][2]
};

HR_INLINE int64_t prefill_bytes(int64_t D, int64_t blocks, bool quantized) {
  return blocks * (D * 64 + D * 128 + int64_t(2 * sizeof(Running))) + 2 * kStretch * D * 2 +
         (quantized ? 32 * D * 2 : 0) + 2 * (kKeys * 128 + 4 * kTileBytes);
}

HR_INLINE PrefillMemory prefill_memory(char* at, int64_t D, int64_t blocks, bool quantized) {
  PrefillMemory m;
  m.queries = at, at += blocks * D * 64;
  m.sums = reinterpret_cast<float*>(at), at += blocks * D * 128;
  m.values = at, at += kStretch * D * 2;
  m.keys = at, at += kStretch * D * 2;
  m.wide = reinterpret_cast<bf16*>(at), at += quantized ? 32 * D * 2 : 0;
  m.scores = reinterpret_cast<float*>(at), at += 2 * kKeys * 128;
  m.weights = at, at += 8 * kTileBytes;
  m.rows = reinterpret_cast<Running*>(at);
  return m;
}

// Values of 32 tokens as left operands, 16 dimensions by 32 tokens each, every second tile of `to`. from(i): token i's
// vector, or null for zeros.
template <class From>
HR_INLINE void transpose_values(From from, int64_t D, char* to) {
  const bf16* token[32];
  alignas(64) static constexpr bf16 kZeros[512] = {};
  for (int i = 0; i < 32; ++i) {
    const bf16* at = from(i);
    token[i] = at ? at : kZeros;
  }
  const __m512i pairs = interleave(0);
  for (int64_t d = 0; d < D; d += 16, to += 2 * kTileBytes) {
    __m512i r[16];
    HR_UNROLL for (int i = 0; i < 16; ++i) {
      const __m512i even = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(token[2 * i] + d)));
      const __m512i odd = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(token[2 * i + 1] + d)));
      r[i] = _mm512_permutex2var_epi16(even, pairs, odd);
    }
    transpose16(r);
    HR_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, r[i]);
  }
}

// 16 tokens' keys as left operands. Blocks lie at strides that many share in a cache's sets; side by side they all stay.
HR_INLINE void copy_keys(const bf16* from, int64_t D, char* to) {
  for (int64_t d = 0; d < D; d += 32, to += kTileBytes)
    HR_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, _mm512_loadu_si512(from + i * D + d));
}

// The part of the KV that a task has before it.
struct Stretch512 {
  int64_t first;  // token
  TileScales scales[kStretchTiles];
};

template <class KV>
HR_INLINE void load_stretch(const TileTask& p, const KV& kv, const PrefillMemory& m, int64_t first, Stretch512& s) {
  const int64_t D = p.head_dim;
  s.first = first;
  // 16 tokens without a visible one are not read: their block may be anyone's. Their scores are masked, their values zeros.
  const int64_t begin = larger(first, p.low) / 16 * 16, end = smaller(first + kStretch, p.high);
  const int64_t from_tile = begin / kKeys * kKeys, to_tile = ceil_div(end, kKeys) * kKeys;
  for (int64_t token = from_tile; token < to_tile; token += 16) {
    char* to = m.keys + (token - first) * D * 2;
    if (token >= begin && token < end) copy_keys(kv.rows_at(token, 0, m.wide), D, to);
    else __builtin_memset(to, 0, size_t(16 * D * 2));
  }
  for (int64_t j = from_tile; j < to_tile; j += 32) {
    const bf16* half[2] = {};
    for (int h = 0; h < 2; ++h) {
      const int64_t token = j + h * 16;
      if (token >= begin && token < end) half[h] = kv.rows_at(token, 1, m.wide + h * 16 * D);
    }
    const auto from = [&](int i) {
      const int64_t token = j + i;
      return half[i / 16] && token >= p.low && token < p.high ? half[i / 16] + i % 16 * D : nullptr;
    };
    const int64_t at = j - first;
    transpose_values(from, D, m.values + at / kKeys * D * 128 + at % kKeys / 32 * kTileBytes);
  }
  if (KV::bytes == 1)
    for (int64_t t = 0; t < kStretchTiles; ++t)
      if (first + t * kKeys < end && first + (t + 1) * kKeys > begin)
        kv.scales(first + t * kKeys, p.low, p.high, s.scales[t]);
}

// 32 query rows against a KV tile.
struct Step {
  int32_t block, tile;
};

// The tile instructions of a stage, handed out evenly between the vector instructions around them: first scores (keys x
// queries, of `next`), then sums (values x weights, of `last`).
struct TileWork {
  const PrefillMemory& m;
  int64_t D;
  const char *keys, *queries, *values, *weights;
  float *scores, *sums;
  int64_t num_scores, num_sums, done;

  HR_INLINE void score(const TileWork& w, int64_t i) {
    const int64_t dims = w.D / 32, pair = i >= dims, d = pair ? i - dims : i;
    const char* k = w.keys + pair * w.D * 64 + d * kTileBytes;
    const char* q = w.queries + d * kTileBytes;
    if (d == 0) {
      HR_TILE_ZERO(0);
      HR_TILE_ZERO(1);
      HR_TILE_ZERO(2);
      HR_TILE_ZERO(3);
    }
    HR_TILE_LOAD(4, k, 64);
    HR_TILE_LOAD(6, q, 64);
    HR_TILE_DOT_BF16(0, 4, 6);
    HR_TILE_LOAD(7, q + w.D * 32, 64);
    HR_TILE_DOT_BF16(1, 4, 7);
    HR_TILE_LOAD(5, k + w.D * 32, 64);
    HR_TILE_DOT_BF16(2, 5, 6);
    HR_TILE_DOT_BF16(3, 5, 7);
    if (d + 1 < dims) return;
    float* to = w.scores + pair * 32 * 32;
    HR_TILE_STORE(0, to, 128);
    HR_TILE_STORE(1, to + 16, 128);
    HR_TILE_STORE(2, to + 16 * 32, 128);
    HR_TILE_STORE(3, to + 16 * 32 + 16, 128);
  }
  HR_INLINE void sum(const TileWork& w, int64_t i) {
    if (i == 0) {
      HR_TILE_LOAD(0, w.weights, 64);
      HR_TILE_LOAD(1, w.weights + kTileBytes, 64);
      HR_TILE_LOAD(2, w.weights + 2 * kTileBytes, 64);
      HR_TILE_LOAD(3, w.weights + 3 * kTileBytes, 64);
    }
    float* c = w.sums + i * 512;
    const char* v = w.values + i * 2 * kTileBytes;
    HR_TILE_LOAD(6, c, 64);
    HR_TILE_LOAD(4, v, 64);
    HR_TILE_DOT_BF16(6, 4, 0);
    HR_TILE_LOAD(7, c + 256, 64);
    HR_TILE_DOT_BF16(7, 4, 2);
    HR_TILE_LOAD(5, v + kTileBytes, 64);
    HR_TILE_DOT_BF16(6, 5, 1);
    HR_TILE_DOT_BF16(7, 5, 3);
    HR_TILE_STORE(6, c, 64);
    HR_TILE_STORE(7, c + 256, 64);
  }
  // Up to share i of n.
  HR_INLINE void advance(TileWork& w, int64_t i, int64_t n) {
    const int64_t until = (w.num_scores + w.num_sums) * i / n;
    for (; w.done < until; ++w.done) {
      if (w.done < w.num_scores) score(w, w.done);
      else sum(w, w.done - w.num_scores);
    }
  }
};

constexpr int64_t kShares = 16;

// The scores of 32 rows and a KV tile become weights, with tile instructions in between; `factors` gets what the rows' sums
// must be multiplied by before these weights' values are added. Returns whether any of them is not 1.
template <bool QUANTIZED>
HR_INLINE bool soften_rows(const TileTask& p, float* scores, const TileScales& scales, int64_t first, const int32_t* position,
                           Running* rows, char* weights, F* factors, TileWork& work) {
  bool changed = false;
  const __m512i order = interleave_halves();
  for (int q = 0; q < 2; ++q) {
    float* s = scores + q * 16;
    const F best = mask_scores<QUANTIZED>(p, s, scales, first, position + q * 16);
    const Raised raised = raise<QUANTIZED>(p, best, rows[q]);
    changed |= raised.changed;
    factors[q] = raised.factor;
    F sums[2] = {};
    for (int64_t c = 0; c < kShares / 2; ++c) {
      HR_UNROLL for (int i = 0; i < 4; ++i) {
        const int64_t pair = c * 4 + i, j = pair * 2;
        F even = weight_of(raised, s + j * 32), odd = weight_of(raised, s + (j + 1) * 32);
        sums[0] += even;
        sums[1] += odd;
        if (QUANTIZED) even *= scales.values[j], odd *= scales.values[j + 1];
        _mm512_store_si512(weights + q * 2 * kTileBytes + pair * 64, pair_weights(order, even, odd));
      }
      TileWork::advance(work, q * kShares / 2 + c + 1, kShares);
    }
    rows[q].total = fma(rows[q].total, raised.factor, sums[0] + sums[1]);
  }
  return changed;
}

HR_INLINE void scale_lanes(const F* factors, float* sums, int64_t D) {
  for (int64_t t = 0; t < D / 16; ++t)
    for (int q = 0; q < 2; ++q)
      HR_UNROLL for (int i = 0; i < 16; ++i) {
        float* row = sums + t * 512 + q * 256 + i * 16;
        store(row, load(row) * factors[q]);
      }
}

// Steps of all rows over one stretch.
template <bool QUANTIZED>
HR_INLINE void run_steps(const TileTask& p, const PrefillMemory& m, const Stretch512& s, const Step* steps, int64_t count) {
  const int64_t D = p.head_dim;
  F factors[2][2];
  bool changed[2] = {};
  for (int64_t i = 0; i < count + 2; ++i) {
    const bool scored = i < count, softened = i > 0 && i <= count, summed = i > 1;
    TileWork work{m, D, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 0, 0};
    if (scored) {
      work.keys = m.keys + steps[i].tile * D * 128;
      work.queries = m.queries + steps[i].block * D * 64;
      work.scores = m.scores + i % 2 * kKeys * 32;
      work.num_scores = D / 16;
    }
    if (summed) {
      const Step& last = steps[i - 2];
      work.values = m.values + last.tile * D * 128;
      work.weights = m.weights + i % 2 * 4 * kTileBytes;
      work.sums = m.sums + last.block * D * 32;
      work.num_sums = D / 16;
      if (changed[i % 2]) scale_lanes(factors[i % 2], work.sums, D);
    }
    if (softened) {
      const Step& now = steps[i - 1];
      const int64_t slot = (i - 1) % 2;
      changed[slot] = soften_rows<QUANTIZED>(p, m.scores + slot * kKeys * 32, s.scales[now.tile], s.first + now.tile * kKeys,
                                         p.position + now.block * kQueryRows, m.rows + now.block * 2,
                                         m.weights + slot * 4 * kTileBytes, factors[slot], work);
    }
    TileWork::advance(work, 1, 1);
  }
}

// The steps of a stretch that any of a block's rows sees something of.
HR_INLINE int64_t list_steps(const TileTask& p, int64_t blocks, int64_t first, Step* steps) {
  int64_t count = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t lowest = first_seen(p.window, p.position[b * kQueryRows]), highest = p.position[b * kQueryRows + kQueryRows - 1];
    for (int64_t t = 0; t < kStretchTiles; ++t) {
      const int64_t token = first + t * kKeys;
      if (token <= highest && token + kKeys > lowest && token + kKeys > p.low && token < p.high)
        steps[count++] = {int32_t(b), int32_t(t)};
    }
  }
  return count;
}

// The whole task; kv.rows_at(token, half, wide): 16 tokens' keys or values, in place or dequantized. Leaves sums (not divided by
// total) and rows in m.
template <class KV>
HR_INLINE void prefill_attend(const TileTask& p, const PrefillMemory& m, const KV& kv) {
  const int64_t blocks = ceil_div(p.rows, kQueryRows);
  Stretch512 stretch;
  Step steps[kMaxSteps];
  const NoDenormals here;
  full_tiles();
  for (int64_t first = p.low / kStretch * kStretch; first < p.high; first += kStretch) {
    load_stretch(p, kv, m, first, stretch);
    run_steps<KV::bytes == 1>(p, m, stretch, steps, list_steps(p, blocks, first, steps));
  }
  tiles_release();
}

}  // namespace
#endif
