// The experts of a mixture with packed weights: as native_experts.cpp, by panels of 64 outputs as the linear layers of their
// forms multiply by them.
//
// Rows are prepared once as their form wants them (int8 values with scales, or floats with zeros behind), those of an expert
// side by side. Then a task is a panel of inner values of one expert, gates and ups; inner values are prepared likewise;
// then a task is a panel of outputs of all experts, one after another, so that a token's sum needs no other memory and has
// one order. A token's result does not depend on the others.

#include "../native/amx.h"
#include "../native/block_panels.h"
#include "../native/fp8.h"
#include "../native/mixture.h"
#include "../native/panel_product.h"

namespace {

constexpr int64_t kInt8Rows = 100, kFp8Rows = 101;  // forms beside the codings of blocks; e4m3 by groups is kFp8Rows + their inputs
constexpr int64_t kRows = 128;                      // pairs of an expert that meet a panel at once
constexpr int64_t kResults = kRows * kPanel;

// A matrix of one expert: its panels and their form.
struct Matrix {
  const uint8_t* panels;
  int64_t form;
};
struct Expert {
  Matrix gate, up, down;
};

// How rows are prepared for a form: int8 values in groups (0: one for all), or floats.
struct Preparation {
  int64_t K, group, stride, groups;
  bool is_float;
};

struct Mixture : SortedPairs {
  const void* x;
  const Expert* all;
  const float *up_bias, *down_bias;
  const int32_t* experts_of;
  const float* weights;
  void *y, *inner_values;
  const float* beside;
  void* left;
  int64_t tokens, slots, experts, width, inner;
  float clamp;
  int32_t activation;
  Preparation of_x, of_inner;
  char *rows, *inner_rows;  // prepared
  int32_t* place;           // [pairs]: where a pair stands in the order by expert; -1: it has none
  bool no_memory;
};

HR_INLINE bool is_fp8(int64_t form) { return form == kFp8Rows || form == kFp8Rows + 32 || form == kFp8Rows + 128; }

HR_INLINE int64_t bytes_of_panel(int64_t form, int64_t K) {
  if (form == kInt8Rows || is_fp8(form)) {
    const int64_t scales = form > kFp8Rows ? ceil_div(K, form - kFp8Rows) : 1;
    return scales * kPanel * 4 + ceil_div(K, int64_t(4)) * kPanel * 4;
  }
  int64_t bytes = 0;
  with_coding(form, [&](auto coding) {
    using C = decltype(coding);
    bytes = ceil_div(K, int64_t(C::block)) * super_bytes<C>();
  });
  return bytes;
}

// Rows of `bytes` a value, one after another, then scales and sums.
HR_INLINE int64_t facts_bytes(const Preparation& p, int64_t rows) { return ceil_div(rows * p.groups, int64_t(16)) * 64; }
HR_INLINE int64_t prepared_bytes(const Preparation& p, int64_t rows) {
  return ceil_div(rows * p.stride, int64_t(64)) * 64 + (p.is_float ? 0 : 3 * facts_bytes(p, rows));
}
HR_INLINE PanelRows prepared(const Preparation& p, char* memory, int64_t rows, int64_t first) {
  if (p.is_float) return {memory + first * p.stride, nullptr, nullptr, p.stride, 0};
  float* scales = reinterpret_cast<float*>(memory + ceil_div(rows * p.stride, int64_t(64)) * 64);
  int32_t* sums = reinterpret_cast<int32_t*>(scales + facts_bytes(p, rows) / 4);
  const int64_t each = p.group == 0 ? 1 : 2;  // sums of a group
  return {memory + first * p.stride, scales + first * p.groups, sums + first * p.groups * each, p.stride, p.groups};
}

template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

// How rows of K values of T are prepared for that form; false: there is no such form, or not of so many values.
template <class T>
HR_INLINE bool preparation(int64_t form, int64_t K, Preparation& p) {
  p = {K, 0, 0, 1, false};
  if (is_fp8(form)) {
    const int64_t size = kIsBf16<T> && HR_EXPORT(fp8_takes_bf16)() ? 2 : 4;
    p.is_float = true, p.stride = ceil_div(K, int64_t(32)) * 32 * size + 64;
    return true;
  }
  if (form != kInt8Rows) {
    const int64_t block = block_of(form);
    p.group = x_group_of(form);
    if (block == 0 || (block > p.group && K % block)) return false;
    p.groups = ceil_div(K, p.group);
  }
  p.stride = quantized_stride(p.group == 0 ? K : p.groups * p.group);
  return form != kInt8Rows || K <= 65536;  // 255 * 127 * K must stay below 2^31
}

template <class X, class T>
HR_INLINE void copy_floats(const T* from, int64_t K, X* to) {
  for (int64_t k = 0; k < ceil_div(K, int64_t(32)) * 32; k += kLanes)
    store(to + k, k + kLanes <= K ? load(from + k) : k < K ? load_part(from + k, K - k) : F{});
}

template <class T>
HR_INLINE void prepare(const Preparation& p, const T* from, char* memory, int64_t rows, int64_t at) {
  const PanelRows to = prepared(p, memory, rows, at);
  void* x = const_cast<void*>(to.x);
  if (p.is_float) {
    if (kIsBf16<T> && HR_EXPORT(fp8_takes_bf16)()) copy_floats(from, p.K, static_cast<bf16*>(x));
    else copy_floats(from, p.K, static_cast<float*>(x));
  } else if (p.group == 0) {
    quantize_row(from, p.K, static_cast<int8_t*>(x), const_cast<float*>(to.scales), const_cast<int32_t*>(to.sums));
  } else {
    quantize_groups(from, p.K, p.group, static_cast<int8_t*>(x), const_cast<float*>(to.scales), const_cast<int32_t*>(to.sums));
  }
}

// A token's values, once for each of its pairs.
template <class T>
void token_task(void* context, int64_t t) {
  const Mixture& p = *static_cast<const Mixture*>(context);
  const int64_t count = p.tokens * p.slots;
  int64_t own = 0;
  while (own < p.slots && p.place[t * p.slots + own] < 0) ++own;
  if (own == p.slots) return;
  const int64_t first = p.place[t * p.slots + own];
  prepare(p.of_x, static_cast<const T*>(p.x) + t * p.width, p.rows, count, first);
  const PanelRows from = prepared(p.of_x, p.rows, count, first);
  for (int64_t s = own + 1; s < p.slots; ++s) {
    if (p.place[t * p.slots + s] < 0) continue;
    const PanelRows to = prepared(p.of_x, p.rows, count, p.place[t * p.slots + s]);
    __builtin_memcpy(const_cast<void*>(to.x), from.x, size_t(p.of_x.stride));
    if (p.of_x.is_float) continue;
    const size_t facts = size_t(p.of_x.groups) * 4;
    __builtin_memcpy(const_cast<float*>(to.scales), from.scales, facts);
    __builtin_memcpy(const_cast<int32_t*>(to.sums), from.sums, p.of_x.group == 0 ? facts : 2 * facts);
  }
}

template <class T>
void inner_rows_task(void* context, int64_t i) {
  const Mixture& p = *static_cast<const Mixture*>(context);
  prepare(p.of_inner, static_cast<const T*>(p.inner_values) + i * p.inner, p.inner_rows, p.tokens * p.slots, i);
}

// results[count][64] of the rows from `first` on with panel j of a matrix.
template <class T>
HR_INLINE void product(const Preparation& how, const PanelRows& rows, const Matrix& w, int64_t j, int64_t count, float* results) {
  const uint8_t* panel = w.panels + j * bytes_of_panel(w.form, how.K);
  if (w.form == kInt8Rows) HR_EXPORT(int8_panel)(rows, how.K, panel, count, results);
  else if (is_fp8(w.form))
    HR_EXPORT(fp8_panel)(rows, how.K, w.form - kFp8Rows, panel, count, kIsBf16<T> && HR_EXPORT(fp8_takes_bf16)(), results);
  else HR_EXPORT(block_panel)(rows, how.K, w.form, panel, count, results);
}

// A panel of one expert's inner values.
template <class T>
void inner_task(void* context, int64_t i) {
  Mixture& p = *static_cast<Mixture*>(context);
  const int64_t panels = ceil_div(p.inner, kPanel), expert = p.used[i / panels], j = i % panels;
  const int64_t first = j * kPanel, left = smaller(kPanel, p.inner - first), all = p.tokens * p.slots;
  float* gates = static_cast<float*>(hr_scratch(2 * kResults * int64_t(sizeof(float)), 2));
  if (gates == nullptr) { p.no_memory = true; return; }
  float* ups = gates + kResults;
  const float* bias = p.up_bias ? p.up_bias + expert * 2 * p.inner + first : nullptr;
  for (int64_t begin = p.starts[expert]; begin < p.starts[expert + 1]; begin += kRows) {
    const int64_t count = smaller(kRows, p.starts[expert + 1] - begin);
    const PanelRows rows = prepared(p.of_x, p.rows, all, begin);
    product<T>(p.of_x, rows, p.all[expert].gate, j, count, gates);
    product<T>(p.of_x, rows, p.all[expert].up, j, count, ups);
    for (int64_t m = 0; m < count; ++m) {
      const int64_t pair = p.pairs[begin + m];
      T* to = static_cast<T*>(p.inner_values) + (begin + m) * p.inner + first;
      for (int64_t d = 0; d < left; d += kLanes) {
        const int64_t n = smaller<int64_t>(left - d, kLanes);
        F g = load(gates + m * kPanel + d), u = load(ups + m * kPanel + d);
        if (bias) g += load_part(bias + d, n), u += load_part(bias + p.inner + d, n);
        if (p.beside) {
          const float* more = p.beside + pair * 2 * p.inner + first + d;
          g += load_part(more, n), u += load_part(more + p.inner, n);
        }
        const F value = gated_act(p.activation, p.clamp, g, u);
        store_part(to + d, value, n);
        if (p.left) store_part(static_cast<T*>(p.left) + pair * p.inner + first + d, value, n);
      }
    }
  }
}

// A panel of the outputs of all tokens.
template <class T>
void output_task(void* context, int64_t j) {
  Mixture& p = *static_cast<Mixture*>(context);
  const int64_t first = j * kPanel, left = smaller(kPanel, p.width - first), all = p.tokens * p.slots;
  float* results = static_cast<float*>(hr_scratch((kResults + p.tokens * kPanel) * int64_t(sizeof(float)), 2));
  if (results == nullptr) { p.no_memory = true; return; }
  float* totals = results + kResults;
  __builtin_memset(totals, 0, size_t(p.tokens * kPanel) * sizeof(float));
  for (int64_t e = 0; e < p.num_used; ++e) {
    const int64_t expert = p.used[e];
    alignas(64) float bias[kPanel] = {};
    if (p.down_bias) __builtin_memcpy(bias, p.down_bias + expert * p.width + first, size_t(left) * sizeof(float));
    for (int64_t begin = p.starts[expert]; begin < p.starts[expert + 1]; begin += kRows) {
      const int64_t count = smaller(kRows, p.starts[expert + 1] - begin);
      product<T>(p.of_inner, prepared(p.of_inner, p.inner_rows, all, begin), p.all[expert].down, j, count, results);
      for (int64_t m = 0; m < count; ++m) {
        const int32_t pair = p.pairs[begin + m];
        float* total = totals + pair / p.slots * kPanel;
        const float weight = p.weights[pair];
        HR_UNROLL for (int64_t n = 0; n < kPanel; n += kLanes)
          store(total + n, load(total + n) + weight * (load(results + m * kPanel + n) + load(bias + n)));
      }
    }
  }
  for (int64_t t = 0; t < p.tokens; ++t) {
    T* y = static_cast<T*>(p.y) + t * p.width + first;
    for (int64_t d = 0; d < left; d += kLanes) store_part(y + d, load(totals + t * kPanel + d), smaller<int64_t>(left - d, kLanes));
  }
}

HR_INLINE bool alike(const Preparation& a, const Preparation& b) { return a.group == b.group && a.is_float == b.is_float; }

// Every expert's gates and ups read rows prepared alike, and so do all downs.
template <class T>
HR_INLINE bool take_forms(Mixture& p) {
  for (int64_t e = 0; e < p.experts; ++e) {
    const Expert& one = p.all[e];
    Preparation gate, up, down;
    if (!preparation<T>(one.gate.form, p.width, gate) || !preparation<T>(one.up.form, p.width, up)) return false;
    if (!preparation<T>(one.down.form, p.inner, down)) return false;
    if (e == 0) p.of_x = gate, p.of_inner = down;
    if (!alike(gate, p.of_x) || !alike(up, p.of_x) || !alike(down, p.of_inner)) return false;
  }
  return true;
}

template <class T>
int32_t run(Mixture& p) {
  if (!take_forms<T>(p)) return HR_BAD_SHAPE;
  const int64_t count = p.tokens * p.slots;
  const int64_t values = ceil_div(count * p.inner * int64_t(sizeof(T)), int64_t(64)) * 64;
  const int64_t sorted = pairs_bytes(count, p.experts), places = ceil_div(count, int64_t(16)) * 64;
  const int64_t of_x = prepared_bytes(p.of_x, count);
  char* memory = static_cast<char*>(hr_scratch(values + sorted + places + of_x + prepared_bytes(p.of_inner, count)));
  if (memory == nullptr) return HR_NO_MEMORY;
  p.inner_values = memory, memory += values;
  static_cast<SortedPairs&>(p) = sort_pairs(p.experts_of, count, p.experts, memory);
  p.place = reinterpret_cast<int32_t*>(memory + sorted);
  const int64_t kept = p.starts[p.experts];
  for (int64_t i = 0; i < count; ++i) p.place[i] = -1;
  for (int64_t i = 0; i < kept; ++i) p.place[p.pairs[i]] = int32_t(i);
  p.rows = memory + sorted + places, p.inner_rows = p.rows + of_x;
  hr_parallel(token_task<T>, &p, p.tokens);
  hr_parallel(inner_task<T>, &p, p.num_used * ceil_div(p.inner, kPanel));
  if (p.no_memory) return HR_NO_MEMORY;
  hr_parallel(inner_rows_task<T>, &p, kept);
  hr_parallel(output_task<T>, &p, ceil_div(p.width, kPanel));
  return p.no_memory ? HR_NO_MEMORY : HR_OK;
}

}  // namespace

