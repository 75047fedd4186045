// Two partial results of attention over disjoint KV positions as one, by their log-sum-exps, in place of the first.

#include "../native/simd.h"

namespace {

constexpr int64_t kRowsPerChunk = 64;

struct MergeAttention {
  void* out;
  float* lse;
  const void* other;
  const float* other_lse;
  int64_t rows, head_dim;
};

// out = out * left + other * right; a part of weight zero is not looked at, for it may be anything.
template <class T>
HR_INLINE void mix_rows(T* out, const T* other, float left, float right, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const int64_t n = smaller<int64_t>(head_dim - d, kLanes);
    const F a = left == 0 ? F{} : load_part(out + d, n) * left;
    const F b = right == 0 ? F{} : load_part(other + d, n) * right;
    store_part(out + d, a + b, n);
  }
}

template <class T>
void merge_rows(void* context, int64_t i) {
  const MergeAttention& p = *static_cast<const MergeAttention*>(context);
  const int64_t end = smaller((i + 1) * kRowsPerChunk, p.rows);
  for (int64_t row = i * kRowsPerChunk; row < end; ++row) {
    const float top = larger(p.lse[row], p.other_lse[row]);
    const float base = top == -__builtin_inff() ? 0.0f : top;
    const float left = vexp(splat(p.lse[row] - base))[0], right = vexp(splat(p.other_lse[row] - base))[0];
    const float total = left + right, by = total == 0 ? 1.0f : total;
    mix_rows(static_cast<T*>(p.out) + row * p.head_dim, static_cast<const T*>(p.other) + row * p.head_dim, left / by,
             right / by, p.head_dim);
    p.lse[row] = top + __builtin_logf(total);
  }
}

}  // namespace

// out, other [rows, head_dim] and lse, other_lse [rows], all contiguous; rows are tokens x heads. Where both log-sum-exps
// are -Inf the result is zeros.
HR_PUBLIC int32_t HR_EXPORT(merge_attention)(void* out, float* lse, const void* other, const float* other_lse,
                                             int64_t rows, int64_t head_dim, int32_t dtype) {
  if (rows < 0 || head_dim < 1) return HR_BAD_SHAPE;
  MergeAttention p{out, lse, other, other_lse, rows, head_dim};
  const int64_t chunks = ceil_div(rows, kRowsPerChunk);
  if (dtype == HR_BF16) hr_parallel(merge_rows<bf16>, &p, chunks);
  else if (dtype == HR_F16) hr_parallel(merge_rows<fp16>, &p, chunks);
  else if (dtype == HR_F32) hr_parallel(merge_rows<float>, &p, chunks);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(merge_attention)
