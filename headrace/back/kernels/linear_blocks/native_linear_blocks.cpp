// y[M,N] = x[M,K] w[N,K]^T + bias[N] where w is block-quantized (block_panels.h) and x becomes int8 here, 32 inputs at a time.
//
// The loop is that of linear_quant: rows of x to int8 once, then each thread takes panels of 64 outputs, one stream of
// bytes. A weight may be put together from segments of several codings (query and key in one, value in another): all read
// the same int8 rows, in one call. Lanes are outputs, so a result is one fixed chain of operations whatever is beside it.

#include "../native/block_panels.h"

namespace {

constexpr int64_t kChunkBytes = 96 * 1024, kRowBlock = 192;
constexpr int kVectors = kPanel / kLanes < 4 ? kPanel / kLanes : 4;
constexpr int kRows = kRegisters == 32 ? 4 : 1;

struct Segment {
  const uint8_t* panels;
  int64_t outputs;
  int64_t coding;
};

struct Product {
  const int8_t* codes;   // [M, stride]
  const float* scales;   // [M, groups]
  const int32_t* sums;   // of codes: [M, groups, 2], for the halves of 16 inputs
  int64_t stride, groups;
  const Segment* segments;
  const int64_t* first_task;  // [segments + 1]
  int64_t num_segments;
  const void *bias, *source;
  void* y;
  int64_t M, K, source_stride, y_stride, panels_per_task, row_blocks, rows_per_chunk;
  int32_t dtype;
};

template <class Y>
HR_INLINE void put_typed(const Product& p, int64_t m, int64_t n, int64_t count, F v) {
  const Y* bias = static_cast<const Y*>(p.bias);
  Y* y = static_cast<Y*>(p.y) + m * p.y_stride + n;
  if (count >= kLanes) {
    if (bias != nullptr) v += load(bias + n);
    store(y, v);
  } else {
    if (bias != nullptr) v += load_part(bias + n, count);
    store_part(y, v, count);
  }
}

// The one place where the type of y matters: a branch here keeps one copy of the loops for all types.
void put_row(const Product& p, int64_t m, int64_t n, int64_t count, F v) {
  if (count <= 0) return;
  if (p.dtype == HR_BF16) put_typed<bf16>(p, m, n, count, v);
  else if (p.dtype == HR_F16) put_typed<fp16>(p, m, n, count, v);
  else put_typed<float>(p, m, n, count, v);
}

// The sum of the products of steps FROM .. TO of a group, on top of `dot`, which takes the codes' offset out.
template <class C, int FROM, int TO>
HR_INLINE I dot_steps(I dot, const I (&b)[8], const int8_t* x) {
  HR_UNROLL for (int s = FROM; s < TO; ++s)
    dot = C::wide ? dot8(dot, b[s], broadcast(x + 4 * s)) : dot4(dot, b[s], broadcast(x + 4 * s));
  return dot;
}

// MB rows against kVectors vectors of outputs, from `column` of the panel on. `left`: outputs from there to the end.
template <class C, int MB>
void tile(const Product& p, const uint8_t* panel, int64_t n, int64_t left, int64_t column, int64_t m) {
  constexpr int parts = 32 / C::sub;
  constexpr int32_t offset = C::wide ? kOffset8 : C::offset;
  F acc[MB][kVectors] = {};
  const uint8_t* super = panel;
  for (int64_t g = 0; g < p.groups;) {
    F d[kVectors], dmin[kVectors];
    HR_UNROLL for (int j = 0; j < kVectors; ++j) {
      d[j] = load(reinterpret_cast<const fp16*>(super) + column + j * kLanes);
      if (C::minimum) dmin[j] = load(reinterpret_cast<const fp16*>(super) + kPanel + column + j * kLanes);
    }
    const uint8_t* group = super + header_bytes<C>();
    for (int64_t last = g + C::block / 32; g < last; ++g, group += group_bytes<C>()) {
      if (MB == 1)
        for (int line = 0; line < int(group_bytes<C>() / 64); ++line)
          __builtin_prefetch(group + 2 * group_bytes<C>() + line * 64, 0, 3);
      HR_UNROLL for (int j = 0; j < kVectors; ++j) {
        const int64_t at = column + j * kLanes;
        I b[8];
        load_codes<C>(group + scale_bytes<C>(), at, b);
        F scale[parts], minimum[parts];
        HR_UNROLL for (int h = 0; h < parts; ++h) {
          scale[h] = d[j], minimum[h] = dmin[j];
          if (C::two_level) {
            scale[h] *= small_floats(group + h * kPanel + at);
            if (C::minimum) minimum[h] *= small_floats(group + (parts + h) * kPanel + at);
          }
        }
        HR_UNROLL for (int i = 0; i < MB; ++i) {
          const int8_t* x = p.codes + (m + i) * p.stride + g * 32;
          const int64_t fact = (m + i) * p.groups + g;
          const int32_t* sums = p.sums + fact * 2;
          HR_UNROLL for (int h = 0; h < parts; ++h) {
            const int32_t sum = parts == 1 ? sums[0] + sums[1] : sums[h];
            const I start = I{} - offset * sum;
            const I dot = parts == 1 ? dot_steps<C, 0, 8>(start, b, x)
                          : h == 0   ? dot_steps<C, 0, 4>(start, b, x)
                                     : dot_steps<C, 4, 8>(start, b, x);
            const float x_scale = p.scales[fact];
            acc[i][j] = fma(__builtin_convertvector(dot, F), scale[h] * x_scale, acc[i][j]);
            if (C::minimum) acc[i][j] = fma(minimum[h], -(x_scale * float(sum)), acc[i][j]);
          }
        }
      }
    }
    super += super_bytes<C>();
  }
  HR_UNROLL for (int j = 0; j < kVectors; ++j)
    HR_UNROLL for (int i = 0; i < MB; ++i)
      put_row(p, m + i, n + column + j * kLanes, left - column - j * kLanes, acc[i][j]);
}

// `from` .. `to` of the segment's panels against rows [row, stop). n: the panel's first output in y.
template <class C>
void panels_of(const Product& p, const Segment& segment, int64_t n, int64_t from, int64_t to, int64_t row, int64_t stop) {
  const int64_t bytes = p.K / C::block * super_bytes<C>();
  for (int64_t j = from; j < to; ++j) {
    const uint8_t* panel = segment.panels + j * bytes;
    const int64_t left = segment.outputs - j * kPanel;
    for (int64_t m = row; m < stop;) {
      const int64_t rows = ceil_div(stop - m, ceil_div(stop - m, int64_t(kRows)));
      for (int64_t column = 0; column < kPanel && column < left; column += kVectors * kLanes) {
        if (kRows >= 4 && rows == 4) tile<C, kRows >= 4 ? 4 : 1>(p, panel, n + j * kPanel, left, column, m);
        if (kRows >= 3 && rows == 3) tile<C, kRows >= 3 ? 3 : 1>(p, panel, n + j * kPanel, left, column, m);
        if (kRows >= 2 && rows == 2) tile<C, kRows >= 2 ? 2 : 1>(p, panel, n + j * kPanel, left, column, m);
        if (rows == 1) tile<C, 1>(p, panel, n + j * kPanel, left, column, m);
      }
      m += rows;
    }
  }
}

void product_task(void* context, int64_t task) {
  const Product& p = *static_cast<const Product*>(context);
  const int64_t piece = task / p.row_blocks, block = task % p.row_blocks;
  int64_t s = 0, n = 0;
  for (; piece >= p.first_task[s + 1]; ++s) n += p.segments[s].outputs;
  const Segment& segment = p.segments[s];
  const int64_t from = (piece - p.first_task[s]) * p.panels_per_task;
  const int64_t to = smaller(from + p.panels_per_task, ceil_div(segment.outputs, kPanel));
  const int64_t row = block * kRowBlock, stop = smaller(p.M, row + kRowBlock);
  with_coding(segment.coding, [&](auto coding) { panels_of<decltype(coding)>(p, segment, n, from, to, row, stop); });
}

// One chunk of rows of x to int8, in groups of 32.
template <class T>
void quantize_rows(void* context, int64_t i) {
  const Product& p = *static_cast<const Product*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.M);
  for (int64_t m = i * p.rows_per_chunk; m < end; ++m) {
    const T* x = static_cast<const T*>(p.source) + m * p.source_stride;
    for (int64_t g = 0; g < p.groups; ++g) {
      int8_t* codes = const_cast<int8_t*>(p.codes) + m * p.stride + g * 32;
      float* scale = const_cast<float*>(p.scales) + m * p.groups + g;
      int32_t* sums = const_cast<int32_t*>(p.sums) + (m * p.groups + g) * 2;
      int32_t all = 0, half = 0;
      quantize(x + g * 32, 32, 32, codes, scale, &all);
      for (int k = 0; k < 16; ++k) half += codes[k];
      sums[0] = half, sums[1] = all - half;
    }
  }
}

