// Calls the kernels of one instruction set without Python, and compares them with plain loops in double precision.
//
//   kernel_check LIBRARY ISA            checks everything; prints a line per check, exit status 1 on a difference
//   kernel_check LIBRARY ISA KERNEL     one call of that kernel on a fixed problem, for counting instructions
//
// For machines that have no Python here (an emulated CPU) and for valgrind.

#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace {

using std::vector;
enum { F32 = 0, BF16 = 1, F16 = 2 };

uint64_t state = 88172645463325252ull;
uint64_t next() { return state ^= state << 13, state ^= state >> 7, state ^= state << 17; }
float uniform() { return float(int64_t(next() >> 11)) / float(1ll << 52) - 1.0f; }

uint16_t bf16_bits(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
float bf16_value(uint16_t h) {
  uint32_t b = uint32_t(h) << 16;
  float x;
  memcpy(&x, &b, 4);
  return x;
}
// Halves between 2^-14 and 65504 only: what the checks use.
uint16_t f16_bits(float x) {
  int e;
  const float m = frexpf(fabsf(x), &e);
  if (x == 0 || e < -13) return 0;
  return uint16_t((x < 0) << 15 | (((e + 14) << 10) + int(lrintf(m * 2048.0f)) - 1024));
}
float f16_value(uint16_t h) {
  if (!(h & 0x7fff)) return 0;
  return (h >> 15 ? -1.0f : 1.0f) * ldexpf(float((h & 1023) + 1024), ((h >> 10) & 31) - 25);
}

// Random numbers in one of the types, and what they are exactly.
struct Values {
  vector<char> bytes;
  vector<double> exact;
  Values(int64_t n, int type) : bytes(size_t(n) * (type == F32 ? 4 : 2)), exact(size_t(n)) {
    for (int64_t i = 0; i < n; ++i) {
      const float x = uniform();
      if (type == F32) memcpy(&bytes[i * 4], &x, 4), exact[i] = x;
      const uint16_t h = type == BF16 ? bf16_bits(x) : f16_bits(x);
      if (type != F32) memcpy(&bytes[i * 2], &h, 2), exact[i] = type == BF16 ? bf16_value(h) : f16_value(h);
    }
  }
};

void* library;
std::string isa;
bool failed = false;

template <class Function>
Function kernel(const char* name) {
  void* symbol = dlsym(library, ("hr_" + std::string(name) + "_" + isa).c_str());
  if (symbol == nullptr) printf("%s: missing in %s\n", name, isa.c_str()), exit(2);
  return reinterpret_cast<Function>(symbol);
}

void compare(const char* what, int detail, const vector<float>& ours, const vector<double>& exact, double bound) {
  double error = 0, scale = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    error = fmax(error, std::isfinite(ours[i]) ? fabs(ours[i] - exact[i]) : INFINITY);
    scale = fmax(scale, fabs(exact[i]));
  }
  const bool good = error <= bound * scale;
  failed = failed || !good;
  printf("%s %d: error %.2e of at most %.2e%s\n", what, detail, error / scale, bound, good ? "" : "  DIFFERS");
}

using Linear = int32_t (*)(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t,
                           int64_t, int32_t, int32_t);
void check_linear(int type, int64_t M, int64_t N, int64_t K) {
  Values x(M * K, type), w(N * K, type);
  vector<float> y(size_t(M * N), NAN);
  vector<double> exact(size_t(M * N), 0);
  const int status = kernel<Linear>("linear")(x.bytes.data(), w.bytes.data(), nullptr, y.data(), M, N, K, K, K, N, type, F32);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n)
      for (int64_t k = 0; k < K; ++k) exact[m * N + n] += x.exact[m * K + k] * w.exact[n * K + k];
  if (status) y[0] = NAN;
  compare("linear", type, y, exact, 2e-6);
}

using LinearFp8 = int32_t (*)(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t,
                              int64_t, int32_t, int32_t, int32_t);
