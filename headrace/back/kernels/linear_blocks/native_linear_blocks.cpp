// y[M,N] = x[M,K] w[N,K]^T + bias[N] where w is block-quantized (block_panels.h) and x becomes int8 here, 32 inputs at a time,
// unless the norm before has left it so (linear_blocks_int8_rows).
//
// The loop is that of linear_quant: rows of x to int8 once, then each thread takes panels of 64 outputs, one stream of
// bytes. A weight may be put together from segments of several codings (query and key in one, value in another): all read
// the same int8 rows, in one call. Lanes are outputs, so a result is one fixed chain of operations whatever is beside it.

#include "../native/amx_blocks.h"
#include "../native/block_gemm.h"
#include "../native/panel_product.h"

namespace {

constexpr int64_t kChunkBytes = 96 * 1024, kRowBlock = 192;
constexpr int kVectors = kPanel / kLanes < 4 ? kPanel / kLanes : 4;
constexpr int kRows = kRegisters == 32 ? 4 : 1;
// Vectors of outputs beside each other for several rows: a product of 512 bits takes four cycles, so that eight chains of
// them keep the units busy while sums are scaled (Zen 4: 1.1 to 1.9 times as fast as four vectors, one after the other).
#if defined(__AVX512VNNI__)
constexpr int kWideVectors = 2;
#else
constexpr int kWideVectors = 0;
#endif
// From so many rows of x on matrix tiles are faster, where there are any.
#if defined(HR_AMX)
constexpr int64_t kTileRows = 6;
#else
constexpr int64_t kTileRowBlock = kRows;
#endif

// The sum of the products of steps FROM .. TO of a group, on top of `dot`, which takes out the offset of the quantized
// values.
template <class C, int FROM, int TO>
HR_INLINE I dot_steps(I dot, const I (&b)[8], const int8_t* x) {
  HR_UNROLL for (int s = FROM; s < TO; ++s)
    dot = C::wide ? dot8(dot, b[s], broadcast(x + 4 * s)) : dot4(dot, b[s], broadcast(x + 4 * s));
  return dot;
}

// The j-th share of the cache lines some groups ahead, a few at a time: what memory delivers while the rest is computed.
template <class C>
HR_INLINE void fetch_ahead(const uint8_t* group, int j) {
  constexpr int64_t bytes = C::x_group / 32 * group_bytes<C>() + (C::two_level ? 0 : header_bytes<C>());
  constexpr int64_t distance = 8192, share = (bytes + kVectors * 64 - 1) / (kVectors * 64) * 64;
  HR_UNROLL for (int64_t line = j * share; line < (j + 1) * share && line < bytes; line += 64)
    __builtin_prefetch(group + distance + line, 0, 2);
}

// MB rows against kVectors vectors of outputs, from `column` of the panel on. `fetch`: the panel comes from memory.
template <class C, int MB>
void tile(const Gemm& p, const uint8_t* panel, int64_t column, int64_t m, bool fetch, float* results) {
  constexpr int parts = C::sub < 32 ? 32 / C::sub : 1;
  constexpr int32_t offset = C::wide ? kOffset8 : C::offset;
  F acc[MB][kVectors] = {};
  const uint8_t* super = panel;
  for (int64_t g = 0; g < p.groups;) {
    F d[kVectors], dmin[kVectors];
    HR_UNROLL for (int j = 0; j < kVectors; ++j) {
      d[j] = load(reinterpret_cast<const typename C::Scale*>(super) + column + j * kLanes);
      if (C::minimum) dmin[j] = load(reinterpret_cast<const typename C::Scale*>(super) + kPanel + column + j * kLanes);
    }
    const uint8_t* group = super + header_bytes<C>();
    constexpr int64_t bytes = C::x_group / 32 * group_bytes<C>();
    for (int64_t last = g + C::block / C::x_group; g < last; ++g, group += bytes) {
      HR_UNROLL for (int j = 0; j < kVectors; ++j) {
        if (fetch) fetch_ahead<C>(group, j);
        const int64_t at = column + j * kLanes;
        F scale[parts], minimum[parts];
        HR_UNROLL for (int h = 0; h < parts; ++h) {
          scale[h] = part_scales<C>(d[j], super, group, h, at), minimum[h] = dmin[j];
          if (C::two_level && C::minimum) minimum[h] *= small_floats(group + (parts + h) * kPanel + at);
        }
        I dot[MB][parts];
        HR_UNROLL for (int i = 0; i < MB; ++i) {
          const int32_t* sums = p.sums + ((m + i) * p.groups + g) * 2;
          HR_UNROLL for (int h = 0; h < parts; ++h)
            dot[i][h] = I{} - offset * (parts == 1 ? sums[0] + sums[1] : sums[h]);
        }
        HR_UNROLL for (int q = 0; q < C::x_group / 32; ++q) {
          I b[8];
          load_quantized<C>(group + q * group_bytes<C>() + scale_bytes<C>(), at, b);
          HR_UNROLL for (int i = 0; i < MB; ++i) {
            const int8_t* x = p.quantized + (m + i) * p.stride + g * C::x_group + q * 32;
            if constexpr (parts == 1) dot[i][0] = dot_steps<C, 0, 8>(dot[i][0], b, x);
            else {
              dot[i][0] = dot_steps<C, 0, 4>(dot[i][0], b, x);
              dot[i][1] = dot_steps<C, 4, 8>(dot[i][1], b, x);
            }
          }
        }
        HR_UNROLL for (int i = 0; i < MB; ++i) {
          const int64_t fact = (m + i) * p.groups + g;
          const float x_scale = p.scales[fact];
          HR_UNROLL for (int h = 0; h < parts; ++h) {
            acc[i][j] = fma(__builtin_convertvector(dot[i][h], F), scale[h] * x_scale, acc[i][j]);
            if (C::minimum) {
              const int32_t* sums = p.sums + fact * 2;
              const float sum = float(parts == 1 ? sums[0] + sums[1] : sums[h]);
              acc[i][j] = fma(minimum[h], -(x_scale * sum), acc[i][j]);
            }
          }
        }
      }
    }
    super += super_bytes<C>();
  }
  HR_UNROLL for (int i = 0; i < MB; ++i)
    HR_UNROLL for (int j = 0; j < kVectors; ++j)
      __builtin_memcpy(results + i * kPanel + column + j * kLanes, &acc[i][j], sizeof(F));
}

// The same of MB rows against V vectors side by side: the same bits.
template <class C, int MB, int V>
void wide_tile(const Gemm& p, const uint8_t* panel, int64_t column, int64_t m, bool fetch, float* results) {
  constexpr int parts = C::sub < 32 ? 32 / C::sub : 1, steps = 8 / parts;
  constexpr int32_t offset = C::wide ? kOffset8 : C::offset;
  F acc[MB][V] = {};
  const uint8_t* super = panel;
  for (int64_t g = 0; g < p.groups;) {
    F d[V], dmin[V];
    HR_UNROLL for (int j = 0; j < V; ++j) {
      d[j] = load(reinterpret_cast<const typename C::Scale*>(super) + column + j * kLanes);
      if (C::minimum) dmin[j] = load(reinterpret_cast<const typename C::Scale*>(super) + kPanel + column + j * kLanes);
    }
    const uint8_t* group = super + header_bytes<C>();
    constexpr int64_t bytes = C::x_group / 32 * group_bytes<C>();
    for (int64_t last = g + C::block / C::x_group; g < last; ++g, group += bytes) {
      if (fetch && column == 0) HR_UNROLL for (int j = 0; j < kVectors; ++j) fetch_ahead<C>(group, j);
      HR_UNROLL for (int h = 0; h < parts; ++h) {
        I dot[MB][V];
        HR_UNROLL for (int i = 0; i < MB; ++i) {
          const int32_t* sums = p.sums + ((m + i) * p.groups + g) * 2;
          const I first = I{} - offset * (parts == 1 ? sums[0] + sums[1] : sums[h]);
          HR_UNROLL for (int j = 0; j < V; ++j) dot[i][j] = first;
        }
        HR_UNROLL for (int q = 0; q < C::x_group / 32; ++q) {
          I b[V][8];
          HR_UNROLL for (int j = 0; j < V; ++j)
            load_quantized<C>(group + q * group_bytes<C>() + scale_bytes<C>(), column + j * kLanes, b[j]);
          const int8_t* x = p.quantized + m * p.stride + g * C::x_group + q * 32;
          HR_UNROLL for (int s = h * steps; s < (h + 1) * steps; ++s)
            HR_UNROLL for (int i = 0; i < MB; ++i) {
              const I a = broadcast(x + i * p.stride + 4 * s);
              HR_UNROLL for (int j = 0; j < V; ++j)
                dot[i][j] = C::wide ? dot8(dot[i][j], b[j][s], a) : dot4(dot[i][j], b[j][s], a);
            }
        }
        F scale[V], minimum[V];
        HR_UNROLL for (int j = 0; j < V; ++j) {
          const int64_t at = column + j * kLanes;
          scale[j] = part_scales<C>(d[j], super, group, h, at), minimum[j] = dmin[j];
          if (C::two_level && C::minimum) minimum[j] *= small_floats(group + (parts + h) * kPanel + at);
        }
        HR_UNROLL for (int i = 0; i < MB; ++i) {
          const int64_t fact = (m + i) * p.groups + g;
          const float x_scale = p.scales[fact];
          const int32_t* sums = p.sums + fact * 2;
          const float low = -(x_scale * float(parts == 1 ? sums[0] + sums[1] : sums[h]));
          HR_UNROLL for (int j = 0; j < V; ++j) {
            acc[i][j] = fma(__builtin_convertvector(dot[i][j], F), scale[j] * x_scale, acc[i][j]);
            if (C::minimum) acc[i][j] = fma(minimum[j], splat(low), acc[i][j]);
          }
        }
      }
    }
    super += super_bytes<C>();
  }
  HR_UNROLL for (int i = 0; i < MB; ++i)
    HR_UNROLL for (int j = 0; j < V; ++j)
      __builtin_memcpy(results + i * kPanel + column + j * kLanes, &acc[i][j], sizeof(F));
}

// One panel against rows [m, m + rows), at most kRows.
template <class C>
HR_INLINE void rows_panel(const Gemm& p, const uint8_t* panel, int64_t left, int64_t m, int64_t rows, float* results) {
  if constexpr (kWideVectors > 0) {
    if (rows >= 3) {
      for (int64_t column = 0; column < kPanel && column < left; column += kWideVectors * kLanes) {
        if (rows == 4) wide_tile<C, 4, kWideVectors>(p, panel, column, m, m == 0, results);
        else wide_tile<C, 3, kWideVectors>(p, panel, column, m, m == 0, results);
      }
      return;
    }
  }
  for (int64_t column = 0; column < kPanel && column < left; column += kVectors * kLanes) {
    if (kRows >= 4 && rows == 4) tile<C, kRows >= 4 ? 4 : 1>(p, panel, column, m, m == 0, results);
    if (kRows >= 3 && rows == 3) tile<C, kRows >= 3 ? 3 : 1>(p, panel, column, m, m == 0, results);
    if (kRows >= 2 && rows == 2) tile<C, kRows >= 2 ? 2 : 1>(p, panel, column, m, m == 0, results);
    if (rows == 1) tile<C, 1>(p, panel, column, m, m == 0, results);
  }
}

// Memory of one task.
struct Workspace {
  alignas(64) float results[2][kTileRowBlock * kPanel];
#if defined(HR_AMX)
  TileBuffers tiles;
#endif
};

// Rows [m, m + rows), at most p.tile_rows, of one panel's results.
void panel_results(const Gemm& p, const Place& at, int64_t m, int64_t rows, [[maybe_unused]] Workspace& space,
                   float* results) {
  with_coding(at.segment->coding, [&](auto coding) {
    using C = decltype(coding);
    const uint8_t* panel = at.segment->panels + at.panel * panel_bytes<C>(p);
#if defined(HR_AMX)
    if (p.M >= kTileRows) return tile_panel<C>(p, panel, m, m + rows, space.tiles, results);
#endif
    rows_panel<C>(p, panel, at.segment->outputs - at.panel * kPanel, m, rows, results);
  });
}

// Panel `at` (and with an activation the one that it gates) against rows [row, stop).
void gemm_panel(const Gemm& p, const Place& at, int64_t row, int64_t stop, Workspace& space) {
  const int64_t n = at.n + at.panel * kPanel;
  for (int64_t m = row; m < stop;) {
    const int64_t rows = ceil_div(stop - m, ceil_div(stop - m, p.tile_rows));
    panel_results(p, at, m, rows, space, space.results[0]);
    if (p.activation < 0) {
      put_panel(p, m, rows, n, at.segment->outputs - at.panel * kPanel, space.results[0]);
    } else {
      panel_results(p, place_of(p, n + p.outputs / 2), m, rows, space, space.results[1]);
      put_gated(p, m, rows, n, space.results[0], space.results[1]);
    }
    m += rows;
  }
}

void gemm_task(void* context, int64_t task) {
  Gemm p = *static_cast<const Gemm*>(context);
  const int64_t chunk = task / p.row_blocks, row = task % p.row_blocks * p.row_block;
  Workspace* space = static_cast<Workspace*>(hr_scratch(sizeof(Workspace), 1));
  if (space == nullptr) __builtin_trap();
  int64_t s = 0, n = 0;
  for (; chunk >= p.first_task[s + 1]; ++s) n += p.segments[s].outputs;
  const int64_t from = (chunk - p.first_task[s]) * p.panels_per_task;
  const int64_t most = larger<int64_t>(smaller(p.segments[s].outputs, p.results - n), 0);
  const int64_t to = smaller(from + p.panels_per_task, ceil_div(most, kPanel));
  if (p.top != nullptr) {
    p.y = hr_scratch(p.M * p.y_stride * int64_t(sizeof(float)), 2), p.y_first = n + from * kPanel;
    if (p.y == nullptr) __builtin_trap();
  }
  for (int64_t j = from; j < to; ++j)
    gemm_panel(p, {p.segments + s, j, n}, row, smaller(p.M, row + p.row_block), *space);
#if defined(HR_AMX)
  if (p.M >= kTileRows) tiles_release();
#endif
  if (p.top != nullptr)
    top_take(*p.top, task, static_cast<const float*>(p.y), p.y_stride, p.y_first,
             smaller(to * kPanel, p.segments[s].outputs) - from * kPanel);
}

// One chunk of rows of x to int8, in groups of p.x_group; inputs beyond K are 0.
template <class T>
void quantize_rows(void* context, int64_t i) {
  const Gemm& p = *static_cast<const Gemm*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.M);
  for (int64_t m = i * p.rows_per_chunk; m < end; ++m) {
    const T* x = static_cast<const T*>(p.source) + m * p.source_stride;
    quantize_groups(x, p.K, p.x_group, const_cast<int8_t*>(p.quantized) + m * p.stride,
                    const_cast<float*>(p.scales) + m * p.groups, const_cast<int32_t*>(p.sums) + m * p.groups * 2);
  }
}

