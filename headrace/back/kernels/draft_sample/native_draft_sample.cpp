// The drafts of rows, sampled as their tokens will be: op.py holds the definition.
//
// What truncation keeps of a row ends at one logit. Logits are counted, and what they weigh is summed, by their distance from
// the greatest; those before and at the distance where the kept ones end go into a heap, which gives them one by one.

#include "../native/noise.h"

namespace {

constexpr int kNumbers = 5;  // of a row: heat, mixed seed, top_k, top_p, log of min_p
constexpr int kSteps = 1024, kPerNat = 32;

struct DraftSample {
  const float* x;
  const int64_t *offset, *numbers;
  const int32_t *row, *length;
  int64_t* token;
  int64_t columns, x_stride, draft;
  float* heaps;
};

HR_INLINE double as_double(int64_t bits) { return slot_as<double>(uint64_t(bits)); }

HR_INLINE void sift_down(float* heap, int64_t size, int64_t at) {
  const float value = heap[at];
  for (int64_t child; (child = 2 * at + 1) < size; at = child) {
    if (child + 1 < size && heap[child + 1] > heap[child]) ++child;
    if (!(heap[child] > value)) break;
    heap[at] = heap[child];
  }
  heap[at] = value;
}

// The greatest that is left, behind which the heap is one smaller.
HR_INLINE float pop(float* heap, int64_t& size) {
  const float top = heap[0];
  heap[0] = heap[--size];
  sift_down(heap, size, 0);
  return top;
}

// By the distance from the greatest logit, in steps of a 32nd of the temperature.
HR_INLINE int step_of(float x, float best, float scale) {
  const float steps = (best - x) * scale;
  return steps < kSteps - 1 ? int(steps) : kSteps - 1;
}

// Into the heap: the logits not below `least` that lie `last` steps from the greatest at most.
HR_INLINE int64_t fill(float* heap, const float* x, int64_t columns, float best, float scale, float least, int last) {
  int64_t size = 0;
  for (int64_t i = 0; i < columns; ++i)
    if (x[i] >= least && step_of(x[i], best, scale) <= last) heap[size++] = x[i];
  for (int64_t i = size / 2; i-- > 0;) sift_down(heap, size, i);
  return size;
}

// The least logit that top_k keeps.
float kth_greatest(const float* x, int64_t columns, float best, float scale, int64_t top_k, float* heap) {
  int64_t count[kSteps] = {}, before = 0;
  for (int64_t i = 0; i < columns; ++i) ++count[step_of(x[i], best, scale)];
  int last = 0;
  while (last < kSteps - 1 && (before += count[last]) < top_k) ++last;
  float kth = best;
  int64_t size = fill(heap, x, columns, best, scale, -__builtin_inff(), last);
  for (int64_t i = 0; i < top_k && size > 0; ++i) kth = pop(heap, size);
  return kth;
}

// The least logit that top_p keeps of those not below `kth`.
float nucleus_end(const float* x, int64_t columns, float best, double heat, double top_p, float kth, float* heap) {
  const float scale = float(kPerNat / heat);
  double weight[kSteps] = {}, total = 0.0, sum = 0.0;
  for (int64_t i = 0; i < columns; ++i)
    if (x[i] >= kth) weight[step_of(x[i], best, scale)] += __builtin_exp((double(x[i]) - best) / heat);
  for (int i = 0; i < kSteps; ++i) total += weight[i];
  int last = 0;
  while (last < kSteps - 1 && (sum += weight[last]) < top_p * total * (1.0 + 1e-9)) ++last;
  float least = best;
  int64_t size = fill(heap, x, columns, best, scale, kth, last);
  sum = 0.0;
  while (size > 0 && sum < top_p * total) least = pop(heap, size), sum += __builtin_exp((double(least) - best) / heat);
  return least;
}

HR_INLINE int64_t best_of(const float* x, int64_t columns) {
  int64_t best = 0;
  for (int64_t i = 1; i < columns; ++i)
    if (x[i] > x[best]) best = i;
  return best;
}

void one_row(void* context, int64_t r) {
  const DraftSample& p = *static_cast<const DraftSample*>(context);
  const float* x = p.x + r * p.x_stride;
  const int64_t* numbers = p.numbers + p.row[r] * kNumbers;
  const double heat = as_double(numbers[0]), top_p = as_double(numbers[3]);
  int64_t chosen = best_of(x, p.columns);
  if (heat > 0.0) {
    const uint64_t position = uint64_t(p.length[p.row[r]] + p.draft);
    const uint64_t key = mixed(uint64_t(numbers[1]) ^ position * 0xD1B54A32D192ED03ull);
    const float top = x[chosen];
    float* heap = p.heaps + r * p.columns;
    float kept = -__builtin_inff();
    if (numbers[2] > 0 && numbers[2] < p.columns)
      kept = kth_greatest(x, p.columns, top, float(kPerNat / heat), numbers[2], heap);
    if (top_p < 1.0) kept = nucleus_end(x, p.columns, top, heat, top_p, kept, heap);
    const double least = double(top) / heat + as_double(numbers[4]);
    double best = -__builtin_inf();
    for (int64_t i = 0; i < p.columns; ++i) {
      if (!(x[i] >= kept)) continue;
      const double z = double(x[i]) / heat;
      if (!(z >= least)) continue;
      const uint64_t bits = noise_bits(key, p.offset ? i + p.offset[i] : i);
      if (!(z + noise_bound(bits) > best)) continue;
      const double score = exact_score(z, bits);
      if (score > best) best = score, chosen = i;
    }
  }
  p.token[r] = p.offset ? chosen + p.offset[chosen] : chosen;
}

}  // namespace

// x [num_rows, columns] float32, row stride in elements; offset [columns] or null; numbers [rows, kNumbers]; row [num_rows];
// length [rows] -> token [num_rows].
HR_PUBLIC int32_t HR_EXPORT(draft_sample)(const float* x, const int64_t* offset, const int64_t* numbers, const int32_t* row,
                                          const int32_t* length, int64_t* token, int64_t num_rows, int64_t columns,
                                          int64_t x_stride, int64_t rows, int64_t draft) {
  if (num_rows < 0 || columns < 1) return HR_BAD_SHAPE;
  for (int64_t r = 0; r < num_rows; ++r)
    if (row[r] < 0 || row[r] >= rows) return HR_BAD_INDEX;
  DraftSample p{x, offset, numbers, row, length, token, columns, x_stride, draft, nullptr};
  p.heaps = static_cast<float*>(hr_scratch(num_rows * columns * int64_t(sizeof(float))));
  if (p.heaps == nullptr && num_rows > 0) return HR_NO_MEMORY;
  hr_parallel(one_row, &p, num_rows);
  return HR_OK;
}
HR_REPLAYABLE(draft_sample)
