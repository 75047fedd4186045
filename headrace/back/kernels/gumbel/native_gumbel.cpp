// Samples from softmax(logits / temperature): the argmax of z - log(exponential noise), the noise a function of (key, id).
//
// Two logarithms per token would cost 6 ms a row of 150 thousand. A token whose z plus a bound of its noise stays below the
// best score so far needs none; past the first few hundred tokens almost all do. What is compared in the end is the exact
// score, so the choice is the reference's.

#include "../native/noise.h"

namespace {

constexpr int64_t kColumns = 16 * 1024;  // of one chunk
constexpr int kBlock = 256;              // tokens whose noise is computed at a time

struct Best {
  double score, z;
  int64_t id;
};

struct Gumbel {
  const float* x;
  const double* temperature;
  const uint64_t* keys;
  int64_t rows, columns, x_stride, chunks_per_row;
  Best* parts;
};

HR_INLINE void visit_block(const float* x, int64_t first, int count, double temperature, uint64_t key, Best& best) {
  uint64_t bits[kBlock];
  double z[kBlock], bound[kBlock];
  for (int i = 0; i < count; ++i) bits[i] = noise_bits(key, first + i);
  for (int i = 0; i < count; ++i) z[i] = double(x[first + i]) / temperature;
  for (int i = 0; i < count; ++i) bound[i] = z[i] + noise_bound(bits[i]);
  int hopeful = 0;
  for (int i = 0; i < count; ++i) hopeful |= bound[i] > best.score;
  if (!hopeful) return;
  for (int i = 0; i < count; ++i) {
    if (!(bound[i] > best.score)) continue;
    const double score = exact_score(z[i], bits[i]);
    if (score > best.score) best = {score, z[i], first + i};
  }
}

void chunk(void* context, int64_t i) {
  const Gumbel& p = *static_cast<const Gumbel*>(context);
  const int64_t row = i / p.chunks_per_row, first = i % p.chunks_per_row * kColumns;
  const int64_t end = smaller(first + kColumns, p.columns);
  Best best{-__builtin_inf(), -__builtin_inf(), first};
  for (int64_t j = first; j < end; j += kBlock)
    visit_block(p.x + row * p.x_stride, j, int(smaller<int64_t>(kBlock, end - j)), p.temperature[row], p.keys[row], best);
  p.parts[i] = best;
}

}  // namespace

// x [rows, columns] float32, row stride in elements; temperature [rows] above 0; keys [rows] -> ids [rows], and z of the
// chosen tokens (-inf where every token is masked).
HR_PUBLIC int32_t HR_EXPORT(gumbel)(const float* x, const double* temperature, const uint64_t* keys, int64_t* ids,
                                    double* chosen_z, int64_t rows, int64_t columns, int64_t x_stride) {
  if (rows < 0 || columns < 1) return HR_BAD_SHAPE;
  Gumbel p{x, temperature, keys, rows, columns, x_stride, ceil_div(columns, kColumns), nullptr};
  p.parts = static_cast<Best*>(hr_scratch(rows * p.chunks_per_row * int64_t(sizeof(Best))));
  if (p.parts == nullptr && rows > 0) return HR_NO_MEMORY;
  hr_parallel(chunk, &p, rows * p.chunks_per_row);
  for (int64_t row = 0; row < rows; ++row) {
    const Best* parts = p.parts + row * p.chunks_per_row;
    Best best = parts[0];
    for (int64_t i = 1; i < p.chunks_per_row; ++i)
      if (parts[i].score > best.score) best = parts[i];
    ids[row] = best.id;
    chosen_z[row] = best.z;
  }
  return HR_OK;
}
HR_REPLAYABLE(gumbel)
