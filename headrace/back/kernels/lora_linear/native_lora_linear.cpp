// y += scale * B(A x) by a slot per row: op.py holds the definition.
//
// The rows of a slot are brought together in segments of at most kRows; a segment is multiplied by tiles of A (kRanks ranks)
// and then by tiles of B (kTile outputs), which so are read once per segment, from the cache for all its rows but the first.
// A row's sums are taken in the same order whatever is beside it: inputs by vectors, then ranks in order on top of y.

#include "../native/simd.h"

namespace {

constexpr int64_t kRows = 64;    // rows of a segment
constexpr int kRanks = 4;        // ranks whose sums are in registers at a time
constexpr int64_t kTile = 256;   // outputs of a chunk
constexpr int kVectors = 4;      // vectors of outputs in registers at a time

struct Segment {
  int64_t slot, first, count;  // `first` in the order of rows by slot
};

struct Lora {
  const void *x, *a, *b;
  void* y;
  const int32_t* order;  // row of each place
  const Segment* segments;
  const float* scale;
  const int32_t* rank;
  const float* turn;  // [slots, 2, outputs] or null
  const int64_t* parts;
  float* z;  // [places, num_parts * most]
  int64_t inputs, outputs, num_parts, most, x_stride, y_stride, rank_tiles, output_tiles;
};

// z of `ROWS` rows and the ranks of one tile.
template <class T, int ROWS>
HR_INLINE void shrink_rows(const Lora& p, const T* const* a, const int32_t* rows, float* const* z, int count, float scale) {
  using V = typename Dot<T>::V;
  constexpr int step = Dot<T>::step;
  const T* x[ROWS];
  for (int r = 0; r < ROWS; ++r) x[r] = static_cast<const T*>(p.x) + rows[r] * p.x_stride;
  F sums[ROWS][kRanks] = {};
  int64_t i = 0;
  for (; i + step <= p.inputs; i += step) {
    V w[kRanks];
    HR_UNROLL for (int k = 0; k < kRanks; ++k) w[k] = load_raw<V>(a[k] + i);
    HR_UNROLL for (int r = 0; r < ROWS; ++r) {
      const V v = load_raw<V>(x[r] + i);
      HR_UNROLL for (int k = 0; k < kRanks; ++k) sums[r][k] = Dot<T>::add(sums[r][k], w[k], v);
    }
  }
  if (i < p.inputs) {
    V w[kRanks];
    HR_UNROLL for (int k = 0; k < kRanks; ++k) w[k] = load_raw_part<V>(a[k] + i, p.inputs - i);
    HR_UNROLL for (int r = 0; r < ROWS; ++r) {
      const V v = load_raw_part<V>(x[r] + i, p.inputs - i);
      HR_UNROLL for (int k = 0; k < kRanks; ++k) sums[r][k] = Dot<T>::add(sums[r][k], w[k], v);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float four[kRanks];
    sum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], four);
    for (int k = 0; k < count; ++k) z[r][k] = four[k] * scale;
  }
}

template <class T>
void shrink(void* context, int64_t chunk) {
  const Lora& p = *static_cast<const Lora*>(context);
  const int64_t tile = chunk % p.rank_tiles, part = chunk / p.rank_tiles % p.num_parts;
  const Segment& s = p.segments[chunk / p.rank_tiles / p.num_parts];
  const int64_t rank = p.rank[s.slot * p.num_parts + part], first = tile * kRanks;
  if (first >= rank) return;
  const int count = int(smaller<int64_t>(kRanks, rank - first));
  const T* a[kRanks];
  const int64_t at = (s.slot * p.num_parts + part) * p.most + first;
  for (int k = 0; k < kRanks; ++k) a[k] = static_cast<const T*>(p.a) + (at + smaller(k, count - 1)) * p.inputs;
  const float scale = p.scale[s.slot * p.num_parts + part];
  float* z[4];
  for (int64_t r = 0; r < s.count;) {
    const int64_t place = s.first + r, left = s.count - r;
    for (int i = 0; i < 4; ++i) z[i] = p.z + ((place + i) * p.num_parts + part) * p.most + first;
    if (left >= 4) shrink_rows<T, 4>(p, a, p.order + place, z, count, scale), r += 4;
    else if (left >= 2) shrink_rows<T, 2>(p, a, p.order + place, z, count, scale), r += 2;
    else shrink_rows<T, 1>(p, a, p.order + place, z, count, scale), r += 1;
  }
}

