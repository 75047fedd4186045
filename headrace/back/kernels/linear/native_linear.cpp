// y[M,N] = x[M,K] w[N,K]^T + bias[N] for few rows (M up to some dozens): the weights stream through once, in place.
//
// Each thread takes runs of weight rows. A block of NB weight rows meets all rows of x before the next block is read, so
// the weights come from memory once and the repeated reads of x from L1/L2. Large M belongs to a packed GEMM, not here.

#include "../native/dot_tile.h"

namespace {

// Bytes of weights one claim covers: long enough to hide the claim (some 5 us), short enough to balance.
constexpr int64_t kChunkBytes = 96 * 1024;

struct Linear {
  const void *x, *w, *bias;
  void* y;
  int64_t M, N, K, x_stride, w_stride, y_stride, rows_per_chunk;
};

template <class T, class Y, int MB, int NB>
HR_INLINE void tile(const Linear& p, int64_t m, int64_t n) {
  float out[MB][(NB + 3) / 4 * 4];
  dot_tile<T, MB, NB>(static_cast<const T*>(p.x) + m * p.x_stride, p.x_stride,
                      static_cast<const T*>(p.w) + n * p.w_stride, p.w_stride, p.K, out);
  const T* bias = static_cast<const T*>(p.bias);
  for (int i = 0; i < MB; ++i)
    for (int j = 0; j < NB; ++j)
      put(static_cast<Y*>(p.y) + (m + i) * p.y_stride + n + j, out[i][j] + (bias ? to_float(bias[n + j]) : 0.0f));
}

// NB weight rows against every row of x, in tiles of at most 4 rows: 5 rows go as 3 + 2, not 4 + 1.
template <class T, class Y, int NB>
HR_INLINE void all_rows(const Linear& p, int64_t n) {
  int64_t m = 0;
  for (int64_t tiles = ceil_div(p.M, 4); tiles > 0; --tiles) {
    const int64_t rows = ceil_div(p.M - m, tiles);
    if (rows == 4) tile<T, Y, 4, NB>(p, m, n);
    if (rows == 3) tile<T, Y, 3, NB>(p, m, n);
    if (rows == 2) tile<T, Y, 2, NB>(p, m, n);
    if (rows == 1) tile<T, Y, 1, NB>(p, m, n);
    m += rows;
  }
}

// Weight rows per tile: as many as leave 4 rows of accumulators in registers.
constexpr int kBlock = kRegisters == 32 ? 6 : 2;

template <class T, class Y>
void chunk(void* context, int64_t i) {
  const Linear& p = *static_cast<const Linear*>(context);
  int64_t n = i * p.rows_per_chunk;
  const int64_t end = smaller(n + p.rows_per_chunk, p.N);
  if (p.M == 1) {
    for (; n + 8 <= end; n += 8) tile<T, Y, 1, 8>(p, 0, n);
  } else {
    for (; n + kBlock <= end; n += kBlock) all_rows<T, Y, kBlock>(p, n);
  }
  for (; n < end; ++n) all_rows<T, Y, 1>(p, n);
}

template <class T, class Y>
void run(Linear& p) {
  const int64_t unit = p.M == 1 ? 8 : kBlock * 4;
  p.rows_per_chunk = ceil_div(larger<int64_t>(kChunkBytes / (p.K * int64_t(sizeof(T))), 1), unit) * unit;
  hr_parallel(chunk<T, Y>, &p, ceil_div(p.N, p.rows_per_chunk));
}

}  // namespace

// Strides count elements; rows are contiguous. bias: null or [N] in the weights' type. x has the weights' type; y that
// type or float32.
HR_PUBLIC int32_t HR_EXPORT(linear)(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N,
                                    int64_t K, int64_t x_stride, int64_t w_stride, int64_t y_stride, int32_t dtype,
                                    int32_t y_dtype) {
  if (M < 0 || N < 0 || K <= 0) return HR_BAD_SHAPE;
  Linear p{x, w, bias, y, M, N, K, x_stride, w_stride, y_stride, 0};
  if (dtype == HR_BF16 && y_dtype == HR_BF16) run<bf16, bf16>(p);
  else if (dtype == HR_BF16 && y_dtype == HR_F32) run<bf16, float>(p);
  else if (dtype == HR_F32 && y_dtype == HR_F32) run<float, float>(p);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
