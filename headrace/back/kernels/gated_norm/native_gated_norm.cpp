// A gate beside the root mean square norm of each group of values: y = norm(x * act(gate)) * w, norm(x) * w * act(gate), or
// x * act(gate) alone.

#include "../native/activation.h"

namespace {

constexpr int64_t kChunkElements = 16 * 1024;  // below that a row costs less than waking a thread

enum Order : int32_t { GATE_FIRST = 0, NORM_FIRST = 1 };

struct Gated {
  const void *x, *gate;
  const float* weight;  // null: no norm
  void* y;
  int64_t rows, width, group, gate_stride, rows_per_chunk;
  float eps;
  int32_t order, silu;
};

template <class T>
HR_INLINE F load_some(const T* p, int64_t count) { return count >= kLanes ? load(p) : load_part(p, count); }
template <class T>
HR_INLINE void store_some(T* p, F v, int64_t count) {
  if (count >= kLanes) store(p, v);
  else store_part(p, v, count);
}

template <class T>
HR_INLINE F opened(const Gated& p, const T* gate, int64_t count) {
  const F g = load_some(gate, count);
  return p.silu ? activate<SILU>(g) : vsigmoid(g);
}

// One group of a row: what it is multiplied with, 1 without a norm.
template <class T>
HR_INLINE float scale_of(const Gated& p, const T* x, const T* gate, int64_t first) {
  F squares{};
  for (int64_t e = first; e < first + p.group; e += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), first + p.group - e);
    F v = load_some(x + e, count);
    if (p.order == GATE_FIRST) v = v * opened(p, gate + e, count);
    squares = fma(v, v, squares);
  }
  return 1.0f / __builtin_sqrtf(sum(squares) / float(p.group) + p.eps);
}

template <class T>
HR_INLINE void row(const Gated& p, const T* x, const T* gate, T* y) {
  for (int64_t first = 0; first < p.width; first += p.group) {
    const float scale = p.weight == nullptr ? 1.0f : scale_of(p, x, gate, first);
    for (int64_t e = first; e < first + p.group; e += kLanes) {
      const int64_t count = smaller(int64_t(kLanes), first + p.group - e);
      F v = load_some(x + e, count) * opened(p, gate + e, count);
      if (p.weight != nullptr) v = v * scale * load_some(p.weight + e, count);
      store_some(y + e, v, count);
    }
  }
}

template <class T>
void chunk(void* context, int64_t i) {
  const Gated& p = *static_cast<const Gated*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.rows);
  for (int64_t r = i * p.rows_per_chunk; r < end; ++r) {
    const T* x = static_cast<const T*>(p.x) + r * p.width;
    row(p, x, static_cast<const T*>(p.gate) + r * p.gate_stride, static_cast<T*>(p.y) + r * p.width);
  }
}

}  // namespace

// x, y [rows, width] contiguous; gate with a row stride in elements; weight float32 [width] or null: no norm.
HR_PUBLIC int32_t HR_EXPORT(gated_norm)(const void* x, const void* gate, const float* weight, void* y, int64_t rows,
                                        int64_t width, int64_t group, int64_t gate_stride, float eps, int32_t norm_first,
                                        int32_t silu, int32_t dtype) {
  if (rows < 0 || width < 1 || group < 1 || width % group) return HR_BAD_SHAPE;
  Gated p{x, gate, weight, y, rows, width, group, gate_stride, ceil_div(kChunkElements, width), eps, norm_first, silu};
  const int64_t chunks = ceil_div(rows, p.rows_per_chunk);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(gated_norm)