// Outputs o .. o + `VECTORS` vectors (or the `count` left of one) of `ROWS` rows. `turn`: of the slot, or null.
template <class T, class Y, int ROWS, int VECTORS>
HR_INLINE void expand_rows(const Lora& p, const T* b, const float* turn, Y* const* y, const float* const* z, int64_t rank,
                           int64_t o, int64_t count) {
  F sums[ROWS][VECTORS];
  const bool whole = count >= VECTORS * kLanes;
  for (int r = 0; r < ROWS; ++r)
    HR_UNROLL for (int v = 0; v < VECTORS; ++v)
      sums[r][v] = whole ? load(y[r] + o + v * kLanes) : load_part(y[r] + o, count);
  if (turn != nullptr)
    HR_UNROLL for (int v = 0; v < VECTORS; ++v) {
      const float* at = turn + o + v * kLanes;
      const F factor = whole ? load(at) : load_part(at, count);
      const F shift = whole ? load(at + p.outputs) : load_part(at + p.outputs, count);
      HR_UNROLL for (int r = 0; r < ROWS; ++r) sums[r][v] = sums[r][v] * factor + shift;
    }
  for (int64_t j = 0; j < rank; ++j) {
    F w[VECTORS];
    const T* row = b + j * p.outputs + o;
    HR_UNROLL for (int v = 0; v < VECTORS; ++v) w[v] = whole ? load(row + v * kLanes) : load_part(row, count);
    HR_UNROLL for (int r = 0; r < ROWS; ++r)
      HR_UNROLL for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(w[v], z[r][j], sums[r][v]);
  }
  for (int r = 0; r < ROWS; ++r)
    HR_UNROLL for (int v = 0; v < VECTORS; ++v) {
      if (whole) store(y[r] + o + v * kLanes, sums[r][v]);
      else store_part(y[r] + o, sums[r][v], count);
    }
}

template <class T, class Y, int ROWS>
HR_INLINE void expand_span(const Lora& p, const Segment& s, int64_t r, int64_t part, int64_t begin, int64_t end) {
  const int64_t rank = p.rank[s.slot * p.num_parts + part];
  const T* b = static_cast<const T*>(p.b) + s.slot * p.most * p.outputs;
  const float* turn = p.turn == nullptr ? nullptr : p.turn + s.slot * 2 * p.outputs;
  Y* y[ROWS];
  const float* z[ROWS];
  for (int i = 0; i < ROWS; ++i) {
    const int64_t place = s.first + r + i;
    y[i] = static_cast<Y*>(p.y) + p.order[place] * p.y_stride;
    z[i] = p.z + (place * p.num_parts + part) * p.most;
  }
  int64_t o = begin;
  for (; o + kVectors * kLanes <= end; o += kVectors * kLanes)
    expand_rows<T, Y, ROWS, kVectors>(p, b, turn, y, z, rank, o, kVectors * kLanes);
  for (; o < end; o += kLanes) 
    expand_rows<T, Y, ROWS, 1>(p, b, turn, y, z, rank, o, smaller<int64_t>(kLanes, end - o));
}

template <class T, class Y>
void expand(void* context, int64_t chunk) {
  const Lora& p = *static_cast<const Lora*>(context);
  const Segment& s = p.segments[chunk / p.output_tiles];
  const int64_t tile = chunk % p.output_tiles * kTile, tile_end = smaller(tile + kTile, p.outputs);
  int64_t begin = 0;
  for (int64_t part = 0; part < p.num_parts; begin += p.parts[part++]) {
    const int64_t from = larger(tile, begin), end = smaller(tile_end, begin + p.parts[part]);
    if (from >= end || p.rank[s.slot * p.num_parts + part] == 0) continue;
    for (int64_t r = 0; r < s.count;) {
      if (s.count - r >= 4) expand_span<T, Y, 4>(p, s, r, part, from, end), r += 4;
      else if (s.count - r >= 2) expand_span<T, Y, 2>(p, s, r, part, from, end), r += 2;
      else expand_span<T, Y, 1>(p, s, r, part, from, end), r += 1;
    }
  }
}