// The GEMM with the quantized rows at p.quantized.
int32_t multiply(Gemm& p) {
  int64_t first_task[kMostSegments + 1] = {};
  p.first_task = first_task;
  p.row_block = kRowBlock, p.tile_rows = kRows;
#if defined(HR_AMX)
  if (p.M >= kTileRows) p.row_block = p.tile_rows = kTileRowBlock;
#endif
  p.row_blocks = ceil_div(p.M, p.row_block);
  p.panels_per_task = p.M > kRows ? 1 : larger<int64_t>(1, kChunkBytes / (p.K * kPanel / 2));
  if (p.top != nullptr) p.panels_per_task = kTopOutputs / kPanel, p.y_stride = kTopOutputs;
  // With an activation a task does panels of the first half of the outputs, and those that they gate.
  for (int64_t s = 0, n = 0; s < p.num_segments; n += p.segments[s++].outputs) {
    const int64_t outputs = larger<int64_t>(smaller(p.segments[s].outputs, p.results - n), 0);
    first_task[s + 1] = first_task[s] + ceil_div(ceil_div(outputs, kPanel), p.panels_per_task);
  }
  if (p.top != nullptr && first_task[p.num_segments] != p.top->chunks) return HR_BAD_SHAPE;
  hr_parallel(gemm_task, &p, first_task[p.num_segments] * p.row_blocks);
  return HR_OK;
}

