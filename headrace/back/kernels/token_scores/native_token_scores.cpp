// A token's log-probability, its rank and the most likely tokens: rows are read once, in parts of a fixed size, so that a row's
// bits depend on nothing else. What the parts leave is put together in their order.

#include "../native/top.h"

namespace {

constexpr int64_t kPart = 8 * 1024;  // logits: they stay in the first-level cache for the passes over them

struct Scores {
  const float* logits;
  const int64_t* tokens;
  int32_t* out;
  int64_t width, stride, out_stride, columns, parts;
  // Of each row and part: its greatest logit, the sum of exp over that, greater ones than the token's, and the best.
  float *greatest, *sums, *values;
  int64_t *above, *ids;
};

HR_INLINE bool finite(float x) { return x - x == 0.0f; }

// The sum of exp(x - best), best finite.
HR_INLINE float sum_exp(const float* x, int64_t count, float best) {
  F sums[4]{};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    HR_UNROLL for (int j = 0; j < 4; ++j) sums[j] += vexp(load(x + i + j * kLanes) - best);
  float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; ++i) total += vexp(splat(x[i] - best))[0];
  return total;
}

HR_INLINE int64_t count_above(const float* x, int64_t count, float value) {
  I above{};
  int64_t i = 0, total = 0;
  for (; i + kLanes <= count; i += kLanes) above -= load(x + i) > value;
  for (int lane = 0; lane < kLanes; ++lane) total += above[lane];
  for (; i < count; ++i) total += x[i] > value;
  return total;
}

// A chunk is a part of a row.
void score_part(void* context, int64_t chunk) {
  const Scores& p = *static_cast<const Scores*>(context);
  const int64_t row = chunk / p.parts, first = chunk % p.parts * kPart, count = smaller(kPart, p.width - first);
  const int64_t best = p.columns - 1;
  const float* x = p.logits + row * p.stride;
  p.greatest[chunk] = greatest(x + first, count);
  p.sums[chunk] = finite(p.greatest[chunk]) ? sum_exp(x + first, count, p.greatest[chunk]) : 0.0f;
  p.above[chunk] = count_above(x + first, count, x[p.tokens[row]]);
  if (best > 0) top_row(x + first, count, first, best, p.values + chunk * best, p.ids + chunk * best);
}

// The log of the sum of exp, of what the parts of a row have left.
HR_INLINE float log_sum_exp(const float* best, const float* sums, int64_t parts) {
  const float all = greatest(best, parts);
  if (!finite(all)) return all;
  double total = 0;
  for (int64_t i = 0; i < parts; ++i)
    if (finite(best[i])) total += double(sums[i]) * __builtin_exp(double(best[i]) - double(all));
  return float(double(all) + __builtin_log(total));
}

// The columns of a row: ids, log-probabilities, the token's rank, the log of the sum of exp.
void write_row(const Scores& p, int64_t row, float* values, int64_t* ids) {
  const int64_t first = row * p.parts, best = p.columns - 1;
  const float* x = p.logits + row * p.stride;
  int64_t rank = 1, held = 0;
  for (int64_t part = first; part < first + p.parts; ++part) {
    rank += p.above[part];
    for (int64_t i = part * best; i < (part + 1) * best && p.ids[i] >= 0; ++i)
      if (!top_keep(p.values[i], p.ids[i], best, held, values, ids)) break;
  }
  const float lse = log_sum_exp(p.greatest + first, p.sums + first, p.parts);
  int32_t* out = p.out + row * p.out_stride;
  for (int64_t c = 0; c < p.columns; ++c) {
    const int64_t id = c == 0 ? p.tokens[row] : ids[c - 1];
    const float value = x[id] - lse;
    out[c] = int32_t(id);
    __builtin_memcpy(out + p.columns + c, &value, sizeof value);
  }
  out[2 * p.columns] = int32_t(rank);
  __builtin_memcpy(out + 2 * p.columns + 1, &lse, sizeof lse);
}

}  // namespace

// logits [rows, width] float32 with a row stride; out [rows, 2 * columns + 2] int32 with a row stride: see write_row.
HR_PUBLIC int32_t HR_EXPORT(token_scores)(const float* logits, const int64_t* tokens, int32_t* out, int64_t rows, int64_t width,
                                          int64_t stride, int64_t out_stride, int64_t columns) {
  if (rows < 0 || width < 1 || columns < 1 || columns - 1 > width) return HR_BAD_SHAPE;
  for (int64_t r = 0; r < rows; ++r)
    if (tokens[r] < 0 || tokens[r] >= width) return HR_BAD_INDEX;
  const int64_t parts = ceil_div(width, kPart), chunks = rows * parts, best = columns - 1;
  char* memory = static_cast<char*>(hr_scratch((chunks * (best + 1) + best) * 8 + (chunks * (best + 2) + best) * 4, 3));
  if (memory == nullptr) return HR_NO_MEMORY;
  int64_t *above = reinterpret_cast<int64_t*>(memory), *ids = above + chunks, *row_ids = ids + chunks * best;
  float *top = reinterpret_cast<float*>(row_ids + best), *sums = top + chunks, *values = sums + chunks;
  Scores p{logits, tokens, out, width, stride, out_stride, columns, parts, top, sums, values, above, ids};
  hr_parallel(score_part, &p, chunks);
  for (int64_t r = 0; r < rows; ++r) write_row(p, r, values + chunks * best, row_ids);
  return HR_OK;
}
HR_REPLAYABLE(token_scores)
