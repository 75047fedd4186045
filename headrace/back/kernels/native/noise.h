// The noise that tokens are sampled with, as gumbel/noise.py defines it: a function of (key, token id).
#pragma once

#include "simd.h"

namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
HR_INLINE uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// The stream that starts at key.
HR_INLINE uint64_t noise_bits(uint64_t key, int64_t id) { return mixed(key + (uint64_t(id) + 1) * 0x9E3779B97F4A7C15ull); }

HR_INLINE double exact_score(double z, uint64_t bits) {
  const double u = smaller((double(int64_t(bits >> 1)) + 0.5) * 0x1p-63, 1.0 - 0x1p-53);
  return z - __builtin_log(-__builtin_log1p(-u));
}

// At least what exact_score adds to z, without a logarithm: -log(-log1p(-u)) <= -log(u) <= (leading zeros of u's bits + 1)
// ln 2. The last summand is above the rounding of the bound, below anything that costs.
HR_INLINE double noise_bound(uint64_t bits) {
  const int zeros = bits == 0 ? 64 : __builtin_clzll(bits);
  return (zeros + 1) * 0.69314718055994531 + 1e-9;
}

}  // namespace
