// What the state of a step's rows begins with (zeros, a snapshot, what it was) and where it is kept behind the step.

#include "../native/simd.h"

namespace {

struct States {
  const void* row;
  const int32_t *start, *length, *table;
  uint8_t *state, *snapshots;
  int64_t rows, states, bytes, state_stride, snapshot_stride, columns, block_tokens;
  int32_t wide;
};

// The slot at the end of the block that ends at this position; 0: there is none.
HR_INLINE int64_t slot(const States& p, int64_t i, int64_t position) {
  const int64_t block = position / p.block_tokens - 1;
  if (position <= 0 || position % p.block_tokens || block >= p.columns) return 0;
  return p.table[i * p.columns + block];
}

HR_INLINE int64_t state_of(const States& p, int64_t i) {
  const int64_t row = p.wide ? static_cast<const int64_t*>(p.row)[i] : static_cast<const int32_t*>(p.row)[i];
  const bool real = row >= 0 && row < p.states && p.start[i + 1] > p.start[i];
  return real ? row : -1;
}

void begin(void* context, int64_t i) {
  const States& p = *static_cast<const States*>(context);
  const int64_t row = state_of(p, i);
  if (row < 0) return;
  const int64_t position = p.length[i] - (p.start[i + 1] - p.start[i]), from = slot(p, i, position);
  uint8_t* state = p.state + row * p.state_stride;
  if (position <= 0) __builtin_memset(state, 0, size_t(p.bytes));
  else if (from > 0) __builtin_memcpy(state, p.snapshots + from * p.snapshot_stride, size_t(p.bytes));
}

void keep(void* context, int64_t i) {
  const States& p = *static_cast<const States*>(context);
  const int64_t row = state_of(p, i), to = slot(p, i, p.length[i]);
  if (row >= 0 && to > 0)
    __builtin_memcpy(p.snapshots + to * p.snapshot_stride, p.state + row * p.state_stride, size_t(p.bytes));
}

}  // namespace

// row, start [rows + 1], length [rows], table [rows, columns]: as of a step's attention; state and snapshots: bytes, a row each.
HR_PUBLIC int32_t HR_EXPORT(state_rows)(const void* row, const int32_t* start, const int32_t* length,
                                        const int32_t* table, void* state, void* snapshots, int64_t rows, int64_t states,
                                        int64_t bytes, int64_t state_stride, int64_t snapshot_stride, int64_t columns,
                                        int64_t block_tokens, int32_t wide, int32_t keeps) {
  if (rows < 0 || bytes < 0 || block_tokens < 1) return HR_BAD_SHAPE;
  States p{row, start, length, table, static_cast<uint8_t*>(state), static_cast<uint8_t*>(snapshots), rows, states, bytes,
           state_stride, snapshot_stride, columns, block_tokens, wide};
  hr_parallel(keeps ? keep : begin, &p, rows);
  return HR_OK;
}
HR_REPLAYABLE(state_rows)
