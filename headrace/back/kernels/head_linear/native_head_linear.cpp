// A GEMM of its own for each head: y[t][h] = W[h] x[t][h]. A task is a head and a tile of its outputs, for all tokens, so
// that each weight is read once. A result is one sum along the inputs in one order, whatever is computed beside it.

#include "../native/dot_tile.h"

namespace {

constexpr int64_t kOutputs = 64;  // of a task
constexpr int64_t kTokens = 16;   // whose panels are filled at a time
constexpr int64_t kMaxInputs = 1024;

struct HeadLinear {
  const void *x, *weight;
  void* y;
  int64_t tokens, heads, inputs, outputs, x_token, x_head, y_token, y_head, tiles;
};

template <class T, int MB, int NB>
HR_INLINE void product_tile(const HeadLinear& p, const char* panel, const T* w, T* y) {
  float out[MB][(NB + 3) / 4 * 4];
  dot_tile<T, MB, NB, 0>(panel, w, p.inputs, p.inputs, nullptr, out);
  for (int m = 0; m < MB; ++m)
    for (int n = 0; n < NB; ++n) put(y + m * p.y_token + n, out[m][n]);
}

template <class T, int NB>
HR_INLINE void product_rows(const HeadLinear& p, const char* panels, int64_t rows, const T* w, T* y) {
  for (int64_t m = 0; m < rows; m += 4) {
    const char* panel = panels + panel_bytes<T>(m, p.inputs);
    T* to = y + m * p.y_token;
    switch (smaller<int64_t>(rows - m, 4)) {
      case 4: product_tile<T, 4, NB>(p, panel, w, to); break;
      case 3: product_tile<T, 3, NB>(p, panel, w, to); break;
      case 2: product_tile<T, 2, NB>(p, panel, w, to); break;
      default: product_tile<T, 1, NB>(p, panel, w, to);
    }
  }
}

template <class T>
void product_task(void* context, int64_t i) {
  const HeadLinear& p = *static_cast<const HeadLinear*>(context);
  const int64_t head = i / p.tiles, first = i % p.tiles * kOutputs, end = smaller(first + kOutputs, p.outputs);
  const T* x = static_cast<const T*>(p.x) + head * p.x_head;
  const T* w = static_cast<const T*>(p.weight) + head * p.outputs * p.inputs;
  T* y = static_cast<T*>(p.y) + head * p.y_head;
  alignas(64) char panels[kTokens * kMaxInputs * sizeof(T)];
  for (int64_t token = 0; token < p.tokens; token += kTokens) {
    const int64_t rows = smaller(kTokens, p.tokens - token);
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t base = m / 4 * 4;
      fill_panel_row(x + (token + m) * p.x_token, p.inputs, m % 4, smaller<int64_t>(rows - base, 4),
                     panels + panel_bytes<T>(base, p.inputs));
    }
    int64_t n = first;
    for (; n + 4 <= end; n += 4) product_rows<T, 4>(p, panels, rows, w + n * p.inputs, y + token * p.y_token + n);
    for (; n < end; ++n) product_rows<T, 1>(p, panels, rows, w + n * p.inputs, y + token * p.y_token + n);
  }
}

}  // namespace

// x [tokens, heads, inputs], y [tokens, heads, outputs] with strides in elements and contiguous last dimensions; weight
// [heads, outputs, inputs], contiguous.
HR_PUBLIC int32_t HR_EXPORT(head_linear)(const void* x, const void* weight, void* y, int64_t tokens, int64_t heads,
                                         int64_t inputs, int64_t outputs, int64_t x_token, int64_t x_head, int64_t y_token,
                                         int64_t y_head, int32_t dtype) {
  if (tokens < 0 || heads < 1 || inputs < 1 || inputs > kMaxInputs || outputs < 1) return HR_BAD_SHAPE;
  if (tokens == 0) return HR_OK;
  const int64_t tiles = ceil_div(outputs, kOutputs);
  HeadLinear p{x, weight, y, tokens, heads, inputs, outputs, x_token, x_head, y_token, y_head, tiles};
  if (dtype == HR_BF16) hr_parallel(product_task<bf16>, &p, heads * tiles);
  else if (dtype == HR_F16) hr_parallel(product_task<fp16>, &p, heads * tiles);
  else if (dtype == HR_F32) hr_parallel(product_task<float>, &p, heads * tiles);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(head_linear)