template <class T>
int32_t run(Gemm& p) {
  p.stride = quantized_stride(p.groups * p.x_group);
  const int64_t quantized = p.M * p.stride, facts = ceil_div(p.M * p.groups, int64_t(16)) * 64;
  char* scratch = static_cast<char*>(hr_scratch(quantized + 3 * facts));
  if (scratch == nullptr) return HR_NO_MEMORY;
  p.quantized = reinterpret_cast<int8_t*>(scratch);
  p.scales = reinterpret_cast<float*>(scratch + quantized);
  p.sums = reinterpret_cast<int32_t*>(scratch + quantized + facts);
  p.rows_per_chunk = larger<int64_t>(1, 32 * 1024 / p.K);
  hr_parallel(quantize_rows<T>, &p, ceil_div(p.M, p.rows_per_chunk));
  return multiply(p);
}

int32_t run_as(Gemm& p, int32_t dtype) {
  if (dtype == HR_BF16) return run<bf16>(p);
  if (dtype == HR_F16) return run<fp16>(p);
  if (dtype == HR_F32) return run<float>(p);
  return HR_BAD_DTYPE;
}

}  // namespace

// See panel_product.h.
void HR_EXPORT(block_panel)(const PanelRows& rows, int64_t K, int64_t coding, const uint8_t* panel, int64_t count, float* results) {
  Workspace* space = static_cast<Workspace*>(hr_scratch(sizeof(Workspace), 1));
  if (space == nullptr) __builtin_trap();
  Gemm p{};
  p.quantized = static_cast<const int8_t*>(rows.x), p.scales = rows.scales, p.sums = rows.sums, p.stride = rows.stride;
  p.x_group = x_group_of(coding), p.groups = rows.groups, p.K = K, p.M = count, p.tile_rows = kRows;
#if defined(HR_AMX)
  if (count >= kTileRows) p.tile_rows = kTileRowBlock;
#endif
  const Segment segment{panel, kPanel, coding};
  for (int64_t m = 0; m < count;) {
    const int64_t part = ceil_div(count - m, ceil_div(count - m, p.tile_rows));
    panel_results(p, {&segment, 0, 0}, m, part, *space, results + m * kPanel);
    m += part;
  }
#if defined(HR_AMX)
  if (count >= kTileRows) tiles_release();
#endif
}

