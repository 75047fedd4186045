// y[M,N] = x[M,K] w[N,K]^T + bias[N], the weights read in place.
//
// Where there are matrix tiles, bf16 goes to them (amx_linear.h). Else each thread takes runs of weight rows: a block of
// weight rows meets up to kPanelRows rows of x before the next block is read, so the weights come from memory once per
// panel and the repeated reads of x from L1/L2; the next block is fetched ahead meanwhile.
//
// linear_gated: the first half of the weight rows gates the second, in float32, before anything is written. linear_top:
// only the best results of each row are written (top.h).

#include "../native/activation.h"
#include "../native/amx_linear.h"
#include "../native/dot_tile.h"
#include "../native/top.h"

namespace {

// Bytes of weights one claim covers: long enough to hide the claim (some 5 us), short enough to balance.
constexpr int64_t kChunkBytes = 96 * 1024;
constexpr int64_t kPanelRows = 64;  // of x that meet a block of weights before the next: they stay in L2
constexpr int kBlockOfOne = kRegisters == 32 ? 8 : 4;  // weight rows per tile when M is 1

struct Linear {
  const char* panels;
  const void *w, *bias;
  void* y;
  int64_t M, N, K, w_stride, y_stride, rows_per_chunk;
  int64_t gated;       // 0, or so many outputs: those of y, and weight row n + gated belongs to n
  int32_t activation;  // then
  const Top* top;      // null, or where the best results are kept, and y is memory of a chunk
  int64_t y_first;     // the output that y begins with
};

// Rows of the next tile when `left` rows remain: at most 4, and 5 rows go as 3 + 2, not 4 + 1.
HR_INLINE int64_t tile_rows(int64_t left) { return ceil_div(left, ceil_div(left, kTileRows)); }

template <class T, class Y, bool GATED, int MB, int NB, int PF>
HR_INLINE void tile(const Linear& p, int64_t m, int64_t n, int64_t number) {
  const T* w = static_cast<const T*>(p.w) + n * p.w_stride;
  const T* bias = static_cast<const T*>(p.bias);
  float out[MB][(NB + 3) / 4 * 4], ups[GATED ? MB : 1][(NB + 3) / 4 * 4];
  // This tile's share of the next block's cache lines, as if rows followed each other without gaps: the tiles of a block are
  // numbered, as m / kTileRows would give 3 + 2 rows one share twice and leave the other.
  const int64_t ahead = NB * p.w_stride * int64_t(sizeof(T)) + number * PF * p.K * int64_t(sizeof(T));
  dot_tile<T, MB, NB, PF>(p.panels + panel_bytes<T>(m, p.K), w, p.w_stride, p.K,
                          reinterpret_cast<const char*>(w) + ahead, out);
  if constexpr (GATED) {
    const T* up = w + p.gated * p.w_stride;
    dot_tile<T, MB, NB, PF>(p.panels + panel_bytes<T>(m, p.K), up, p.w_stride, p.K,
                            reinterpret_cast<const char*>(up) + ahead, ups);
  }
  for (int i = 0; i < MB; ++i) {
    Y* y = static_cast<Y*>(p.y) + (m + i) * p.y_stride + (n - p.y_first);
    for (int j = 0; j < NB; j += kLanes) {
      const int count = smaller(NB - j, kLanes);
      F v = load_part(&out[i][j], count);
      if (bias != nullptr) v += load_part(bias + n + j, count);
      if constexpr (GATED) v = gate(p.activation, v, load_part(&ups[i][j], count));
      store_part(y + j, v, count);
    }
  }
}

// NB weight rows against every row of x.
template <class T, class Y, bool GATED, int NB, int PF>
HR_INLINE void all_rows(const Linear& p, int64_t n) {
  for (int64_t m = 0, number = 0; m < p.M; ++number) {
    const int64_t rows = tile_rows(p.M - m);
    if (rows == 4) tile<T, Y, GATED, 4, NB, PF>(p, m, n, number);
    if (rows == 3) tile<T, Y, GATED, 3, NB, PF>(p, m, n, number);
    if (rows == 2) tile<T, Y, GATED, 2, NB, PF>(p, m, n, number);
    if (rows == 1) tile<T, Y, GATED, 1, NB, PF>(p, m, n, number);
    m += rows;
  }
}

// Outputs n .. end. A function of its own: what its caller holds would take registers from the loops.
template <class T, class Y, bool GATED>
__attribute__((noinline)) void outputs(const Linear& p, int64_t n, int64_t end) {
  constexpr int NB = kTileColumns;
  const int64_t tiles = ceil_div(p.M, kTileRows);
  if (p.M == 1)
    for (; n + kBlockOfOne <= end; n += kBlockOfOne) tile<T, Y, GATED, 1, kBlockOfOne, kBlockOfOne>(p, 0, n, 0);
  else if (tiles == 1)
    for (; n + NB <= end; n += NB) all_rows<T, Y, GATED, NB, NB>(p, n);
  else if (tiles == 2)
    for (; n + NB <= end; n += NB) all_rows<T, Y, GATED, NB, (NB + 1) / 2>(p, n);
  else
    for (; n + NB <= end; n += NB) all_rows<T, Y, GATED, NB, (NB + 2) / 3>(p, n);
  for (; n < end; ++n) all_rows<T, Y, GATED, 1, 0>(p, n);
}

template <class T, class Y, bool GATED>
void chunk(void* context, int64_t i) {
  Linear p = *static_cast<const Linear*>(context);
  const int64_t first = i * p.rows_per_chunk, end = smaller(first + p.rows_per_chunk, GATED ? p.gated : p.N);
  if (p.top != nullptr) {
    p.y = hr_scratch(p.M * p.y_stride * int64_t(sizeof(float)), 2), p.y_first = first;
    if (p.y == nullptr) __builtin_trap();
  }
  outputs<T, Y, GATED>(p, first, end);
  if (p.top != nullptr) top_take(*p.top, i, static_cast<const float*>(p.y), p.y_stride, first, end - first);
}

template <class T, class Y, bool GATED>
int32_t run_panel(Linear p, const void* x, int64_t x_stride) {
  char* panels = static_cast<char*>(hr_scratch(panel_bytes<T>(p.M, p.K)));
  if (panels == nullptr) return HR_NO_MEMORY;
  for (int64_t m = 0; m < p.M;) {
    const int64_t rows = tile_rows(p.M - m);
    for (int64_t i = 0; i < rows; ++i)
      fill_panel_row(static_cast<const T*>(x) + (m + i) * x_stride, p.K, i, rows, panels + panel_bytes<T>(m, p.K));
    m += rows;
  }
  p.panels = panels;
  const int64_t unit = p.M == 1 ? kBlockOfOne : kTileColumns * 4;
  const int64_t results = GATED ? p.gated : p.N, each = p.K * int64_t(sizeof(T)) * (GATED ? 2 : 1);
  if (p.top != nullptr) p.rows_per_chunk = p.y_stride = kTopOutputs;
  else p.rows_per_chunk = ceil_div(larger<int64_t>(kChunkBytes / each, 1), unit) * unit;
  hr_parallel(chunk<T, Y, GATED>, &p, ceil_div(results, p.rows_per_chunk));
  return HR_OK;
}

template <class T, class Y, bool GATED = false>
int32_t run(const Linear& p, const void* x, int64_t x_stride) {
  int32_t status = HR_OK;
  for (int64_t m = 0; m < p.M && status == HR_OK; m += kPanelRows) {
    Linear panel = p;
    panel.M = smaller(p.M - m, kPanelRows), panel.y = static_cast<Y*>(p.y) + m * p.y_stride;
    status = run_panel<T, Y, GATED>(panel, static_cast<const T*>(x) + m * x_stride, x_stride);
  }
  return status;
}

// The best results of at most kTopRows rows, in float32.
int32_t run_top(Linear p, const void* x, int64_t x_stride, int32_t dtype) {
#if defined(HR_AMX)
  if (dtype == HR_BF16)
    return tile_linear<float>({static_cast<const bf16*>(p.w), static_cast<const bf16*>(x), nullptr, nullptr, p.M, p.N, p.K,
                               p.w_stride, x_stride, 0, 0, nullptr, 0, 0, 0, p.top, 0});
#endif
  if (dtype == HR_BF16) return run<bf16, float>(p, x, x_stride);
  if (dtype == HR_F16) return run<fp16, float>(p, x, x_stride);
  if (dtype == HR_F32) return run<float, float>(p, x, x_stride);
  return HR_BAD_DTYPE;
}

}  // namespace

