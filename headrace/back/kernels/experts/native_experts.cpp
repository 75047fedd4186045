// The experts of a mixture: every token through the gated MLPs it is sent to, and their weighted sum.
//
// Pairs of a token and a slot are sorted by expert. Then two passes. In the first a task is an expert that was chosen and a
// tile of its inner values, for all its pairs; in the second a tile of outputs, for all experts one after another, so that
// a token's sum needs no other memory and has one order: by expert. Each product is one sum along its inputs in one order. So a
// token's result does not depend on the others.

#include "../native/dot_tile.h"
#include "../native/mixture.h"

namespace {

constexpr int64_t kInner = 16;    // inner values of a task: as many gates and ups
constexpr int64_t kOutputs = 32;  // outputs of a task
constexpr int64_t kPairs = 64;    // whose panels are filled at a time

struct Mixture : SortedPairs {
  const void *x, *up, *down;
  const float *up_bias, *down_bias;
  const int32_t* experts_of;
  const float* weights;
  void *y, *inner_values;
  const float* beside;
  void* left;
  int64_t tokens, slots, experts, width, inner;
  float clamp;
  int32_t activation;
  bool no_memory;
};

// The sums of MB pairs with NB rows of a weight.
template <class T, int MB, int NB>
HR_INLINE void dots(const char* panel, const T* w, int64_t K, float* to, int64_t to_stride) {
  float out[MB][(NB + 3) / 4 * 4];
  dot_tile<T, MB, NB, 0>(panel, w, K, K, nullptr, out);
  for (int m = 0; m < MB; ++m)
    for (int n = 0; n < NB; ++n) to[m * to_stride + n] = out[m][n];
}

// to[pair][n] for `rows` pairs in panels and `count` rows of a weight.
template <class T, int NB>
HR_INLINE void dots_of_rows(const char* panels, int64_t rows, const T* w, int64_t K, float* to, int64_t to_stride) {
  for (int64_t m = 0; m < rows; m += 4) {
    const char* panel = panels + panel_bytes<T>(m, K);
    float* at = to + m * to_stride;
    switch (smaller<int64_t>(rows - m, 4)) {
      case 4: dots<T, 4, NB>(panel, w, K, at, to_stride); break;
      case 3: dots<T, 3, NB>(panel, w, K, at, to_stride); break;
      case 2: dots<T, 2, NB>(panel, w, K, at, to_stride); break;
      default: dots<T, 1, NB>(panel, w, K, at, to_stride);
    }
  }
}

template <class T>
HR_INLINE void product(const char* panels, int64_t rows, const T* w, int64_t count, int64_t K, float* to, int64_t to_stride) {
  int64_t n = 0;
  for (; n + 4 <= count; n += 4) dots_of_rows<T, 4>(panels, rows, w + n * K, K, to + n, to_stride);
  for (; n < count; ++n) dots_of_rows<T, 1>(panels, rows, w + n * K, K, to + n, to_stride);
}

template <class T>
HR_INLINE void fill_row(const T* x, int64_t K, int64_t m, int64_t rows, char* panels) {
  const int64_t base = m / 4 * 4;
  fill_panel_row(x, K, m % 4, smaller<int64_t>(rows - base, 4), panels + panel_bytes<T>(base, K));
}

// One tile of an expert's inner values.
template <class T>
void inner_task(void* context, int64_t i) {
  Mixture& p = *static_cast<Mixture*>(context);
  const int64_t tiles = ceil_div(p.inner, kInner), expert = p.used[i / tiles], first = i % tiles * kInner;
  const int64_t count = smaller(kInner, p.inner - first), E = p.width;
  const T* up = static_cast<const T*>(p.up) + expert * 2 * p.inner * E;
  char* panels = static_cast<char*>(hr_scratch(panel_bytes<T>(kPairs, E), 1));
  if (panels == nullptr) { p.no_memory = true; return; }
  alignas(64) float gates[kPairs * kInner], ups[kPairs * kInner];
  for (int64_t begin = p.starts[expert]; begin < p.starts[expert + 1]; begin += kPairs) {
    const int64_t rows = smaller(kPairs, p.starts[expert + 1] - begin);
    for (int64_t m = 0; m < rows; ++m)
      fill_row(static_cast<const T*>(p.x) + p.pairs[begin + m] / p.slots * E, E, m, rows, panels);
    product<T>(panels, rows, up + first * E, count, E, gates, kInner);
    product<T>(panels, rows, up + (p.inner + first) * E, count, E, ups, kInner);
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t pair = p.pairs[begin + m];
      T* to = static_cast<T*>(p.inner_values) + (begin + m) * p.inner + first;
      for (int64_t d = 0; d < count; d += kLanes) {
        const int64_t n = smaller<int64_t>(count - d, kLanes);
        F g = load_part(gates + m * kInner + d, n), u = load_part(ups + m * kInner + d, n);
        if (p.up_bias) {
          const float* bias = p.up_bias + expert * 2 * p.inner + first + d;
          g += load_part(bias, n), u += load_part(bias + p.inner, n);
        }
        if (p.beside) {
          const float* more = p.beside + pair * 2 * p.inner + first + d;
          g += load_part(more, n), u += load_part(more + p.inner, n);
        }
        const F value = gated_act(p.activation, p.clamp, g, u);
        store_part(to + d, value, n);
        if (p.left) store_part(static_cast<T*>(p.left) + pair * p.inner + first + d, value, n);
      }
    }
  }
}

