// x += scale * (row ids[t] of A) B by a slot per token: op.py holds the definition. Ranks are added in order on top of x.

#include "../native/simd.h"

namespace {

struct Table {
  const int64_t* ids;
  const int32_t* slot;
  const void *a, *b;
  void* x;
  const float* scale;
  const int32_t* rank;
  int64_t vocabulary, width, most, x_stride;
};

template <class T>
void token_task(void* context, int64_t t) {
  const Table& p = *static_cast<const Table*>(context);
  if (p.slot[t] == 0) return;
  const int64_t s = p.slot[t] - 1, rank = p.rank[s];
  const T* a = static_cast<const T*>(p.a) + (s * p.vocabulary + p.ids[t]) * p.most;
  const T* b = static_cast<const T*>(p.b) + s * p.most * p.width;
  T* x = static_cast<T*>(p.x) + t * p.x_stride;
  for (int64_t e = 0; e < p.width; e += kLanes) {
    const int64_t n = smaller<int64_t>(p.width - e, kLanes);
    F sum = load_part(x + e, n);
    for (int64_t r = 0; r < rank; ++r) {
      sum = fma(load_part(b + r * p.width + e, n), p.scale[s] * to_float(a[r]), sum);
    }
    store_part(x + e, sum, n);
  }
}

}  // namespace

// ids int64 [tokens], x [tokens, width] with a row stride in elements, slot int32 [tokens]; a [slots, vocabulary, most], b
// [slots, most, width], scale float32 and rank int32 [slots].
HR_PUBLIC int32_t HR_EXPORT(lora_embedding)(const int64_t* ids, void* x, const int32_t* slot, const void* a, const void* b,
                                            const float* scale, const int32_t* rank, int64_t tokens, int64_t vocabulary,
                                            int64_t width, int64_t most, int64_t slots, int64_t x_stride, int32_t dtype) {
  if (tokens < 0 || vocabulary < 1 || width < 1 || most < 1 || slots < 1) return HR_BAD_SHAPE;
  for (int64_t t = 0; t < tokens; ++t)
    if (slot[t] < 0 || slot[t] > slots || ids[t] < 0 || ids[t] >= vocabulary) return HR_BAD_INDEX;
  for (int64_t s = 0; s < slots; ++s)
    if (rank[s] < 0 || rank[s] > most) return HR_BAD_INDEX;
  Table p{ids, slot, a, b, x, scale, rank, vocabulary, width, most, x_stride};
  if (dtype == HR_BF16) hr_parallel(token_task<bf16>, &p, tokens);
  else if (dtype == HR_F16) hr_parallel(token_task<fp16>, &p, tokens);
  else if (dtype == HR_F32) hr_parallel(token_task<float>, &p, tokens);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(lora_embedding)
