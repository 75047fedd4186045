// y_t = y + (1 - gate_t) * (x_t - y) over the tokens of each row, from the row's state on, which becomes its last y.

#include "../native/recurrent.h"

namespace {

constexpr int64_t kChannels = 16 * kLanes;  // of one task

struct Scan {
  const float *gate, *x;
  float *y, *state;
  StepRows rows;
  int64_t width, state_stride;
};

void chunk(void* context, int64_t i) {
  const Scan& p = *static_cast<const Scan*>(context);
  const int64_t parts = ceil_div(p.width, kChannels), begin = i % parts * kChannels;
  const int64_t end = smaller(begin + kChannels, p.width);
  const RowTokens row = row_tokens(p.rows, i / parts);
  if (row.first == row.last) return;
  for (int64_t e = begin; e < end; e += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), end - e);
    F y = load_part(p.state + row.state * p.state_stride + e, count);
    for (int64_t t = row.first; t < row.last; ++t) {
      const int64_t at = t * p.width + e;
      y = y + (1.0f - load_part(p.gate + at, count)) * (load_part(p.x + at, count) - y);
      store_part(p.y + at, y, count);
      if (is_kept(row, t)) store_part(p.state + behind(row, t) * p.state_stride + e, y, count);
    }
  }
}

}  // namespace

// gate, x, y float32 [tokens, width] contiguous; state float32, row r at r * state_stride.
HR_PUBLIC int32_t HR_EXPORT(gated_scan)(const float* gate, const float* x, float* y, float* state, const void* row,
                                        const int32_t* start, int64_t rows, int64_t states, int64_t depth, int64_t width,
                                        int64_t state_stride, int32_t wide) {
  if (rows < 0 || width < 1) return HR_BAD_SHAPE;
  Scan p{gate, x, y, state, {row, start, rows, states, depth, wide}, width, state_stride};
  hr_parallel(chunk, &p, rows * ceil_div(width, kChannels));
  return HR_OK;
}
HR_REPLAYABLE(gated_scan)
