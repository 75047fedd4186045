// Blocks as checkpoints hold them -> panels (layout.py). Bits are moved, no value is rounded: what the panels mean is bit for
// bit what the blocks mean. The layouts of the blocks are ggml's (ggml-common.h).
//
// A task is the rows of one panel, so that its bytes stay in the second-level cache while the rows fill it.

#include "../native/block_panels.h"

namespace {

// One group of 32 inputs, taken apart: values as the panels store them, and the second-level scales of its parts.
struct Group {
  uint8_t quantized[32];
  uint8_t scale[2], minimum[2];
};

HR_INLINE uint16_t half_at(const uint8_t* p) {
  uint16_t v;
  __builtin_memcpy(&v, p, 2);
  return v;
}

HR_INLINE void nibbles(const uint8_t* q, uint8_t* quantized) {
  for (int k = 0; k < 16; ++k) quantized[k] = q[k] & 15, quantized[16 + k] = q[k] >> 4;
}

HR_INLINE void fifth_bits(const uint8_t* q, uint8_t* quantized) {
  uint32_t bits;
  __builtin_memcpy(&bits, q, 4);
  for (int k = 0; k < 32; ++k) quantized[k] |= uint8_t((bits >> k & 1) << 4);
}

// The 6-bit scales and minima of Q4_K and Q5_K: 12 bytes for 8 groups.
HR_INLINE void six_bits(const uint8_t* s, int g, Group& group) {
  if (g < 4) {
    group.scale[0] = s[g] & 63, group.minimum[0] = s[g + 4] & 63;
  } else {
    group.scale[0] = uint8_t((s[g + 4] & 15) | (s[g - 4] >> 6 << 4));
    group.minimum[0] = uint8_t((s[g + 4] >> 4) | (s[g] >> 6 << 4));
  }
}

// The scale (and the minimum, as what is to be subtracted) of a whole block, as float16 bits.
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, Q8_0) { d = half_at(p), minimum = 0; }
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, Q4_0) { d = half_at(p), minimum = 0; }
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, Q4_1) {
  d = half_at(p), minimum = half_at(p + 2) ^ 0x8000;
}
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, Q5_0) { d = half_at(p), minimum = 0; }
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, Q5_1) {
  d = half_at(p), minimum = half_at(p + 2) ^ 0x8000;
}
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, Q2_K) {
  d = half_at(p + 80), minimum = half_at(p + 82);
}
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, Q3_K) { d = half_at(p + 108), minimum = 0; }
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, Q4_K) {
  d = half_at(p), minimum = half_at(p + 2);
}
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, Q5_K) {
  d = half_at(p), minimum = half_at(p + 2);
}
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, Q6_K) { d = half_at(p + 208), minimum = 0; }
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, IQ4_NL) { d = half_at(p), minimum = 0; }
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, IQ4_XS) { d = half_at(p), minimum = 0; }
// Levels are twice the numbers, so scales are half; 0, which has no half, is that of numbers below 2^-124, taken for 0.
HR_INLINE void read_header(const uint8_t* p, uint16_t& d, uint16_t& minimum, MXFP4) {
  d = uint16_t(p[0] == 0 ? 0 : p[0] - 1), minimum = 0;
}

