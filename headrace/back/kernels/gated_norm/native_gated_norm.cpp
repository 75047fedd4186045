// A gate beside the root mean square norm of each group of values: y = norm(x * act(gate)) * w, norm(x) * w * act(gate), or
// x * act(gate) alone.

#include "../native/activation.h"
#include "../native/recurrent.h"

namespace {

constexpr int64_t kChunkElements = 16 * 1024;  // below that a row costs less than waking a thread

enum Gate : int32_t { AS_SILU = 0, AS_SIGMOID = 1, AS_SOFTPLUS = 3 };  // else as it is
enum Order : int32_t { GATE_FIRST = 0, NORM_FIRST = 1 };

struct Gated {
  const void *x, *gate;
  const float* weight;  // null: no norm
  void* y;
  int64_t rows, width, group, spread, x_stride, gate_stride, rows_per_chunk;
  float eps;
  int32_t order, act;
};

template <class T>
HR_INLINE F load_some(const T* p, int64_t count) { return count >= kLanes ? load(p) : load_part(p, count); }
template <class T>
HR_INLINE void store_some(T* p, F v, int64_t count) {
  if (count >= kLanes) store(p, v);
  else store_part(p, v, count);
}

HR_INLINE F opened(const Gated& p, F g) {
  if (p.act == AS_SILU) return activate<SILU>(g);
  if (p.act == AS_SOFTPLUS) return vsoftplus(g);
  return p.act == AS_SIGMOID ? vsigmoid(g) : g;
}

// One group of a row: what it is multiplied with, 1 without a norm.
template <class T>
HR_INLINE float scale_of(const Gated& p, const T* x, const T* gate, int64_t first) {
  F squares{};
  for (int64_t e = first; e < first + p.group; e += kLanes) {
    const int64_t count = smaller(int64_t(kLanes), first + p.group - e);
    F v = load_some(x + e, count);
    if (p.order == GATE_FIRST) v = v * opened(p, load_some(gate + e, count));
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
      F v = load_some(x + e, count) * opened(p, load_some(gate + e, count));
      if (p.weight != nullptr) v = v * scale * load_some(p.weight + e, count);
      store_some(y + e, v, count);
    }
  }
}

// A row whose gates stand for several values each.
template <class T>
HR_INLINE void spread_row(const Gated& p, const T* x, const T* gate, T* y) {
  for (int64_t first = 0; first < p.width; first += p.spread, ++gate) {
    const F open = opened(p, splat(to_float(*gate)));
    for (int64_t e = first; e < first + p.spread; e += kLanes) {
      const int64_t count = smaller(int64_t(kLanes), first + p.spread - e);
      store_some(y + e, load_some(x + e, count) * open, count);
    }
  }
}

template <class T>
void chunk(void* context, int64_t i) {
  const Gated& p = *static_cast<const Gated*>(context);
  const int64_t end = smaller((i + 1) * p.rows_per_chunk, p.rows);
  for (int64_t r = i * p.rows_per_chunk; r < end; ++r) {
    const T* x = static_cast<const T*>(p.x) + r * p.x_stride;
    const T* gate = static_cast<const T*>(p.gate) + r * p.gate_stride;
    if (p.spread > 1) spread_row(p, x, gate, static_cast<T*>(p.y) + r * p.width);
    else row(p, x, gate, static_cast<T*>(p.y) + r * p.width);
  }
}

}  // namespace

// x [rows, width] and gate [rows, width / spread] with row strides in elements, y contiguous; weight float32 [width] or null: no
// norm. gate: see Gate.
HR_PUBLIC int32_t HR_EXPORT(gated_norm)(const void* x, const void* gate, const float* weight, void* y, int64_t rows,
                                        int64_t width, int64_t group, int64_t spread, int64_t x_stride,
                                        int64_t gate_stride, float eps, int32_t norm_first, int32_t act, int32_t dtype) {
  if (rows < 0 || width < 1 || group < 1 || width % group || spread < 1 || width % spread) return HR_BAD_SHAPE;
  if (spread > 1 && weight != nullptr) return HR_BAD_SHAPE;
  Gated p{x, gate, weight, y, rows, width, group, spread, x_stride, gate_stride, ceil_div(kChunkElements, width), eps,
          norm_first, act};
  const int64_t chunks = ceil_div(rows, p.rows_per_chunk);
  if (dtype == HR_BF16) hr_parallel(chunk<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(chunk<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(chunk<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(gated_norm)