// x, bias and y share a dtype, or y is float32 and there is no bias; strides count elements, rows are contiguous. Segments
// lie side by side along the outputs. activation: -1, or its number (activation.h): y has half as many outputs then, the
// first half of the weight's gates the second; panels are full and there is no bias.
HR_PUBLIC int32_t HR_EXPORT(linear_blocks)(const void* x, const Segment* segments, const void* bias, void* y, int64_t M,
                                           int64_t K, int64_t x_stride, int64_t y_stride, int64_t num_segments,
                                           int32_t activation, int32_t dtype, int32_t y_dtype) {
  Gemm p{};
  const int32_t status = take_weight(p, segments, num_segments, K, activation, bias);
  if (status != HR_OK || M < 0) return M < 0 ? int32_t(HR_BAD_SHAPE) : status;
  if (y_dtype != dtype && (y_dtype != HR_F32 || bias != nullptr)) return HR_BAD_DTYPE;
  if (M == 0) return HR_OK;
  p.source = x, p.y = y, p.M = M, p.source_stride = x_stride, p.y_stride = y_stride, p.dtype = y_dtype;
  return run_as(p, dtype);
}
HR_REPLAYABLE(linear_blocks)

// The same with rows that are int8 already: quantized [M, stride], zeros from K to whole groups; scales [M, groups] and
// sums of quantized values [M, groups, 2] (quantize_groups). bias has the type of y.
HR_PUBLIC int32_t HR_EXPORT(linear_blocks_int8_rows)(const int8_t* quantized, const float* scales, const int32_t* sums,
                                                     const Segment* segments, const void* bias, void* y, int64_t M, int64_t K,
                                                     int64_t quantized_stride, int64_t y_stride, int64_t num_segments,
                                                     int32_t activation, int32_t y_dtype) {
  Gemm p{};
  const int32_t status = take_weight(p, segments, num_segments, K, activation, bias);
  if (status != HR_OK) return status;
  if (M < 0 || quantized_stride < p.groups * p.x_group) return HR_BAD_SHAPE;
  if (y_dtype < HR_F32 || y_dtype > HR_F16) return HR_BAD_DTYPE;
  if (M == 0) return HR_OK;
  p.quantized = quantized, p.scales = scales, p.sums = sums, p.stride = quantized_stride;
  p.y = y, p.M = M, p.y_stride = y_stride, p.dtype = y_dtype;
  return multiply(p);
}
HR_REPLAYABLE(linear_blocks_int8_rows)