// Group g of the block at p.
HR_INLINE void read_group(const uint8_t* p, int, Group& group, Q8_0) {
  for (int k = 0; k < 32; ++k) group.quantized[k] = p[2 + k] ^ 0x80;
}
HR_INLINE void read_group(const uint8_t* p, int, Group& group, Q4_0) { nibbles(p + 2, group.quantized); }
HR_INLINE void read_group(const uint8_t* p, int, Group& group, Q4_1) { nibbles(p + 4, group.quantized); }
HR_INLINE void read_group(const uint8_t* p, int, Group& group, Q5_0) {
  nibbles(p + 6, group.quantized);
  fifth_bits(p + 2, group.quantized);
}
HR_INLINE void read_group(const uint8_t* p, int, Group& group, Q5_1) {
  nibbles(p + 8, group.quantized);
  fifth_bits(p + 4, group.quantized);
}
HR_INLINE void read_group(const uint8_t* p, int g, Group& group, Q2_K) {
  const uint8_t* q = p + 16 + g / 4 * 32;
  for (int k = 0; k < 32; ++k) group.quantized[k] = q[k] >> (g % 4 * 2) & 3;
  for (int h = 0; h < 2; ++h) group.scale[h] = p[2 * g + h] & 15, group.minimum[h] = p[2 * g + h] >> 4;
}
HR_INLINE void read_group(const uint8_t* p, int g, Group& group, Q3_K) {
  const uint8_t *q = p + 32 + g / 4 * 32, *s = p + 96;
  for (int k = 0; k < 32; ++k) group.quantized[k] = uint8_t((q[k] >> (g % 4 * 2) & 3) | (p[k] >> g & 1) << 2);
  for (int h = 0; h < 2; ++h) {
    const int i = 2 * g + h, low = s[i % 8] >> (i / 8 * 4) & 15, high = s[8 + i % 4] >> (i / 4 * 2) & 3;
    group.scale[h] = uint8_t((low | high << 4) - 32);
  }
}
HR_INLINE void read_group(const uint8_t* p, int g, Group& group, Q4_K) {
  const uint8_t* q = p + 16 + g / 2 * 32;
  for (int k = 0; k < 32; ++k) group.quantized[k] = q[k] >> (g % 2 * 4) & 15;
  six_bits(p + 4, g, group);
}
HR_INLINE void read_group(const uint8_t* p, int g, Group& group, Q5_K) {
  const uint8_t *q = p + 48 + g / 2 * 32, *high = p + 16;
  for (int k = 0; k < 32; ++k) group.quantized[k] = uint8_t((q[k] >> (g % 2 * 4) & 15) | (high[k] >> g & 1) << 4);
  six_bits(p + 4, g, group);
}
HR_INLINE void read_group(const uint8_t* p, int g, Group& group, Q6_K) {
  const uint8_t *q = p + g / 4 * 64 + g % 2 * 32, *high = p + 128 + g / 4 * 32;
  for (int k = 0; k < 32; ++k)
    group.quantized[k] = uint8_t((q[k] >> (g % 4 / 2 * 4) & 15) | (high[k] >> (g % 4 * 2) & 3) << 4);
  for (int h = 0; h < 2; ++h) group.scale[h] = p[192 + 2 * g + h];
}
HR_INLINE void read_group(const uint8_t* p, int, Group& group, IQ4_NL) { nibbles(p + 2, group.quantized); }
HR_INLINE void read_group(const uint8_t* p, int g, Group& group, IQ4_XS) {
  nibbles(p + 8 + g * 16, group.quantized);
  const int low = p[4 + g / 2] >> (g % 2 * 4) & 15, high = p[2 + g / 4] >> (g % 4 * 2) & 3;
  group.scale[0] = uint8_t((low | high << 4) - 32);
}
HR_INLINE void read_group(const uint8_t* p, int, Group& group, MXFP4) {
  nibbles(p + 1, group.quantized);
  if (p[0] == 0) __builtin_memset(group.quantized, 0, 32);
}

// Writes the quantized values into the planes of one output (`w`: its word in the first plane). The inverse of
// load_quantized.
template <class C>
HR_INLINE void write_quantized(const uint8_t* quantized, uint8_t* w) {
  constexpr int base = C::bits == 3 ? 2 : C::bits == 5 || C::bits == 6 ? 4 : C::bits;
  uint32_t step[8];
  __builtin_memcpy(step, quantized, 32);
  auto put_word = [&](int plane, uint32_t word) { __builtin_memcpy(w + plane * kPlane, &word, 4); };
  if (base == 8)
    for (int s = 0; s < 8; ++s) put_word(s, step[s]);
  if (base == 4)
    for (int r = 0; r < 4; ++r) put_word(r, (step[2 * r] & 0x0f0f0f0f) | (step[2 * r + 1] & 0x0f0f0f0f) << 4);
  if (base == 2)
    for (int r = 0; r < 2; ++r) {
      uint32_t word = 0;
      for (int s = 0; s < 4; ++s) word |= (step[4 * r + s] & 0x03030303) << (2 * s);
      put_word(r, word);
    }
  if (C::bits - base == 1) {
    uint32_t word = 0;
    for (int s = 0; s < 8; ++s) word |= (step[s] >> base & 0x01010101) << s;
    put_word(base, word);
  }
  if (C::bits - base == 2)
    for (int r = 0; r < 2; ++r) {
      uint32_t word = 0;
      for (int s = 0; s < 4; ++s) word |= (step[4 * r + s] >> 4 & 0x03030303) << (2 * s);
      put_word(base + r, word);
    }
}