using Linear8 = int32_t (*)(const void*, const void*, const void*, void*, const int32_t*, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int32_t, float, float, int32_t, int32_t);
using Pack8 = int32_t (*)(const void*, uint8_t*, int64_t, int64_t, int64_t, int32_t);
// Weights are e4m3 numbers already, and the largest of each output is 448: they are packed without rounding.
void check_fp8(int type, int64_t M, int64_t N, int64_t K, bool compared) {
  Values x(M * K, type);
  vector<float> w(size_t(N * K)), y(size_t(M * N), NAN);
  vector<uint8_t> panels(size_t((N + 63) / 64 * (256 + (K + 3) / 4 * 256)));
  for (int64_t i = 0; i < N * K; ++i) {
    const int code = i % K == 0 ? 126 : int(next() >> 40) % 127, exponent = code >> 3;
    w[i] = ldexpf(float((code & 7) + (exponent ? 8 : 0)), (exponent ? exponent : 1) - 10) * (next() >> 40 & 1 ? -1 : 1);
  }
  int status = kernel<Pack8>("quantize_fp8")(w.data(), panels.data(), N, K, K, F32);
  status |= kernel<LinearFp8>("linear_fp8")(x.bytes.data(), panels.data(), nullptr, y.data(), M, N, K, 0, K, N, -1, type, F32);
  if (!compared) return;
  vector<double> exact(size_t(M * N), 0);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n)
      for (int64_t k = 0; k < K; ++k) exact[m * N + n] += x.exact[m * K + k] * w[n * K + k];
  if (status) y[0] = NAN;
  compare("linear_fp8", type, y, exact, 2e-6);
}

// Whole numbers up to 127, which is the largest of each row of x and of each output: quantized values without rounding,
// exact results.
void check_int8(int type, int64_t M, int64_t N, int64_t K, bool compared) {
  const auto whole = [&](int64_t i) { return i % K == 0 ? 127.0f : float(int(next() % 255) - 127); };
  vector<float> x(size_t(M * K)), w(size_t(N * K)), y(size_t(M * N), NAN);
  for (int64_t i = 0; i < M * K; ++i) x[i] = whole(i);
  for (int64_t i = 0; i < N * K; ++i) w[i] = whole(i);
  vector<uint16_t> halves;
  for (float value : x) halves.push_back(type == BF16 ? bf16_bits(value) : f16_bits(value));
  const void* given = type == F32 ? static_cast<const void*>(x.data()) : halves.data();
  vector<uint8_t> panels(size_t((N + 63) / 64 * (256 + (K + 3) / 4 * 256)));
  int status = kernel<Pack8>("quantize")(w.data(), panels.data(), N, K, K, F32);
  status |= kernel<Linear8>("linear_quant")(given, panels.data(), nullptr, y.data(), nullptr, M, N, K, K, N, -1, 0, 0,
                                             type, F32);
  if (!compared) return;
  vector<double> exact(size_t(M * N), 0);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n)
      for (int64_t k = 0; k < K; ++k) exact[m * N + n] += double(x[m * K + k]) * w[n * K + k];
  if (status) y[0] = NAN;
  compare("linear_quant", type, y, exact, 2e-6);
}

// Block codings as layout.py numbers them: inputs of a block, its bytes, where its float16 scales stand, panel bytes.
struct Coding {
  int block, size, halves[2], panel_block;
};
const Coding kCodings[] = {
    {32, 34, {0, 0}, 128 + 2048},         {32, 18, {0, 0}, 128 + 1024},
    {32, 20, {0, 2}, 256 + 1024},         {32, 22, {0, 0}, 128 + 1280},
    {32, 24, {0, 2}, 256 + 1280},         {256, 84, {80, 82}, 256 + 8 * (256 + 512)},
    {256, 110, {108, 108}, 128 + 8 * (128 + 768)}, {256, 144, {0, 2}, 256 + 8 * (128 + 1024)},
    {256, 176, {0, 2}, 256 + 8 * (128 + 1280)},    {256, 210, {208, 208}, 128 + 8 * (128 + 1536)},
    {32, 18, {0, 0}, 128 + 1024},         {256, 136, {0, 0}, 128 + 8 * (64 + 1024)},
};
struct Segment {
  const uint8_t* panels;
  int64_t outputs, coding;
};
using Pack = int32_t (*)(const uint8_t*, const int64_t*, uint8_t*, int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t);
using Embed = int32_t (*)(const int64_t*, const uint8_t*, void*, int64_t, int64_t, int64_t, int64_t, int32_t);
using Blocks = int32_t (*)(const void*, const Segment*, const void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t,
                           int32_t, int32_t, int32_t);

