// What the ways to multiply by block-quantized weights share: the call as data, and how results leave it.
#pragma once

#include "activation.h"
#include "block_panels.h"
#include "top.h"

namespace {

struct Segment {
  const uint8_t* panels;
  int64_t outputs;
  int64_t coding;
};

struct Product {
  const int8_t* codes;   // [M, stride]
  const float* scales;   // [M, groups]
  const int32_t* sums;   // of codes: [M, groups, 2], for the halves of 16 inputs; of larger groups the first has all
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
HR_INLINE int64_t panel_bytes(const Product& p) { return ceil_div(p.K, int64_t(C::block)) * super_bytes<C>(); }

template <class Y>
HR_INLINE void put_typed(const Product& p, int64_t m, int64_t n, int64_t count, F v) {
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

HR_INLINE void put(const Product& p, int64_t m, int64_t n, int64_t count, F v) {
  if (p.dtype == HR_BF16) put_typed<bf16>(p, m, n, count, v);
  else if (p.dtype == HR_F16) put_typed<fp16>(p, m, n, count, v);
  else put_typed<float>(p, m, n, count, v);
}

// Rows [m, m + rows) of a panel's results (64 floats each) to outputs n .., of which `left` exist. The one place where the
// type of y matters: one copy of the loops serves all types.
void put_panel(const Product& p, int64_t m, int64_t rows, int64_t n, int64_t left, const float* results) {
  for (int64_t i = 0; i < rows; ++i, results += kPanel)
    for (int64_t column = 0; column < smaller(left, kPanel); column += kLanes)
      put(p, m + i, n + column, left - column, load_raw<F>(results + column));
}

// The same of act(gates) * ups.
void put_gated(const Product& p, int64_t m, int64_t rows, int64_t n, const float* gates, const float* ups) {
  for (int64_t i = 0; i < rows; ++i, gates += kPanel, ups += kPanel)
    for (int64_t column = 0; column < kPanel; column += kLanes)
      put(p, m + i, n + column, kLanes, gate(p.activation, load_raw<F>(gates + column), load_raw<F>(ups + column)));
}

}  // namespace