struct Packing {
  const uint8_t* source;
  const int64_t* rows;
  uint8_t* panels;
  int64_t count, first, row_bytes, blocks, block_bytes, coding;
  int64_t* bad;  // per panel: the lowest source row with a scale that is no number, or -1
};

template <class C>
HR_INLINE bool is_finite(uint16_t bits) { return C::scale_size == 1 ? bits < 254 : (bits & 0x7c00) != 0x7c00; }

// One source row as output `o` of a panel; false if a scale is NaN or Inf.
template <class C>
HR_INLINE bool pack_row(const Packing& p, const uint8_t* source, uint8_t* panel, int64_t o) {
  bool good = true;
  constexpr int parts = 32 / C::sub;
  for (int64_t i = 0; i < p.blocks; ++i, source += p.block_bytes, panel += super_bytes<C>()) {
    uint16_t d, minimum;
    read_header(source, d, minimum, C{});
    good = good && is_finite<C>(d) && is_finite<C>(minimum);
    __builtin_memcpy(panel + o * C::scale_size, &d, C::scale_size);
    if (C::minimum) __builtin_memcpy(panel + (kPanel + o) * 2, &minimum, 2);
    uint8_t* to = panel + header_bytes<C>();
    for (int g = 0; g < C::block / 32; ++g, to += group_bytes<C>()) {
      Group group;
      read_group(source, g, group, C{});
      for (int h = 0; C::two_level && h < parts; ++h) {
        to[h * kPanel + o] = group.scale[h];
        if (C::minimum) to[(parts + h) * kPanel + o] = group.minimum[h];
      }
      write_quantized<C>(group.quantized, to + scale_bytes<C>() + o * 4);
    }
  }
  return good;
}

template <class C>
HR_INLINE void pack_panel(const Packing& p, int64_t task) {
  const int64_t panel = p.first / kPanel + task;
  uint8_t* to = p.panels + panel * p.blocks * super_bytes<C>();
  const int64_t from = larger<int64_t>(panel * kPanel, p.first), end = smaller((panel + 1) * kPanel, p.first + p.count);
  for (int64_t row = from; row < end; ++row) {
    const int64_t source = p.rows[row - p.first];
    if (!pack_row<C>(p, p.source + source * p.row_bytes, to, row % kPanel) && p.bad[task] < 0) p.bad[task] = source;
  }
}

void pack_task(void* context, int64_t task) {
  const Packing& p = *static_cast<const Packing*>(context);
  with_coding(p.coding, [&](auto coding) {
    if constexpr (decltype(coding)::stored) pack_panel<decltype(coding)>(p, task);
  });
}

}  // namespace

// Packs rows[i] of the source (row r at r * row_bytes, `blocks` blocks of block_bytes each are read) as output first + i.
// source_rows bounds `rows`. A block scale that is NaN or Inf is packed as it is; *bad_row is then the row, else -1.
HR_PUBLIC int32_t HR_EXPORT(pack_blocks)(const uint8_t* source, const int64_t* rows, uint8_t* panels, int64_t* bad_row,
                                         int64_t source_rows, int64_t row_bytes, int64_t count, int64_t first,
                                         int64_t blocks, int64_t block_bytes, int64_t coding) {
  *bad_row = -1;
  if (count < 0 || first < 0 || blocks < 1 || blocks * block_bytes > row_bytes) return HR_BAD_SHAPE;
  if (!is_stored(coding)) return HR_BAD_DTYPE;
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= source_rows) return HR_BAD_INDEX;
  if (count == 0) return HR_OK;
  const int64_t tasks = (first + count - 1) / kPanel - first / kPanel + 1;
  int64_t* bad = static_cast<int64_t*>(hr_scratch(tasks * int64_t(sizeof(int64_t))));
  if (bad == nullptr) return HR_NO_MEMORY;
  for (int64_t i = 0; i < tasks; ++i) bad[i] = -1;
  Packing p{source, rows, panels, count, first, row_bytes, blocks, block_bytes, coding, bad};
  hr_parallel(pack_task, &p, tasks);
  for (int64_t i = 0; i < tasks && *bad_row < 0; ++i) *bad_row = bad[i];
  return HR_OK;
}
HR_REPLAYABLE(pack_blocks)