// Rows by slot, those without one left out, into `order`, and their segments; how many of these, or -1 for a slot outside.
HR_INLINE int64_t arrange(const int32_t* slot, int64_t rows, int64_t slots, int32_t* count, int32_t* order, Segment* segments) {
  for (int64_t s = 0; s <= slots; ++s) count[s] = 0;
  for (int64_t t = 0; t < rows; ++t) {
    if (slot[t] < 0 || slot[t] > slots) return -1;
    ++count[slot[t]];
  }
  int64_t num_segments = 0;
  int32_t place = 0;
  for (int64_t s = 1; s <= slots; ++s) {
    const int64_t end = place + count[s];
    for (int64_t first = place; first < end; first += kRows)
      segments[num_segments++] = {s - 1, first, smaller(kRows, end - first)};
    count[s] = place;
    place = int32_t(end);
  }
  for (int64_t t = 0; t < rows; ++t)
    if (slot[t] > 0) order[count[slot[t]]++] = int32_t(t);
  return num_segments;
}

HR_INLINE int64_t aligned(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

template <class T>
HR_INLINE void run(Lora& p, int64_t segments, bool wide) {
  hr_parallel(shrink<T>, &p, segments * p.num_parts * p.rank_tiles);
  if (wide) hr_parallel(expand<T, float>, &p, segments * p.output_tiles);
  else hr_parallel(expand<T, T>, &p, segments * p.output_tiles);
}

}  // namespace

// x [rows, inputs], y [rows, outputs] with row strides in elements; slot int32 [rows]; a [slots, parts * most, inputs], b
// [slots, most, outputs], scale float32 and rank int32 [slots, parts]; turn float32 [slots, 2, outputs] or null; part_sizes
// int64 [parts]; y is of y_dtype: dtype, or float32.
HR_PUBLIC int32_t HR_EXPORT(lora_linear)(const void* x, void* y, const int32_t* slot, const void* a, const void* b,
                                         const float* scale, const int32_t* rank, const float* turn,
                                         const int64_t* part_sizes, int64_t rows, int64_t inputs, int64_t outputs,
                                         int64_t num_parts, int64_t most, int64_t slots, int64_t x_stride,
                                         int64_t y_stride, int32_t dtype, int32_t y_dtype) {
  if (rows < 0 || inputs < 1 || outputs < 1 || num_parts < 1 || most < 1 || slots < 1) return HR_BAD_SHAPE;
  if (dtype != HR_BF16 && dtype != HR_F16 && dtype != HR_F32) return HR_BAD_DTYPE;
  if (y_dtype != dtype && y_dtype != HR_F32) return HR_BAD_DTYPE;
  int64_t used = 0;  // ranks in use, at most
  for (int64_t i = 0; i < slots * num_parts; ++i) {
    if (rank[i] < 0 || rank[i] > most) return HR_BAD_INDEX;
    used = larger<int64_t>(used, rank[i]);
  }
  const int64_t counts = aligned((slots + 1) * 4), orders = aligned(rows * 4);
  const int64_t segment_bytes = aligned((rows + 1) * int64_t(sizeof(Segment)));
  char* memory = static_cast<char*>(hr_scratch(counts + orders + segment_bytes + (rows * num_parts * most + 64) * 4, 3));
  if (memory == nullptr) return HR_NO_MEMORY;
  auto* order = reinterpret_cast<int32_t*>(memory + counts);
  auto* segments = reinterpret_cast<Segment*>(memory + counts + orders);
  const int64_t num_segments = arrange(slot, rows, slots, reinterpret_cast<int32_t*>(memory), order, segments);
  if (num_segments < 0) return HR_BAD_INDEX;
  if (num_segments == 0 || used == 0) return HR_OK;
  auto* z = reinterpret_cast<float*>(memory + counts + orders + segment_bytes);
  Lora p{x, a, b, y, order, segments, scale, rank, turn, part_sizes, z, inputs, outputs, num_parts, most, x_stride, y_stride,
         ceil_div(used, kRanks), ceil_div(outputs, kTile)};
  const bool wide = y_dtype == HR_F32;
  if (dtype == HR_BF16) run<bf16>(p, num_segments, wide);
  else if (dtype == HR_F16) run<fp16>(p, num_segments, wide);
  else run<float>(p, num_segments, wide);
  return HR_OK;
}
HR_REPLAYABLE(lora_linear)
