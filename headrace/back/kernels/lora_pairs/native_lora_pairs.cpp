// Pairs of tokens and experts for adapters, and the weighted sum of what these add: op.py holds the definition.

#include "../native/simd.h"

namespace {

struct Split {
  const void* x;
  const int32_t *slot, *expert;
  int32_t* slot_of_pair;
  void* x_of_pair;
  float *more, *down;
  int64_t slots, experts, width, inner, x_stride, element;
};

void pair_task(void* context, int64_t pair) {
  const Split& p = *static_cast<const Split*>(context);
  const int64_t token = pair / p.slots;
  const int32_t slot = p.slot[token], expert = p.expert[pair];
  p.slot_of_pair[pair] = slot > 0 && expert >= 0 ? int32_t((slot - 1) * p.experts + expert + 1) : 0;
  __builtin_memcpy(static_cast<char*>(p.x_of_pair) + pair * p.width * p.element,
                   static_cast<const char*>(p.x) + token * p.x_stride * p.element, size_t(p.width * p.element));
  __builtin_memset(p.more + pair * 2 * p.inner, 0, size_t(2 * p.inner) * sizeof(float));
  __builtin_memset(p.down + pair * p.width, 0, size_t(p.width) * sizeof(float));
}

struct Sum {
  void* y;
  const float *down, *weight;
  int64_t slots, width, y_stride;
};

template <class T>
void sum_task(void* context, int64_t token) {
  const Sum& p = *static_cast<const Sum*>(context);
  const float* down = p.down + token * p.slots * p.width;
  const float* weight = p.weight + token * p.slots;
  T* y = static_cast<T*>(p.y) + token * p.y_stride;
  for (int64_t e = 0; e < p.width; e += kLanes) {
    const int64_t n = smaller<int64_t>(p.width - e, kLanes);
    F sum = load_part(y + e, n);
    for (int64_t k = 0; k < p.slots; ++k) sum = fma(load_part(down + k * p.width + e, n), weight[k], sum);
    store_part(y + e, sum, n);
  }
}

}  // namespace

// x [tokens, width] with a row stride in elements, slot int32 [tokens], expert int32 [tokens, slots]; slot_of_pair int32, x_of_pair
// [pairs, width], more float32 [pairs, 2 * inner], down float32 [pairs, width] are written.
HR_PUBLIC int32_t HR_EXPORT(lora_pairs)(const void* x, const int32_t* slot, const int32_t* expert, int32_t* slot_of_pair,
                                        void* x_of_pair, float* more, float* down, int64_t tokens, int64_t slots,
                                        int64_t experts, int64_t width, int64_t inner, int64_t x_stride, int32_t dtype) {
  if (tokens < 0 || slots < 1 || experts < 1 || width < 1 || inner < 1) return HR_BAD_SHAPE;
  if (dtype != HR_BF16 && dtype != HR_F16 && dtype != HR_F32) return HR_BAD_DTYPE;
  for (int64_t pair = 0; pair < tokens * slots; ++pair)
    if (slot[pair / slots] < 0 || expert[pair] >= experts) return HR_BAD_INDEX;
  Split p{x, slot, expert, slot_of_pair, x_of_pair, more, down, slots, experts, width, inner, x_stride, dtype == HR_F32 ? 4 : 2};
  hr_parallel(pair_task, &p, tokens * slots);
  return HR_OK;
}
HR_REPLAYABLE(lora_pairs)

// y [tokens, width] with a row stride in elements; down float32 [tokens, slots, width], weight float32 [tokens, slots].
HR_PUBLIC int32_t HR_EXPORT(lora_sum)(void* y, const float* down, const float* weight, int64_t tokens, int64_t slots,
                                      int64_t width, int64_t y_stride, int32_t dtype) {
  if (tokens < 0 || slots < 1 || width < 1) return HR_BAD_SHAPE;
  Sum p{y, down, weight, slots, width, y_stride};
  if (dtype == HR_BF16) hr_parallel(sum_task<bf16>, &p, tokens);
  else if (dtype == HR_F16) hr_parallel(sum_task<fp16>, &p, tokens);
  else if (dtype == HR_F32) hr_parallel(sum_task<float>, &p, tokens);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(lora_sum)
