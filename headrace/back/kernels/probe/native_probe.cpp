// Reads memory as fast as the machine gives it: the bound every kernel that streams weights is measured against.

#include "../native/simd.h"

namespace {

constexpr int64_t kChunkBytes = 256 * 1024;

struct Probe {
  const char* data;
  int64_t bytes;
  uint32_t* sums;
};

void chunk(void* context, int64_t i) {
  const Probe& p = *static_cast<const Probe*>(context);
  const int64_t end = smaller((i + 1) * kChunkBytes, p.bytes);
  U a{}, b{}, c{}, d{};
  for (int64_t at = i * kChunkBytes; at + 4 * int64_t(sizeof(U)) <= end; at += 4 * int64_t(sizeof(U))) {
    a ^= load_raw<U>(p.data + at);
    b ^= load_raw<U>(p.data + at + sizeof(U));
    c ^= load_raw<U>(p.data + at + 2 * sizeof(U));
    d ^= load_raw<U>(p.data + at + 3 * sizeof(U));
  }
  a ^= b ^ c ^ d;
  uint32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum ^= a[lane];
  p.sums[i] = sum;
}

}  // namespace

// Reads `bytes` at data on all threads of the pool; `sum` keeps the compiler from leaving the reads out.
HR_PUBLIC int32_t HR_EXPORT(probe)(const char* data, int64_t bytes, uint32_t* sum) {
  const int64_t chunks = ceil_div(bytes, kChunkBytes);
  Probe p{data, bytes, static_cast<uint32_t*>(hr_scratch(chunks * int64_t(sizeof(uint32_t))))};
  if (p.sums == nullptr) return HR_NO_MEMORY;
  hr_parallel(chunk, &p, chunks);
  *sum = 0;
  for (int64_t i = 0; i < chunks; ++i) *sum ^= p.sums[i];
  return HR_OK;
}
HR_REPLAYABLE(probe)
