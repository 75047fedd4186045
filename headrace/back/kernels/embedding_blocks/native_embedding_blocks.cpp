// x[T,E] = rows ids[T] of a block-quantized table in panels (linear_blocks/layout.py), dequantized and rounded once.

#include "../native/block_panels.h"

namespace {

struct Lookup {
  const int64_t* ids;
  const uint8_t* panels;
  void* x;
  int64_t T, V, E, coding;
};

template <class C>
HR_INLINE int32_t value_at(const uint8_t* planes, int64_t o, int k) {
  constexpr int base = C::bits == 3 ? 2 : C::bits == 5 || C::bits == 6 ? 4 : C::bits;
  const int s = k / 4, per_plane = 8 / base, shift = s % per_plane * base;
  int32_t code = planes[s / per_plane * kPlane + o * 4 + k % 4] >> shift & ((1 << base) - 1);
  const uint8_t* high = planes + base * kPlane + o * 4 + k % 4;
  if (C::bits - base == 1) code |= (high[0] >> s & 1) << base;
  if (C::bits - base == 2) code |= (high[s / 4 * kPlane] >> (s % 4 * 2) & 3) << base;
  return (C::table ? levels_of<C>()[code & 15] : code) - C::offset;
}

template <class Scale>
HR_INLINE float scale_at(const uint8_t* p) {
  Scale v;
  __builtin_memcpy(&v, p, sizeof v);
  return to_float(v);
}

// In the order of operations of the format's own definition: code * scale - minimum, in float32.
template <class C, class Y>
void dequantize_row(const uint8_t* panel, int64_t o, Y* x, int64_t E) {
  constexpr int parts = C::sub < 32 ? 32 / C::sub : 1;
  for (; E > 0; E -= C::block, panel += super_bytes<C>()) {
    const float d = scale_at<typename C::Scale>(panel + o * C::scale_size);
    const float dmin = C::minimum ? scale_at<typename C::Scale>(panel + (kPanel + o) * 2) : 0;
    const uint8_t* group = panel + header_bytes<C>();
    for (int64_t g = 0; g < C::block / 32 && g * 32 < E; ++g, group += group_bytes<C>())
      for (int k = 0; k < smaller<int64_t>(32, E - g * 32); ++k, ++x) {
        const int h = k / C::sub;
        float scale = d, minimum = dmin;
        if (C::scaled_parts && h > 0) scale = scale_at<typename C::Scale>(panel + (h * kPanel + o) * C::scale_size);
        if (C::two_level) {
          scale *= float(int8_t(group[h * kPanel + o]));
          if (C::minimum) minimum *= float(int8_t(group[(parts + h) * kPanel + o]));
        }
        const float value = float(value_at<C>(group + scale_bytes<C>(), o, k)) * scale;
        put(x, C::minimum ? value - minimum : value);
      }
  }
}

template <class Y>
void look_up_row(void* context, int64_t t) {
  const Lookup& p = *static_cast<const Lookup*>(context);
  with_coding(p.coding, [&](auto coding) {
    using C = decltype(coding);
    const uint8_t* panel = p.panels + p.ids[t] / kPanel * ceil_div(p.E, int64_t(C::block)) * super_bytes<C>();
    dequantize_row<C>(panel, p.ids[t] % kPanel, static_cast<Y*>(p.x) + t * p.E, p.E);
  });
}

}  // namespace

// x is contiguous. An id outside [0, V) refuses the call before anything is read or written.
HR_PUBLIC int32_t HR_EXPORT(embedding_blocks)(const int64_t* ids, const uint8_t* panels, void* x, int64_t T, int64_t V,
                                              int64_t E, int64_t coding, int32_t dtype) {
  const int64_t block = block_of(coding);
  if (block == 0) return HR_BAD_DTYPE;
  if (T < 0 || V < 0 || E <= 0 || (block > x_group_of(coding) && E % block)) return HR_BAD_SHAPE;
  for (int64_t t = 0; t < T; ++t)
    if (ids[t] < 0 || ids[t] >= V) return HR_BAD_INDEX;
  Lookup p{ids, panels, x, T, V, E, coding};
  if (dtype == HR_BF16) hr_parallel(look_up_row<bf16>, &p, T);
  else if (dtype == HR_F16) hr_parallel(look_up_row<fp16>, &p, T);
  else if (dtype == HR_F32) hr_parallel(look_up_row<float>, &p, T);
  else return HR_BAD_DTYPE;
  return HR_OK;
}
HR_REPLAYABLE(embedding_blocks)
