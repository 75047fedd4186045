// What the ways to multiply by block-quantized weights share: the call as data, and how results leave it.
#pragma once

#include "activation.h"
#include "block_panels.h"
#include "top.h"

namespace {

constexpr int64_t kMostSegments = 8;

struct Segment {
  const uint8_t* panels;
  int64_t outputs;
  int64_t coding;
};

struct Gemm {
  const int8_t* quantized;   // [M, stride]
  const float* scales;   // [M, groups]
  const int32_t* sums;   // of quantized values: [M, groups, 2], for the halves of 16 inputs; of larger groups the first has all
  int64_t stride, groups, x_group;
  const Segment* segments;
  const int64_t* first_task;  // [segments + 1]
  int64_t num_segments;
  const void *bias, *source;
  void* y;
  int64_t M, K, source_stride, y_stride, panels_per_task, row_block, row_blocks, tile_rows, rows_per_chunk;
  int64_t outputs, results;  // of the weight, and of y
  const Top* top;             // null, or where the best results are kept, and y is memory of a task
  int64_t y_first;            // the output that y begins with
  int32_t dtype, activation;  // activation: -1, or the first half of the outputs gates the second
};

template <class C>
HR_INLINE int64_t panel_bytes(const Gemm& p) { return ceil_div(p.K, int64_t(C::block)) * super_bytes<C>(); }

template <class Y>
HR_INLINE void put_typed(const Gemm& p, int64_t m, int64_t n, int64_t count, F v) {
  const Y* bias = static_cast<const Y*>(p.bias);
  Y* y = static_cast<Y*>(p.y) + m * p.y_stride + (n - p.y_first);
  if (count >= kLanes) {
    if (bias != nullptr) v += load(bias + n);
    store(y, v);
  } else {
    if (bias != nullptr) v += load_part(bias + n, count);
    store_part(y, v, count);
  }
}

HR_INLINE void put(const Gemm& p, int64_t m, int64_t n, int64_t count, F v) {
  if (p.dtype == HR_BF16) put_typed<bf16>(p, m, n, count, v);
  else if (p.dtype == HR_F16) put_typed<fp16>(p, m, n, count, v);
  else put_typed<float>(p, m, n, count, v);
}

// Rows [m, m + rows) of a panel's results (64 floats each) to outputs n .., of which `left` exist. The one place where the
// type of y matters: one copy of the loops serves all types.
void put_panel(const Gemm& p, int64_t m, int64_t rows, int64_t n, int64_t left, const float* results) {
  for (int64_t i = 0; i < rows; ++i, results += kPanel)
    for (int64_t column = 0; column < smaller(left, kPanel); column += kLanes)
      put(p, m + i, n + column, left - column, load_raw<F>(results + column));
}

// The same of act(gates) * ups.
void put_gated(const Gemm& p, int64_t m, int64_t rows, int64_t n, const float* gates, const float* ups) {
  for (int64_t i = 0; i < rows; ++i, gates += kPanel, ups += kPanel)
    for (int64_t column = 0; column < kPanel; column += kLanes)
      put(p, m + i, n + column, kLanes, gate(p.activation, load_raw<F>(gates + column), load_raw<F>(ups + column)));
}

// A panel of a weight: its segment, its number there, and the output of y that the segment begins at.
struct Place {
  const Segment* segment;
  int64_t panel, n;
};

HR_INLINE Place place_of(const Gemm& p, int64_t output) {
  int64_t s = 0, n = 0;
  for (; output >= n + p.segments[s].outputs; ++s) n += p.segments[s].outputs;
  return {p.segments + s, (output - n) / kPanel, n};
}

// Panels of results, over all segments; with an activation those that others gate.
HR_INLINE int64_t result_panels(const Gemm& p, int64_t s, int64_t n) {
  return ceil_div(larger<int64_t>(smaller(p.segments[s].outputs, p.results - n), 0), kPanel);
}
HR_INLINE int64_t num_panels(const Gemm& p) {
  int64_t count = 0;
  for (int64_t s = 0, n = 0; s < p.num_segments; n += p.segments[s++].outputs) count += result_panels(p, s, n);
  return count;
}
HR_INLINE Place panel_at(const Gemm& p, int64_t panel) {
  int64_t s = 0, n = 0;
  for (int64_t count; panel >= (count = result_panels(p, s, n)); n += p.segments[s++].outputs) panel -= count;
  return {p.segments + s, panel, n};
}

// The call's weight into p, or why it cannot be.
int32_t take_weight(Gemm& p, const Segment* segments, int64_t num_segments, int64_t K, int32_t activation,
                    const void* bias) {
  if (K <= 0 || num_segments < 1 || num_segments > kMostSegments) return HR_BAD_SHAPE;
  int64_t outputs = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    const int64_t block = block_of(segments[s].coding);
    if (block == 0) return HR_BAD_DTYPE;
    // Segments share the activations, and a block of several groups has no padding.
    if (segments[s].outputs < 0 || x_group_of(segments[s].coding) != x_group_of(segments[0].coding)) return HR_BAD_SHAPE;
    if (block > x_group_of(segments[s].coding) && K % block) return HR_BAD_SHAPE;
    if (activation >= 0 && segments[s].outputs % kPanel) return HR_BAD_SHAPE;
    outputs += segments[s].outputs;
  }
  if (activation > RELU2 || (activation >= 0 && (outputs / 2 % kPanel || bias != nullptr))) return HR_BAD_SHAPE;
  p.x_group = x_group_of(segments[0].coding), p.K = K, p.groups = ceil_div(K, p.x_group);
  p.activation = activation, p.outputs = outputs, p.results = activation < 0 ? outputs : outputs / 2;
  p.segments = segments, p.num_segments = num_segments, p.bias = bias;
  return HR_OK;
}

}  // namespace
