// The positions of each row's query tokens, moved by a number of the row.

#include "../native/simd.h"

// row [rows], start [rows + 1] int32, delta [states], position [tokens] int64; a row of padding is the last state.
HR_PUBLIC int32_t HR_EXPORT(position_shift)(const void* row, const int32_t* start, const int64_t* delta,
                                            int64_t* position, int64_t rows, int64_t states, int64_t tokens,
                                            int32_t wide, int32_t sign) {
  if (rows < 0 || tokens < 0) return HR_BAD_SHAPE;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t at = wide ? static_cast<const int64_t*>(row)[i] : static_cast<const int32_t*>(row)[i];
    if (at < 0 || at >= states || !delta[at]) continue;
    const int64_t end = start[i + 1] < tokens ? start[i + 1] : tokens;
    for (int64_t t = start[i]; t < end; ++t) position[t] += sign * delta[at];
  }
  return HR_OK;
}
HR_REPLAYABLE(position_shift)
