// Which tokens of a step belong to which row, for kernels of recurrent state: [rows + 1, ...], where the last row is padding's.
#pragma once

#include "simd.h"

namespace {

struct StepRows {
  const void* row;       // the state's row of each row of the step, int64 if wide, else int32
  const int32_t* start;  // its first token, [count + 1]
  int64_t count, states;  // rows of the step; rows of the state that somebody may own
  int64_t depth;          // further states of a row that are kept, behind row `states`; 0: none
  int32_t wide;
};

// The tokens [first, last) of row i and its row of the state; none of both for padding, whatever it names.
struct RowTokens {
  int64_t state, first, last;
  int64_t trail;  // the state behind its second token, or -1: only the last one is kept
};

// Whether the state behind token t is kept, and where.
HR_INLINE bool is_kept(const RowTokens& row, int64_t t) { return row.trail >= 0 || t + 1 == row.last; }
HR_INLINE int64_t behind(const RowTokens& row, int64_t t) {
  return row.trail >= 0 && t > row.first ? row.trail + t - row.first - 1 : row.state;
}

HR_INLINE RowTokens row_tokens(const StepRows& rows, int64_t i) {
  const int64_t state = rows.wide ? static_cast<const int64_t*>(rows.row)[i] : static_cast<const int32_t*>(rows.row)[i];
  if (state < 0 || state >= rows.states) return {0, 0, 0, -1};
  const int64_t trail = rows.depth > 0 ? rows.states + 1 + i * rows.depth : -1;
  return {state, rows.start[i], rows.start[i + 1], trail};
}

// The state that token t changes in place: the one before it, or where all are kept a copy of its elements [begin, end) there.
HR_INLINE float* next_state(float* state, const RowTokens& row, int64_t t, int64_t stride, int64_t begin, int64_t end) {
  if (t == row.first) return state;
  float* next = state + (behind(row, t) - behind(row, t - 1)) * stride;
  __builtin_memcpy(next + begin, state + begin, size_t(end - begin) * sizeof(float));
  return next;
}

// log(1 + exp(x)), which is x where the sum is.
HR_INLINE float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }
// The same of a vector: max(x, 0) + log(1 + t) with t = exp(-|x|), and log(1 + t) = 2 atanh(t / (2 + t)) as a series, of which the
// first term left out is below 1e-8 of the sum.
HR_INLINE F vsoftplus(F x) {
  const F t = vexp(vmin(x, -x)), z = t / (t + 2.0f), zz = z * z;
  F series = fma(zz, splat(1.0f / 15.0f), splat(1.0f / 13.0f));
  for (float odd = 11.0f; odd > 0.0f; odd -= 2.0f) series = fma(zz, series, splat(1.0f / odd));
  return vmax(x, F{}) + z * series * 2.0f;
}
HR_INLINE float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

}  // namespace
