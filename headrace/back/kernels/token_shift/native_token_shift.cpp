// Each token moved towards the one before it by several weights; what lies before a row's first token is its state, which becomes
// the row's last token.

#include "../native/recurrent.h"

namespace {

constexpr int64_t kChannels = 16 * kLanes;  // of one task

struct Shift {
  const void* x;
  const float* weight;
  void *y, *state;
  StepRows rows;
  int64_t tokens, width, count, x_stride, state_stride;
};

template <class T>
HR_INLINE void channels(const Shift& p, const RowTokens& row, int64_t c, int64_t count) {
  T* state = static_cast<T*>(p.state) + c;
  F before = load_part(state + row.state * p.state_stride, count);
  for (int64_t t = row.first; t < row.last; ++t) {
    const F x = load_part(static_cast<const T*>(p.x) + t * p.x_stride + c, count), change = before - x;
    for (int64_t n = 0; n < p.count; ++n) {
      const F y = fma(change, load_part(p.weight + n * p.width + c, count), x);
      store_part(static_cast<T*>(p.y) + (n * p.tokens + t) * p.width + c, y, count);
    }
    before = x;
    if (is_kept(row, t)) store_part(state + behind(row, t) * p.state_stride, x, count);
  }
}

template <class T>
void chunk(void* context, int64_t i) {
  const Shift& p = *static_cast<const Shift*>(context);
  const int64_t parts = ceil_div(p.width, kChannels), begin = i % parts * kChannels;
  const int64_t end = smaller(begin + kChannels, p.width);
  const RowTokens row = row_tokens(p.rows, i / parts);
  if (row.first == row.last) return;
  for (int64_t c = begin; c < end; c += kLanes) channels<T>(p, row, c, smaller(int64_t(kLanes), end - c));
}

}  // namespace

// x [tokens, width] with a row stride, y [count, tokens, width] contiguous; weight float32 [count, width]; state [.., width], row r
// at r * state_stride elements.
HR_PUBLIC int32_t HR_EXPORT(token_shift)(const void* x, const float* weight, void* y, void* state, const void* row,
                                         const int32_t* start, int64_t rows, int64_t states, int64_t depth, int64_t tokens,
                                         int64_t width, int64_t count, int64_t x_stride, int64_t state_stride, int32_t wide,
                                         int32_t dtype) {
  if (rows < 0 || tokens < 0 || width < 1 || count < 1) return HR_BAD_SHAPE;
  Shift p{x, weight, y, state, {row, start, rows, states, depth, wide}, tokens, width, count, x_stride, state_stride};
  const int64_t chunks = rows * ceil_div(width, kChannels);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(token_shift)