template <class T>
int32_t run(Product& p, int64_t* first_task) {
  // Rows a power of two apart would share the sets of the first-level cache: one line more.
  p.stride = ceil_div(p.K, int64_t(64)) * 64 + 64;
  p.groups = p.K / 32;
  const int64_t codes = p.M * p.stride, facts = ceil_div(p.M * p.groups, int64_t(16)) * 64;
  char* scratch = static_cast<char*>(hr_scratch(codes + 3 * facts));
  if (scratch == nullptr) return HR_NO_MEMORY;
  p.codes = reinterpret_cast<int8_t*>(scratch);
  p.scales = reinterpret_cast<float*>(scratch + codes);
  p.sums = reinterpret_cast<int32_t*>(scratch + codes + facts);
  p.rows_per_chunk = larger<int64_t>(1, 32 * 1024 / p.K);
  hr_parallel(quantize_rows<T>, &p, ceil_div(p.M, p.rows_per_chunk));
  p.row_blocks = ceil_div(p.M, kRowBlock);
  p.panels_per_task = p.M > kRows ? 1 : larger<int64_t>(1, kChunkBytes / (p.K * kPanel / 2));
  for (int64_t s = 0; s < p.num_segments; ++s)
    first_task[s + 1] = first_task[s] + ceil_div(ceil_div(p.segments[s].outputs, kPanel), p.panels_per_task);
  hr_parallel(product_task, &p, first_task[p.num_segments] * p.row_blocks);
  return HR_OK;
}

}  // namespace

