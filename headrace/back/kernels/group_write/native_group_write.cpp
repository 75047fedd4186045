// The entries of groups, each made by the last of its tokens: a chunk is a token of the step.

#include "../native/group_entries.h"

namespace {

constexpr int64_t kMaxWidth = 4096;
constexpr int64_t kMaxGroup = 4096;

struct GroupWrite {
  const void* tokens;
  void* entries;
  const float *angles, *bias, *weight;
  const int32_t *start, *length, *table;
  Entries at;
  int64_t rows, table_stride, block_tokens, token_stride, width, group, series, gated, rotary, offset, pairs;
  float eps;
};

// The tokens of which elements of an entry are made: their values, and with gates the gates behind the values of all series.
template <class T>
struct Members {
  const T** at;  // [series * group]; with two series those of the group before come first
  int64_t first, count;  // of at: those before it are none
};

template <class T>
HR_INLINE Members<T> members(const GroupWrite& p, const TokenPlace& place, const T** at) {
  const int64_t count = p.series * p.group, begin = place.position + 1 - count, first = larger<int64_t>(0, -begin);
  const int32_t* blocks = p.table + place.row * p.table_stride;
  const int64_t width = p.series * p.width * (p.gated ? 2 : 1);
  for (int64_t s = first; s < count; ++s)
    at[s] = static_cast<const T*>(p.tokens) + blocks[(begin + s) / p.block_tokens] * p.token_stride +
            (begin + s) % p.block_tokens * width;
  return {at, first, count};
}

// Elements [e, e + n) of the mean of the values.
template <class T>
HR_INLINE F mean(const GroupWrite& p, const Members<T>& from, int64_t e, int64_t n) {
  F total{};
  for (int64_t s = 0; s < p.group; ++s) total += load_part(from.at[s] + e, n);
  return total / float(p.group);
}

// Elements [e, e + n) of the values, weighed by the softmax of their gates and biases. Of the former group the first series is
// read, of the own one the last.
template <class T>
HR_INLINE F weighed(const GroupWrite& p, const Members<T>& from, int64_t e, int64_t n) {
  const int64_t all = p.series * p.width;
  F best = splat(-__builtin_inff()), total{}, values{};
  for (int pass = 0; pass < 2; ++pass)
    for (int64_t s = from.first; s < from.count; ++s) {
      const int64_t column = s / p.group * p.width + e;
      const F gate = load_part(from.at[s] + all + column, n) + load_part(p.bias + s % p.group * all + column, n);
      if (pass == 0) {
        best = vmax(best, gate);
      } else {
        const F share = vexp(gate - best);
        total += share;
        values = fma(load_part(from.at[s] + column, n), share, values);
      }
    }
  return values / total;
}

// Elements [offset, offset + rotary) turned by a position's cosines, then sines.
HR_INLINE void turn(const GroupWrite& p, float* x, const float* cos) {
  const int64_t half = p.rotary / 2, step = p.pairs ? 2 : 1, apart = p.pairs ? 1 : half;
  const float* sin = cos + half;
  x += p.offset;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i * step], b = x[i * step + apart];
    x[i * step] = a * cos[i] - b * sin[i];
    x[i * step + apart] = b * cos[i] + a * sin[i];
  }
}

template <class T>
void write_entry(void* context, int64_t token) {
  const GroupWrite& p = *static_cast<const GroupWrite*>(context);
  const TokenPlace place = token_place(p.start, p.length, p.rows, token);
  if (place.row < 0 || (place.position + 1) % p.group) return;
  const T* at[2 * kMaxGroup];
  float entry[kMaxWidth + kLanes];
  const Members<T> from = members(p, place, at);
  F squares{};
  for (int64_t e = 0; e < p.width; e += kLanes) {
    const int64_t n = smaller<int64_t>(kLanes, p.width - e);
    store_part(entry + e, p.gated ? weighed(p, from, e, n) : mean(p, from, e, n), n);
    const F v = load_part(entry + e, n);
    squares = fma(v, v, squares);
  }
  if (p.weight != nullptr) {
    const float factor = 1.0f / __builtin_sqrtf(sum(squares) / float(p.width) + p.eps);
    for (int64_t e = 0; e < p.width; ++e) entry[e] *= factor * p.weight[e];
  }
  const int64_t group = place.position / p.group;
  if (p.rotary > 0) turn(p, entry, p.angles + group * p.group * p.rotary);
  T* to = entry_at(p.at, static_cast<T*>(p.entries), place.row, group, p.width);
  for (int64_t e = 0; e < p.width; ++e) put(to + e, entry[e]);
}

// Whether there are angles for every row's last position.
HR_INLINE bool angles_fit(const GroupWrite& p, int64_t angle_rows) {
  for (int64_t r = 0; p.rotary > 0 && r < p.rows; ++r)
    if (p.start[r + 1] > p.start[r] && p.length[r] > angle_rows) return false;
  return true;
}

}  // namespace

// tokens [blocks, block_tokens, series * width * (gated ? 2 : 1)], block b at b * token_stride; entries as native/group_entries.h
// says; table and entry_table: of the blocks of each row; angles float32 [angle_rows, rotary]; bias float32 [group, series *
// width] and weight float32 [width], or null.
HR_PUBLIC int32_t HR_EXPORT(group_write)(const void* tokens, void* entries, const float* angles, const float* bias,
                                         const float* weight, const int32_t* start, const int32_t* length, const int32_t* table,
                                         const int32_t* entry_table, int64_t rows, int64_t count, int64_t table_stride,
                                         int64_t entry_table_stride, int64_t num_blocks, int64_t num_entry_blocks,
                                         int64_t block_tokens, int64_t token_stride, int64_t entry_stride, int64_t angle_rows,
                                         int64_t width, int64_t group, int64_t series, int64_t rotary, int64_t offset,
                                         float eps, int32_t gated, int32_t pairs, int32_t dtype) {
  if (width < 1 || width > kMaxWidth || group < 1 || group > kMaxGroup || series < 1 || series > 2 || block_tokens < 1)
    return HR_BAD_SHAPE;
  if (rotary < 0 || rotary % 2 || offset < 0 || offset + rotary > width || (gated != 0) != (bias != nullptr) ||
      (series == 2 && !gated))
    return HR_BAD_SHAPE;
  GroupWrite p{tokens, entries, angles, bias, weight, start, length, table,
               entries_of(entry_table, entry_table_stride, num_entry_blocks, entry_stride, group, block_tokens), rows,
               table_stride, block_tokens, token_stride, width, group, series, gated, rotary, offset, pairs, eps};
  if (!rows_fit(start, length, table, rows, table_stride, count, block_tokens, num_blocks)) return HR_BAD_INDEX;
  if (!entries_fit(p.at, start, length, rows, count, block_tokens) || !angles_fit(p, angle_rows)) return HR_BAD_INDEX;
  if (dtype == HR_BF16) hr_parallel(write_entry<bf16>, &p, count);
  else if (dtype == HR_F16) hr_parallel(write_entry<fp16>, &p, count);
  else if (dtype == HR_F32) hr_parallel(write_entry<float>, &p, count);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(group_write)