// Inputs are whole numbers of which 127 is the largest of each 32: they become int8 without rounding.
void check_blocks(int coding, int64_t M, int64_t N, int64_t K, bool compared) {
  const Coding& c = kCodings[coding];
  const int64_t row_bytes = K / c.block * c.size;
  vector<uint8_t> raw(size_t(N * row_bytes)), panels(size_t((N + 63) / 64 * (K / c.block) * c.panel_block));
  for (uint8_t& byte : raw) byte = uint8_t(next() >> 20);
  for (int64_t i = 0; i < N * K / c.block; ++i)
    for (int at : c.halves) {
      const uint16_t h = f16_bits(uniform() / 64);
      memcpy(&raw[size_t(i * c.size + at)], &h, 2);
    }
  vector<int64_t> rows;
  for (int64_t n = 0; n < N; ++n) rows.push_back(n);
  int64_t bad = 0;
  int status = kernel<Pack>("pack_blocks")(raw.data(), rows.data(), panels.data(), &bad, N, row_bytes, N, 0, K / c.block,
                                           c.size, coding);
  vector<float> w(size_t(N * K)), x(size_t(M * K)), y(size_t(M * N), NAN);
  for (int64_t i = 0; i < M * K; ++i) x[i] = i % 32 == 0 ? 127.0f : float(int(next() % 255) - 127);
  const Segment segment{panels.data(), N, coding};
  status |= kernel<Blocks>("linear_blocks")(x.data(), &segment, nullptr, y.data(), M, K, K, N, 1, -1, F32, F32);
  if (!compared) return;
  status |= kernel<Embed>("embedding_blocks")(rows.data(), panels.data(), w.data(), N, N, K, coding, F32);
  vector<double> exact(size_t(M * N), 0);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n)
      for (int64_t k = 0; k < K; ++k) exact[m * N + n] += double(x[m * K + k]) * w[n * K + k];
  if (status || bad != -1) y[0] = NAN;
  compare("linear_blocks", coding, y, exact, 2e-5);
}

using Attention = int32_t (*)(const void*, const void*, void*, const int32_t*, const int32_t*, const int32_t*,
                              const float*, const float*, const float*, const float*, float*, int64_t, int64_t, int64_t,
                              int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                              int64_t, int64_t, float, float, int32_t, int32_t);
using Write = int32_t (*)(const void*, const void*, int8_t*, const int64_t*, const float*, int64_t, int64_t, int64_t, int64_t, int64_t,
                          int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int32_t, int32_t);

// One decode row of 4 query heads, each with a sink and, if compared, a slope of ALiBi, and 2 KV heads over `length` tokens;
// form 1, 2: int8, e4m3 cache.
void check_attention(int type, int form, int64_t length, bool compared) {
  const int64_t H = 4, KV = 2, D = 72, B = 16, blocks = (length + B - 1) / B, width = form ? D + 4 : D;
  const int64_t size = form ? 1 : type == F32 ? 4 : 2;
  Values q(H * D, type), k(length * KV * D, type), v(length * KV * D, type);
  vector<char> cache(size_t(blocks * 2 * KV * B * width * size));
  const int64_t item = int64_t(k.bytes.size()) / (length * KV * D);
  vector<int64_t> slots;
  for (int64_t t = 0; t < length; ++t) slots.push_back(t);
  int status = 0;
  if (form)
    status = kernel<Write>("kv_write_quantized")(k.bytes.data(), v.bytes.data(), reinterpret_cast<int8_t*>(cache.data()),
                                            slots.data(), nullptr, length, KV, D, B, blocks, KV * D, D, KV * D, D,
                                            2 * KV * B * width, KV * B * width, B * width, type, form);
  else
    for (int64_t t = 0; t < length; ++t)
      for (int64_t h = 0; h < KV; ++h) {
        char* to = &cache[size_t(((t / B * 2 * KV + h) * B + t % B) * D * size)];
        memcpy(to, &k.bytes[size_t((t * KV + h) * D * item)], size_t(D * item));
        memcpy(to + KV * B * D * size, &v.bytes[size_t((t * KV + h) * D * item)], size_t(D * item));
      }
  vector<int32_t> table;
  for (int64_t b = 0; b < blocks; ++b) table.push_back(int32_t(b));
  const int32_t starts[] = {0, 1}, lengths[] = {int32_t(length)};
  vector<char> out(size_t(H * D) * (type == F32 ? 4 : 2));
  vector<float> lse(size_t(H), NAN);
  const float scale = 1.0f / sqrtf(float(D)), sinks[] = {0.5f, -1.0f, 3.0f, 0.0f};
  const float slopes[] = {0.0f, 0.02f, 0.25f, 0.001f};
  status |= kernel<Attention>("attention")(q.bytes.data(), cache.data(), out.data(), starts, lengths, table.data(),
                                           sinks, compared ? slopes : nullptr, nullptr, nullptr, lse.data(), 0, 0, 1, blocks, 1, blocks, H, KV, D, B, H * D, D, 2 * KV * B * width, KV * B * width,
                                           B * width, 0, scale, 0, type, form);
  if (!compared) return;
  vector<double> exact(size_t(H * D), 0), exact_lse;
  vector<float> ours;
  for (int64_t h = 0; h < H; ++h) {
    vector<double> weight;
    double total = exp(sinks[h]);
    for (int64_t t = 0; t < length; ++t) {
      double dot = 0;
      for (int64_t d = 0; d < D; ++d) dot += q.exact[h * D + d] * k.exact[(t * KV + h / 2) * D + d];
      weight.push_back(exp(dot * scale + double(slopes[h]) * double(t + 1 - length))), total += weight.back();
    }
    exact_lse.push_back(log(total));
    for (int64_t t = 0; t < length; ++t)
      for (int64_t d = 0; d < D; ++d) exact[h * D + d] += weight[t] / total * v.exact[(t * KV + h / 2) * D + d];
  }
  for (int64_t i = 0; i < H * D; ++i) {
    float x;
    uint16_t half;
    if (type == F32) memcpy(&x, &out[size_t(i) * 4], 4);
    else memcpy(&half, &out[size_t(i) * 2], 2), x = type == BF16 ? bf16_value(half) : f16_value(half);
    ours.push_back(status ? NAN : x);
  }
  const double rounding = type == F32 ? 1e-5 : type == BF16 ? 6e-3 : 2e-3;
  const char* names[] = {"attention", "attention, int8 cache", "attention, e4m3 cache"};
  const double bounds[] = {rounding, 2e-2, 6e-2};
  compare(names[form], type, ours, exact, bounds[form]);
  compare("attention, log-sum-exp", type, lse, exact_lse, bounds[form]);
}

