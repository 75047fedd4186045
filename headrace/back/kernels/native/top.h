// The greatest results of each row, kept while a product is made: whole rows of results are never written.
//
// A chunk of outputs leaves its results in memory of its thread and `top_take` keeps the best `count` of each row; what the
// chunks have kept is merged in their order (`top_merge`). The order is that of op greedy: a NaN before all numbers, then
// greater values, among equal ones the lower output.
#pragma once

#include "simd.h"

namespace {

constexpr int64_t kTopRows = 64;       // of a product at once: their results of a chunk stay in the second-level cache
constexpr int64_t kTopOutputs = 1024;  // of a chunk, about

struct Top {
  int64_t count, rows, chunks;
  float* values;  // [chunks][rows][count], best first
  int64_t* ids;   // the same; -1 where a chunk has fewer outputs
};

// Of `count` values; NaN if one of them is NaN. Four accumulators: one would wait for its own last comparison.
HR_INLINE float greatest(const float* x, int64_t count) {
  float best = x[0];
  int64_t i = 0;
  if (count >= 4 * kLanes) {
    F top[4];
    I nan{};
    for (int j = 0; j < 4; ++j) top[j] = load(x);
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
      HR_UNROLL for (int j = 0; j < 4; ++j) {
        const F v = load(x + i + j * kLanes);
        top[j] = vmax(v, top[j]);
        nan = v != v ? ~I{} : nan;
      }
    }
    const F all = vmax(vmax(top[0], top[1]), vmax(top[2], top[3]));
    for (int lane = 0; lane < kLanes; ++lane) {
      if (nan[lane]) return __builtin_nanf("");
      if (all[lane] > best) best = all[lane];
    }
  }
  for (; i < count; ++i)
    if (x[i] > best || x[i] != x[i]) best = x[i];
  return best;
}

// Whether a value goes before another one of a lower output.
HR_INLINE bool beats(float value, float before) { return value > before || (value != value && before == before); }

// Puts a value among the `held` best of at most `count`, all of lower outputs; false: it is none of them.
HR_INLINE bool top_keep(float value, int64_t id, int64_t count, int64_t& held, float* values, int64_t* ids) {
  if (held == count && !beats(value, values[count - 1])) return false;
  int64_t at = held < count ? held++ : count - 1;
  for (; at > 0 && beats(value, values[at - 1]); --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
  values[at] = value, ids[at] = id;
  return true;
}

// The best of outputs first .. first + outputs of one row.
HR_INLINE void top_row(const float* x, int64_t outputs, int64_t first, int64_t count, float* values, int64_t* ids) {
  constexpr int64_t kStep = 4 * kLanes;
  int64_t held = 0;
  for (int64_t i = 0; i < outputs; i += kStep) {
    const int64_t step = smaller(kStep, outputs - i);
    if (held == count && !beats(greatest(x + i, step), values[count - 1])) continue;
    for (int64_t j = i; j < i + step; ++j) top_keep(x[j], first + j, count, held, values, ids);
  }
  for (; held < count; ++held) ids[held] = -1;
}

// What chunk number `chunk` keeps of its results [rows][stride], of outputs first .. first + outputs.
inline void top_take(const Top& top, int64_t chunk, const float* results, int64_t stride, int64_t first, int64_t outputs) {
  for (int64_t row = 0; row < top.rows; ++row) {
    const int64_t at = (chunk * top.rows + row) * top.count;
    top_row(results + row * stride, outputs, first, top.count, top.values + at, top.ids + at);
  }
}

// Memory of the calling thread for what the chunks keep; false: there is none.
HR_INLINE bool top_begin(Top& top) {
  const int64_t kept = top.chunks * top.rows * top.count;
  char* memory = static_cast<char*>(hr_scratch(kept * 12, 3));
  top.ids = reinterpret_cast<int64_t*>(memory), top.values = reinterpret_cast<float*>(memory + kept * 8);
  return memory != nullptr;
}

// The best of all chunks, row by row: ids and values [rows][count].
inline void top_merge(const Top& top, int64_t* ids, float* values) {
  for (int64_t row = 0; row < top.rows; ++row, ids += top.count, values += top.count) {
    int64_t held = 0;
    for (int64_t chunk = 0; chunk < top.chunks; ++chunk) {
      const int64_t at = (chunk * top.rows + row) * top.count;
      for (int64_t i = at; i < at + top.count && top.ids[i] >= 0; ++i)
        if (!top_keep(top.values[i], top.ids[i], top.count, held, values, ids)) break;
    }
  }
}

}  // namespace