// One tile of the outputs of all tokens.
template <class T>
void output_task(void* context, int64_t i) {
  Mixture& p = *static_cast<Mixture*>(context);
  const int64_t first = i * kOutputs, count = smaller(kOutputs, p.width - first), I = p.inner;
  const int64_t panel_room = panel_bytes<T>(kPairs, I);
  char* memory = static_cast<char*>(hr_scratch(panel_room + p.tokens * kOutputs * int64_t(sizeof(float)), 1));
  if (memory == nullptr) { p.no_memory = true; return; }
  float* totals = reinterpret_cast<float*>(memory + panel_room);
  __builtin_memset(totals, 0, size_t(p.tokens * kOutputs) * sizeof(float));
  alignas(64) float sums[kPairs * kOutputs];
  for (int64_t e = 0; e < p.num_used; ++e) {
    const int64_t expert = p.used[e];
    const T* down = static_cast<const T*>(p.down) + (expert * p.width + first) * I;
    const float* bias = p.down_bias ? p.down_bias + expert * p.width + first : nullptr;
    for (int64_t begin = p.starts[expert]; begin < p.starts[expert + 1]; begin += kPairs) {
      const int64_t rows = smaller(kPairs, p.starts[expert + 1] - begin);
      for (int64_t m = 0; m < rows; ++m)
        fill_row(static_cast<const T*>(p.inner_values) + (begin + m) * I, I, m, rows, memory);
      product<T>(memory, rows, down, count, I, sums, kOutputs);
      for (int64_t m = 0; m < rows; ++m) {
        const int32_t pair = p.pairs[begin + m];
        float* total = totals + pair / p.slots * kOutputs;
        for (int64_t n = 0; n < count; ++n)
          total[n] += p.weights[pair] * (sums[m * kOutputs + n] + (bias ? bias[n] : 0.0f));
      }
    }
  }
  for (int64_t t = 0; t < p.tokens; ++t) {
    T* y = static_cast<T*>(p.y) + t * p.width + first;
    for (int64_t n = 0; n < count; ++n) put(y + n, totals[t * kOutputs + n]);
  }
}

template <class T>
int32_t run(Mixture& p) {
  const int64_t count = p.tokens * p.slots;
  const int64_t values = ceil_div(count * p.inner * int64_t(sizeof(T)), 64) * 64;
  char* memory = static_cast<char*>(hr_scratch(values + pairs_bytes(count, p.experts)));
  if (memory == nullptr) return HR_NO_MEMORY;
  p.inner_values = memory;
  static_cast<SortedPairs&>(p) = sort_pairs(p.experts_of, count, p.experts, memory + values);
  hr_parallel(inner_task<T>, &p, p.num_used * ceil_div(p.inner, kInner));
  if (!p.no_memory) hr_parallel(output_task<T>, &p, ceil_div(p.width, kOutputs));
  return p.no_memory ? HR_NO_MEMORY : HR_OK;
}

}  // namespace

// x, y [tokens, width]; up [experts, 2 * inner, width] (gates, then ups), down [experts, width, inner]; up_bias
// [experts, 2 * inner] and down_bias [experts, width], or null; experts_of (-1: none) and weights [tokens, slots]; beside float32
// [tokens, slots, 2 * inner] is added in front of the activation, and left [tokens, slots, inner] takes the inner values, or
// both are null; all contiguous.
HR_PUBLIC int32_t HR_EXPORT(experts)(const void* x, const void* up, const void* down, const float* up_bias,
                                     const float* down_bias, const int32_t* experts_of, const float* weights, void* y,
                                     const float* beside, void* left, int64_t tokens, int64_t slots, int64_t experts, int64_t width, int64_t inner,
                                     float clamp, int32_t activation, int32_t dtype) {
  if (tokens < 0 || slots < 1 || experts < 1 || width < 1 || inner < 1) return HR_BAD_SHAPE;
  for (int64_t i = 0; i < tokens * slots; ++i)
    if (experts_of[i] < -1 || experts_of[i] >= experts) return HR_BAD_INDEX;
  if (tokens == 0) return HR_OK;
  Mixture p{{}, x, up, down, up_bias, down_bias, experts_of, weights, y, nullptr, beside, left, tokens, slots, experts, width,
            inner, clamp, activation, false};
  if (dtype == HR_BF16) return run<bf16>(p);
  if (dtype == HR_F16) return run<fp16>(p);
  if (dtype == HR_F32) return run<float>(p);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(experts)
