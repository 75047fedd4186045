// Pictures made larger or smaller by a separable filter, in Pillow's whole numbers: weights of 22 bits, each pass
// rounded to uint8, horizontal before vertical. So the results are Pillow's to the bit (fast_resize.py has the weights).
//
// Sixteen rows lie side by side in the horizontal pass, so that one weight meets sixteen values; in the vertical pass the
// values of a row do. Plain loops that a compiler makes vectors of, once for each instruction set it knows.

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define EACH_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_ISA
#endif

namespace {

constexpr int kRows = 16;
constexpr int kStrip = 64;
constexpr int kBits = 22;
constexpr int32_t kHalf = 1 << (kBits - 1);

typedef uint8_t Bytes __attribute__((vector_size(kRows)));

inline uint8_t rounded(int32_t sum) {
  const int32_t value = sum >> kBits;
  return static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value);
}

inline Bytes loaded(const uint8_t* at) {
  Bytes bytes;
  __builtin_memcpy(&bytes, at, sizeof bytes);
  return bytes;
}

// Sixteen rows of sixteen become their columns: four rounds in which row i meets row i + 8.
inline void transpose(Bytes* rows) {
  for (int round = 0; round < 4; ++round) {
    Bytes met[kRows];
    for (int i = 0; i < kRows / 2; ++i) {
      const Bytes a = rows[i], b = rows[i + kRows / 2];
      met[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      met[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int i = 0; i < kRows; ++i) rows[i] = met[i];
  }
}

// rows rows of size bytes -> beside [size, kRows]; rows that are missing are zeros.
inline void lay_beside(const uint8_t* in, uint8_t* beside, int64_t rows, int64_t size) {
  int64_t i = 0;
  for (; i + kRows <= size; i += kRows) {
    Bytes tile[kRows] = {};
    for (int64_t r = 0; r < rows; ++r) tile[r] = loaded(in + r * size + i);
    transpose(tile);
    __builtin_memcpy(beside + i * kRows, tile, sizeof tile);
  }
  for (; i < size; ++i)
    for (int64_t r = 0; r < rows; ++r) beside[i * kRows + r] = in[r * size + i];
}

// One column of a channel for kRows rows: values [taps, 3, kRows].
inline Bytes column(const uint8_t* values, const int32_t* weight, int32_t taps) {
  int32_t sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = kHalf;
  for (int32_t t = 0; t < taps; ++t)
    for (int r = 0; r < kRows; ++r) sum[r] += weight[t] * values[t * 3 * kRows + r];
  Bytes bytes;
  for (int r = 0; r < kRows; ++r) bytes[r] = rounded(sum[r]);
  return bytes;
}

}  // namespace

// Rows that lie side by side.
extern "C" int64_t hr_resize_rows_beside() { return kRows; }

// in [height, width, 3] -> out [3, height, wide]; beside [width, 3, kRows] is scratch. first, count [wide]: the columns that make one; weight [wide, taps].
extern "C" EACH_ISA void hr_resize_rows(const uint8_t* in, uint8_t* out, uint8_t* beside, const int32_t* first,
                                        const int32_t* count, const int32_t* weight, int64_t height, int64_t width,
                                        int64_t wide, int64_t taps) {
  for (int64_t top = 0; top < height; top += kRows) {
    const int64_t rows = height - top < kRows ? height - top : kRows;
    lay_beside(in + top * width * 3, beside, rows, width * 3);
    for (int64_t left = 0; left < wide; left += kRows) {
      const int64_t columns = wide - left < kRows ? wide - left : kRows;
      for (int64_t c = 0; c < 3; ++c) {
        Bytes tile[kRows] = {};
        for (int64_t i = 0; i < columns; ++i) {
          const int64_t x = left + i;
          tile[i] = column(beside + (first[x] * 3 + c) * kRows, weight + x * taps, count[x]);
        }
        transpose(tile);
        uint8_t* place = out + (c * height + top) * wide + left;
        for (int64_t r = 0; r < rows; ++r) __builtin_memcpy(place + r * wide, &tile[r], static_cast<size_t>(columns));
      }
    }
  }
}

// in [3, height, width] -> out [3, high, width]. first, count [high]: the rows that make one; weight [high, taps].
extern "C" EACH_ISA void hr_resize_columns(const uint8_t* in, uint8_t* out, const int32_t* first, const int32_t* count,
                                           const int32_t* weight, int64_t height, int64_t width, int64_t high,
                                           int64_t taps) {
  for (int64_t c = 0; c < 3; ++c) {
    for (int64_t y = 0; y < high; ++y) {
      const uint8_t* rows = in + (c * height + first[y]) * width;
      uint8_t* row = out + (c * high + y) * width;
      for (int64_t left = 0; left < width; left += kStrip) {
        const int64_t columns = width - left < kStrip ? width - left : kStrip;
        int32_t sum[kStrip];
        for (int i = 0; i < kStrip; ++i) sum[i] = kHalf;
        for (int32_t t = 0; t < count[y]; ++t) {
          const int32_t w = weight[y * taps + t];
          const uint8_t* values = rows + t * width + left;
          if (columns == kStrip) {
            for (int i = 0; i < kStrip; ++i) sum[i] += w * values[i];
          } else {
            for (int64_t i = 0; i < columns; ++i) sum[i] += w * values[i];
          }
        }
        for (int64_t i = 0; i < columns; ++i) row[left + i] = rounded(sum[i]);
      }
    }
  }
}
