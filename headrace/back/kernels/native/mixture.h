// What the kernels for mixtures of experts share: pairs of a token and a slot sorted by expert, and the activation.
#pragma once

#include "activation.h"

namespace {

constexpr int32_t kSwigluOai = 100, kSwigluStep = 101;
constexpr float kOaiAlpha = 1.702f;

// act(gate) * up as op `experts` defines it; `clamp` 0: unbounded.
HR_INLINE F gated_act(int32_t activation, float clamp, F g, F u) {
  if (activation == kSwigluStep)
    return vmin(splat(clamp), g * vsigmoid(g)) * vmin(splat(clamp), vmax(splat(-clamp), u));
  if (clamp > 0) g = vmin(splat(clamp), g), u = vmin(splat(clamp), vmax(splat(-clamp), u));
  if (activation == kSwigluOai) return g * vsigmoid(kOaiAlpha * g) * (u + 1.0f);
  return gate(activation, g, u);
}

struct SortedPairs {
  int64_t* starts;         // [experts + 1]: the first pair of each, in order
  int32_t *pairs, *used;   // pair numbers (token * slots + slot) by expert; experts that have any
  int64_t num_used;
};

HR_INLINE int64_t pairs_bytes(int64_t count, int64_t experts) {
  return ceil_div((experts + 1) * 8 + (count + experts) * 4, int64_t(64)) * 64;
}

// Into `memory` of pairs_bytes: the pairs of each expert in their order. Pairs of expert -1 are left out.
inline SortedPairs sort_pairs(const int32_t* experts_of, int64_t count, int64_t experts, void* memory) {
  SortedPairs p{static_cast<int64_t*>(memory), nullptr, nullptr, 0};
  p.pairs = reinterpret_cast<int32_t*>(p.starts + experts + 1), p.used = p.pairs + count;
  for (int64_t x = 0; x <= experts; ++x) p.starts[x] = 0;
  for (int64_t i = 0; i < count; ++i) ++p.starts[experts_of[i] + 1];
  p.starts[0] = 0;
  for (int64_t x = 0; x < experts; ++x) {
    if (p.starts[x + 1] > 0) p.used[p.num_used++] = int32_t(x);
    p.starts[x + 1] += p.starts[x];
  }
  for (int64_t i = 0; i < count; ++i)
    if (experts_of[i] >= 0) p.pairs[p.starts[experts_of[i]]++] = int32_t(i);
  for (int64_t x = experts; x > 0; --x) p.starts[x] = p.starts[x - 1];
  p.starts[0] = 0;
  return p;
}

}  // namespace