// Strides count elements; rows are contiguous. bias: null or [N] in the weights' type. x has the weights' type; y that
// type or float32.
HR_PUBLIC int32_t HR_EXPORT(linear)(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N,
                                    int64_t K, int64_t x_stride, int64_t w_stride, int64_t y_stride, int32_t dtype,
                                    int32_t y_dtype) {
  if (M < 0 || N < 0 || K <= 0) return HR_BAD_SHAPE;
  if (M == 0 || N == 0) return HR_OK;
#if defined(HR_AMX)
  if (dtype == HR_BF16) {
    const TileLinear tiles{static_cast<const bf16*>(w), static_cast<const bf16*>(x), bias, y, M, N, K, w_stride, x_stride,
                           y_stride, 0, nullptr, 0, 0, 0, nullptr, 0};
    return y_dtype == HR_BF16 ? tile_linear<bf16>(tiles) : y_dtype == HR_F32 ? tile_linear<float>(tiles) : HR_BAD_DTYPE;
  }
#endif
  Linear p{nullptr, w, bias, y, M, N, K, w_stride, y_stride, 0, 0, 0, nullptr, 0};
  if (dtype == HR_BF16 && y_dtype == HR_BF16) return run<bf16, bf16>(p, x, x_stride);
  if (dtype == HR_BF16 && y_dtype == HR_F32) return run<bf16, float>(p, x, x_stride);
  if (dtype == HR_F16 && y_dtype == HR_F16) return run<fp16, fp16>(p, x, x_stride);
  if (dtype == HR_F16 && y_dtype == HR_F32) return run<fp16, float>(p, x, x_stride);
  if (dtype == HR_F32 && y_dtype == HR_F32) return run<float, float>(p, x, x_stride);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(linear)

// y [M, N / 2]: act(x w[n]) * (x w[n + N / 2]) for n below N / 2, a multiple of 16. The rest as for `linear`.
HR_PUBLIC int32_t HR_EXPORT(linear_gated)(const void* x, const void* w, void* y, int64_t M, int64_t N, int64_t K,
                                          int64_t x_stride, int64_t w_stride, int64_t y_stride, int32_t activation,
                                          int32_t dtype) {
  if (M < 0 || N < 0 || N % 32 || K <= 0 || activation < 0 || activation > RELU2) return HR_BAD_SHAPE;
  if (M == 0 || N == 0) return HR_OK;
#if defined(HR_AMX)
  if (dtype == HR_BF16)
    return tile_linear<bf16>({static_cast<const bf16*>(w), static_cast<const bf16*>(x), nullptr, y, M, N, K, w_stride,
                              x_stride, y_stride, 0, nullptr, 0, N / 2, activation, nullptr, 0});
#endif
  Linear p{nullptr, w, nullptr, y, M, N, K, w_stride, y_stride, 0, N / 2, activation, nullptr, 0};
  if (dtype == HR_BF16) return run<bf16, bf16, true>(p, x, x_stride);
  if (dtype == HR_F16) return run<fp16, fp16, true>(p, x, x_stride);
  if (dtype == HR_F32) return run<float, float, true>(p, x, x_stride);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(linear_gated)

// The `count` best of the results that `linear` would give in float32: outputs and values [M, count], best first (top.h).
HR_PUBLIC int32_t HR_EXPORT(linear_top)(const void* x, const void* w, int64_t* ids, float* values, int64_t M, int64_t N,
                                        int64_t K, int64_t x_stride, int64_t w_stride, int64_t count, int32_t dtype) {
  if (M < 0 || K <= 0 || count < 1 || count > N) return HR_BAD_SHAPE;
  const int64_t bytes = dtype == HR_F32 ? 4 : 2;
  for (int64_t m = 0; m < M; m += kTopRows) {
    Top top{count, smaller(M - m, kTopRows), ceil_div(N, kTopOutputs), nullptr, nullptr};
    if (!top_begin(top)) return HR_NO_MEMORY;
    const Linear p{nullptr, w, nullptr, nullptr, top.rows, N, K, w_stride, 0, 0, 0, 0, &top, 0};
    const int32_t status = run_top(p, static_cast<const char*>(x) + m * x_stride * bytes, x_stride, dtype);
    if (status != HR_OK) return status;
    top_merge(top, ids + m * count, values + m * count);
  }
  return HR_OK;
}
HR_REPLAYABLE(linear_top)