// As `experts`, with `all` [experts] for up and down: panels of gates and ups [inner, width] and of downs [width, inner], each
// with the number of its form. beside, left: as there.
HR_PUBLIC int32_t HR_EXPORT(experts_quant)(const void* x, const void* all, const float* up_bias, const float* down_bias,
                                           const int32_t* experts_of, const float* weights, void* y, const float* beside,
                                           void* left, int64_t tokens, int64_t slots, int64_t experts, int64_t width, int64_t inner,
                                           float clamp, int32_t activation, int32_t dtype) {
  if (tokens < 0 || slots < 1 || experts < 1 || width < 1 || inner < 1) return HR_BAD_SHAPE;
  for (int64_t i = 0; i < tokens * slots; ++i)
    if (experts_of[i] < -1 || experts_of[i] >= experts) return HR_BAD_INDEX;
  if (tokens == 0) return HR_OK;
  Mixture p{};
  p.x = x, p.all = static_cast<const Expert*>(all), p.up_bias = up_bias, p.down_bias = down_bias;
  p.experts_of = experts_of, p.weights = weights, p.y = y, p.beside = beside, p.left = left, p.tokens = tokens, p.slots = slots, p.experts = experts;
  p.width = width, p.inner = inner, p.clamp = clamp, p.activation = activation;
  if (dtype == HR_BF16) return run<bf16>(p);
  if (dtype == HR_F16) return run<fp16>(p);
  if (dtype == HR_F32) return run<float>(p);
  return HR_BAD_DTYPE;
}
HR_REPLAYABLE(experts_quant)
