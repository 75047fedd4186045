// After a step that has verified drafts: each row's state goes back to the last token that stands.

#include "../native/recurrent.h"

namespace {

struct Return {
  const int32_t *kv_len, *length;
  uint8_t* state;
  StepRows rows;
  int64_t bytes, stride;
};

void give_back(void* context, int64_t i) {
  const Return& p = *static_cast<const Return*>(context);
  const RowTokens row = row_tokens(p.rows, i);
  const int64_t queries = row.last - row.first;
  if (queries < 2) return;
  const int64_t stand = p.length[row.state] - (p.kv_len[i] - queries) - 2;
  if (stand > 0 && stand < queries)
    __builtin_memcpy(p.state + row.state * p.stride, p.state + behind(row, row.first + stand) * p.stride, size_t(p.bytes));
}

}  // namespace

// row, start [rows + 1], kv_len [rows]: as of a step's attention; length by row of the runner; state: bytes.
HR_PUBLIC int32_t HR_EXPORT(state_return)(const void* row, const int32_t* start, const int32_t* kv_len,
                                          const int32_t* length, void* state, int64_t rows, int64_t states, int64_t depth,
                                          int64_t bytes, int64_t stride, int32_t wide) {
  if (rows < 0 || depth < 1 || bytes < 0) return HR_BAD_SHAPE;
  Return p{kv_len, length, static_cast<uint8_t*>(state), {row, start, rows, states, depth, wide}, bytes, stride};
  hr_parallel(give_back, &p, rows);
  return HR_OK;
}
HR_REPLAYABLE(state_return)
