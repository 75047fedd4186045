// Masks and biases of a step's rows, in place: op.py holds the definition.

#include "../native/simd.h"

namespace {

constexpr int64_t kHeader = 8, kBiases = 0, kSuppressed = 1, kUntil = 2, kBanned = 3, kMasked = 4;

struct Masks {
  float* x;
  const int32_t *rules, *allowed, *grammar, *grammar_at, *tokens, *row, *position;
  int64_t width, x_stride, words, rule_words, columns;
};

// NaN and +Inf stay: they tell that the row has failed.
HR_INLINE float forbidden(float x) { return x < __builtin_inff() ? -__builtin_inff() : x; }

HR_INLINE void apply_mask(float* x, const int32_t* mask, int64_t width) {
  for (int64_t w = 0; w * 32 < width; ++w) {
    const uint32_t bits = uint32_t(mask[w]);
    if (bits == 0xffffffffu) continue;
    float* part = x + w * 32;
    const int64_t count = width - w * 32 < 32 ? width - w * 32 : 32;
    if (count == 32)
      for (int i = 0; i < 32; ++i) part[i] = (bits >> i) & 1u ? part[i] : forbidden(part[i]);
    else
      for (int64_t i = 0; i < count; ++i) part[i] = (bits >> i) & 1u ? part[i] : forbidden(part[i]);
  }
}

void one_row(void* context, int64_t k) {
  const Masks& p = *static_cast<const Masks*>(context);
  const int64_t row = p.row[k], position = p.position[k];
  const int32_t* rules = p.rules + row * p.rule_words;
  float* x = p.x + k * p.x_stride;
  if (rules[kMasked]) apply_mask(x, p.allowed + row * p.words, p.width);
  if (p.grammar_at != nullptr && p.grammar_at[k] >= 0)
    apply_mask(x, p.grammar + int64_t(p.grammar_at[k]) * p.words, p.width);
  const int32_t* at = rules + kHeader;
  for (int32_t i = 0; i < rules[kBiases]; ++i, at += 2) {
    float bias;
    __builtin_memcpy(&bias, at + 1, sizeof bias);
    x[at[0]] += bias;
  }
  if (position < rules[kUntil])
    for (int32_t i = 0; i < rules[kSuppressed]; ++i) x[at[i]] = forbidden(x[at[i]]);
  at += rules[kSuppressed];
  for (int32_t i = 0; i < rules[kBanned]; ++i) {
    const int64_t before = int64_t(at[0]) - 1;
    const int32_t* history = p.tokens + row * p.columns + position - before;
    int64_t same = 0;
    if (before <= position)
      while (same < before && history[same] == at[1 + same]) ++same;
    const int32_t last = at[1 + before];
    if (before <= position && same == before) x[last] = forbidden(x[last]);
    at += before + 2;
  }
}

// The entries of a row's rules lie within the row, and their ids within the vocabulary.
HR_INLINE bool sound(const int32_t* rules, int64_t rule_words, int64_t width) {
  const int64_t biases = rules[kBiases], suppressed = rules[kSuppressed];
  if (biases < 0 || suppressed < 0 || kHeader + 2 * biases + suppressed > rule_words) return false;
  const int32_t* at = rules + kHeader;
  for (int64_t i = 0; i < biases; ++i, at += 2)
    if (at[0] < 0 || at[0] >= width) return false;
  for (int64_t i = 0; i < suppressed; ++i, ++at)
    if (*at < 0 || *at >= width) return false;
  for (int32_t i = 0; i < rules[kBanned]; ++i) {
    const int64_t left = rules + rule_words - at;
    if (left < 1 || at[0] < 1 || at[0] >= left || at[at[0]] < 0 || at[at[0]] >= width) return false;
    at += at[0] + 1;
  }
  return true;
}

}  // namespace

// x [count, width] float32, row stride in elements; tables of `rows` rows, `masks` of grammars; grammar_at [count],
// null: the step has no masks.
HR_PUBLIC int32_t HR_EXPORT(logit_masks)(float* x, const int32_t* rules, const int32_t* allowed, const int32_t* grammar,
                                         const int32_t* grammar_at, const int32_t* tokens, const int32_t* row,
                                         const int32_t* position, int64_t count, int64_t width, int64_t x_stride,
                                         int64_t rows, int64_t masks, int64_t words, int64_t rule_words, int64_t columns) {
  if (count < 0 || width < 1 || words * 32 < width || rule_words < kHeader) return HR_BAD_SHAPE;
  for (int64_t k = 0; k < count; ++k) {
    if (row[k] < 0 || row[k] >= rows || position[k] < 0 || position[k] > columns) return HR_BAD_INDEX;
    if (grammar_at != nullptr && grammar_at[k] >= masks) return HR_BAD_INDEX;
    if (!sound(rules + row[k] * rule_words, rule_words, width)) return HR_BAD_INDEX;
  }
  Masks p{x, rules, allowed, grammar, grammar_at, tokens, row, position, width, x_stride, words, rule_words, columns};
  hr_parallel(one_row, &p, count);
  return HR_OK;
}
HR_REPLAYABLE(logit_masks)