using Gated = int32_t (*)(const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int32_t,
                          int32_t);
using Top = int32_t (*)(const void*, const void*, int64_t*, float*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                        int32_t);
using NormQuantized = int32_t (*)(const void*, void*, const float*, int8_t*, float*, int32_t*, int64_t, int64_t, int64_t,
                              int64_t, int64_t, int64_t, float, float, float, int32_t);

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) return printf("%s\n", dlerror()), 2;
  isa = argv[2];
  if (argc == 4) {
    const std::string name = argv[3];
    const int64_t K = 1024, N = 512;
    if (name == "linear") {
      Values x(K, BF16), w(N * K, BF16);
      vector<float> y(size_t(N), 0);
      return kernel<Linear>("linear")(x.bytes.data(), w.bytes.data(), nullptr, y.data(), 1, N, K, K, K, N, BF16, F32);
    }
    if (name == "linear_fp8") return check_fp8(BF16, 1, N, K, false), 0;
    if (name == "linear_quant") return check_int8(BF16, 1, N, K, false), 0;
    if (name == "linear_gated" || name == "linear_top") {
      Values x(K, BF16), w(N * K, BF16);
      vector<float> y(size_t(N), 0);
      int64_t best = 0;
      if (name == "linear_top")
        return kernel<Top>("linear_top")(x.bytes.data(), w.bytes.data(), &best, y.data(), 1, N, K, K, K, 1, BF16);
      return kernel<Gated>("linear_gated")(x.bytes.data(), w.bytes.data(), y.data(), 1, N, K, K, K, N, 0, BF16);
    }
    if (name == "rms_norm_quantized") {
      Values x(K, BF16);
      vector<float> weight(size_t(K), 1), scales(size_t(K / 32), 0);
      vector<int8_t> quantized(size_t(K + 64), 0);
      vector<int32_t> sums(size_t(K / 16), 0);
      return kernel<NormQuantized>("rms_norm_quantized")(x.bytes.data(), nullptr, weight.data(), quantized.data(), scales.data(),
                                                 sums.data(), 1, K, K, 0, K + 64, 32, 1e-6f, 0, 0, BF16);
    }
    if (name == "attention") return check_attention(BF16, 0, 512, false), 0;
    if (name == "attention_int8") return check_attention(BF16, 1, 512, false), 0;
    if (name == "attention_fp8") return check_attention(BF16, 2, 512, false), 0;
    return check_blocks(std::stoi(name), 1, N, K, false), 0;
  }
  for (int type : {F32, BF16, F16}) {
    check_linear(type, 3, 37, 100), check_linear(type, 1, 64, 256);
    check_fp8(type, 3, 70, 101, true);
    check_int8(type, 3, 70, 101, true), check_int8(type, 200, 130, 68, true);
    for (int form = 0; form < 3; ++form) check_attention(type, form, 100, true);
  }
  for (int coding = 0; coding < 12; ++coding) check_blocks(coding, 3, 70, 512, true);
  return failed ? 1 : 0;
}