// x, bias and y share a dtype, or y is float32 and there is no bias; strides count elements, rows are contiguous. Segments lie side by side along the outputs.
HR_PUBLIC int32_t HR_EXPORT(linear_blocks)(const void* x, const Segment* segments, const void* bias, void* y, int64_t M,
                                           int64_t K, int64_t x_stride, int64_t y_stride, int64_t num_segments,
                                           int32_t dtype, int32_t y_dtype) {
  constexpr int64_t most = 8;
  if (M < 0 || K <= 0 || num_segments < 1 || num_segments > most) return HR_BAD_SHAPE;
  for (int64_t s = 0; s < num_segments; ++s) {
    const int64_t block = block_of(segments[s].coding);
    if (block == 0) return HR_BAD_DTYPE;
    if (K % block || segments[s].outputs < 0) return HR_BAD_SHAPE;
  }
  if (y_dtype != dtype && (y_dtype != HR_F32 || bias != nullptr)) return HR_BAD_DTYPE;
  if (M == 0) return HR_OK;
  int64_t first_task[most + 1] = {};
  Product p{};
  p.segments = segments, p.num_segments = num_segments, p.first_task = first_task;
  p.bias = bias, p.source = x, p.y = y, p.M = M, p.K = K, p.source_stride = x_stride, p.y_stride = y_stride, p.dtype = y_dtype;
  if (dtype == HR_BF16) return run<bf16>(p, first_task);
  if (dtype == HR_F16) return run<fp16>(p, first_task);
  if (dtype == HR_F32) return run<float>(p, first_task);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(linear_blocks)
