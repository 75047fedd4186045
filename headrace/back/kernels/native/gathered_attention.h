// Attention of a few query heads of one token over vectors that lie anywhere: what kernels over chosen positions share. Vectors
// are summed in their order, so that a query's bits are the same in any step.
#pragma once

#include "dots.h"

namespace {

constexpr int kHeads = 4;  // of one call: a vector is loaded once for all of them

// The vectors that one call reads, and its memory, which is the calling thread's.
template <class T>
struct Gathered {
  const T** keys;  // [count], for the caller to fill; null: there is nothing to read, or no memory
  float* scores;      // [kHeads, count]
  Query<T>* q;        // [kHeads, stride]
  int64_t count, width, stride;
};

template <class T>
HR_INLINE Gathered<T> gathered(int64_t count, int64_t width) {
  const int64_t stride = query_stride(width);
  Gathered<T> g{nullptr, nullptr, nullptr, count, width, stride};
  if (count == 0) return g;
  const int64_t bytes = kHeads * (stride + count) * int64_t(sizeof(float)) + count * int64_t(sizeof(T*));
  char* memory = static_cast<char*>(hr_scratch(bytes, 1));
  if (memory == nullptr) return g;
  g.keys = reinterpret_cast<const T**>(memory);
  g.scores = reinterpret_cast<float*>(g.keys + count), g.q = reinterpret_cast<Query<T>*>(g.scores + kHeads * count);
  return g;
}

template <class T>
HR_INLINE void score_heads(const Gathered<T>& g, float scale) {
  each_dot<T>(
      g.q, g.stride, g.width, g.count, [&](int64_t s) { return g.keys[s]; },
      [&](int64_t s, const float* dots) {
        for (int h = 0; h < kHeads; ++h) g.scores[h * g.count + s] = dots[h] * scale;
      });
}

// Scores become weights that sum to 1 together with that of the sink, which is -Inf where there is none.
HR_INLINE void soften(float* scores, int64_t count, float sink) {
  float best = sink;
  for (int64_t s = 0; s < count; ++s) best = scores[s] > best ? scores[s] : best;
  F total{};
  for (int64_t s = 0; s < count; s += kLanes) {
    const int64_t n = smaller<int64_t>(count - s, kLanes);
    store_part(scores + s, vexp(load_part(scores + s, n) - best), n);
    total += load_part(scores + s, n);
  }
  const float share = 1.0f / (sum(total) + vexp(splat(sink - best))[0]);
  for (int64_t s = 0; s < count; ++s) scores[s] *= share;
}

// Elements [c, c + n) of the weighted values; n is at most V vectors, and whole ones but for V = 1.
template <int V, class T>
HR_INLINE void sum_part(const Gathered<T>& g, int64_t value_offset, int64_t value_dim, int64_t c, int64_t n, int64_t heads,
                        T* out) {
  F sums[kHeads][V]{};
  for (int64_t s = 0; s < g.count; ++s) {
    const T* value = g.keys[s] + value_offset + c;
    F v[V];
    HR_UNROLL for (int i = 0; i < V; ++i) v[i] = V > 1 || n == kLanes ? load(value + i * kLanes) : load_part(value, n);
    HR_UNROLL for (int h = 0; h < kHeads; ++h) {
      const F weight = splat(g.scores[h * g.count + s]);
      HR_UNROLL for (int i = 0; i < V; ++i) sums[h][i] = fma(v[i], weight, sums[h][i]);
    }
  }
  for (int64_t h = 0; h < heads; ++h)
    for (int i = 0; i < V; ++i) store_part(out + h * value_dim + c + i * kLanes, sums[h][i], V > 1 ? kLanes : n);
}

template <class T>
HR_INLINE void sum_values(const Gathered<T>& g, int64_t value_offset, int64_t value_dim, int64_t heads, T* out) {
  constexpr int64_t wide = kSide * kLanes;
  int64_t c = 0;
  for (; c + wide <= value_dim; c += wide) sum_part<kSide>(g, value_offset, value_dim, c, wide, heads, out);
  for (; c < value_dim; c += kLanes)
    sum_part<1>(g, value_offset, value_dim, c, smaller<int64_t>(value_dim - c, kLanes), heads, out);
}

// q [heads, width] and out [heads, value_dim], contiguous, of at most kHeads heads. The value of a vector lies value_offset
// behind it. sinks: a further score of each head, which weighs no value, or null. Without keys the result is 0.
template <class T>
HR_INLINE void attend_gathered(const Gathered<T>& g, const T* q, int64_t heads, float scale, const float* sinks,
                               int64_t value_offset, int64_t value_dim, T* out) {
  if (g.keys == nullptr) {
    for (int64_t i = 0; i < heads * value_dim; ++i) put(out + i, 0.0f);
    return;
  }
  for (int64_t h = 0; h < kHeads; ++h) keep_query<T>(g.q + h * g.stride, q + h * g.width, h < heads ? g.width : 0, g.stride);
  score_heads(g, scale);
  for (int64_t h = 0; h < kHeads; ++h)
    soften(g.scores + h * g.count, g.count, sinks != nullptr && h < heads ? sinks[h] : -__builtin_inff());
  sum_values(g, value_offset, value_dim, heads, out);
}

// How many of a list of positions are read: they come in rising order, -1 behind them.
HR_INLINE int64_t count_chosen(const int32_t* chosen, int64_t top_k, int64_t last) {
  int64_t count = 0;
  while (count < top_k && chosen[count] >= 0 && chosen[count] <= last) ++count;
  return count;
}

}  // namespace