// The `count` best of the results that `linear_blocks` would give in float32: outputs and values [M, count], best first.
HR_PUBLIC int32_t HR_EXPORT(linear_blocks_top)(const void* x, const Segment* segments, int64_t* ids, float* values,
                                               int64_t M, int64_t K, int64_t x_stride, int64_t num_segments,
                                               int64_t count, int32_t dtype) {
  const int64_t bytes = dtype == HR_F32 ? 4 : 2;
  for (int64_t m = 0; m < M; m += kTopRows) {
    Gemm p{};
    int32_t status = take_weight(p, segments, num_segments, K, -1, nullptr);
    if (status != HR_OK) return status;
    if (count < 1 || count > p.outputs) return HR_BAD_SHAPE;
    Top top{count, smaller(M - m, kTopRows), 0, nullptr, nullptr};
    for (int64_t s = 0; s < num_segments; ++s) top.chunks += ceil_div(segments[s].outputs, kTopOutputs);
    if (!top_begin(top)) return HR_NO_MEMORY;
    p.source = static_cast<const char*>(x) + m * x_stride * bytes, p.source_stride = x_stride;
    p.M = top.rows, p.dtype = HR_F32, p.top = &top;
    if ((status = run_as(p, dtype)) != HR_OK) return status;
    top_merge(top, ids + m * count, values + m * count);
  }
  return HR_OK;
}
HR_REPLAYABLE(linear_blocks_top)
