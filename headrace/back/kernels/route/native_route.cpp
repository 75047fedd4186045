// Which experts each token is sent to, and with which weights. The lower index wins among equals.

#include "../native/recurrent.h"

namespace {

constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxGroups = 64;
constexpr int64_t kTokensPerChunk = 16;
constexpr float kSumEps = 1e-20f;
enum : int32_t {
  kSigmoid = 1, kRenormalize = 2, kSoftmaxChosen = 4, kTopTwo = 8, kSharedGate = 16, kSparseMixer = 32, kChosenSigmoid = 64,
  kSqrtSoftplus = 128
};

struct Routes {
  const float *logits, *bias;
  int32_t* experts_of;
  float* weights;
  int64_t tokens, experts, columns, top_k, shared, groups, kept_groups;
  float scale, jitter;
  int32_t mode;
};

HR_INLINE float exponential(float x) { return vexp(splat(x))[0]; }
HR_INLINE float opened(float x) { return vsigmoid(splat(x))[0]; }

HR_INLINE void score_experts(const Routes& p, const float* logits, float* scores) {
  if (p.mode & (kSparseMixer | kChosenSigmoid)) {
    for (int64_t x = 0; x < p.experts; ++x) scores[x] = logits[x];
    return;
  }
  if (p.mode & kSqrtSoftplus) {
    for (int64_t x = 0; x < p.experts; ++x) scores[x] = __builtin_sqrtf(vsoftplus(splat(logits[x]))[0]);
    return;
  }
  if (p.mode & kSigmoid) {
    for (int64_t x = 0; x < p.experts; ++x) scores[x] = opened(logits[x]);
    return;
  }
  float top = -__builtin_inff(), total = 0;
  for (int64_t x = 0; x < p.experts; ++x) top = larger(logits[x], top);
  for (int64_t x = 0; x < p.experts; ++x) total += scores[x] = exponential(logits[x] - top);
  for (int64_t x = 0; x < p.experts; ++x) scores[x] /= total;
}

// The largest of choices[0, count), which becomes -Inf; the first where all are -Inf or NaN.
HR_INLINE int64_t take_best(float* choices, int64_t count) {
  int64_t best = 0;
  for (int64_t x = 1; x < count; ++x)
    if (choices[x] > choices[best] || choices[best] != choices[best]) best = x;
  choices[best] = -__builtin_inff();
  return best;
}

// -Inf outside the groups that are kept.
HR_INLINE void keep_groups(const Routes& p, float* choices) {
  const int64_t size = p.experts / p.groups;
  float worth[kMaxGroups];
  bool kept[kMaxGroups] = {};
  for (int64_t g = 0; g < p.groups; ++g) {
    float first = -__builtin_inff(), second = first;
    for (int64_t x = g * size; x < (g + 1) * size; ++x) {
      const float value = choices[x];
      if (value > first) second = first, first = value;
      else if (value > second) second = value;
    }
    worth[g] = p.mode & kTopTwo && size > 1 ? first + second : first;
  }
  for (int64_t i = 0; i < p.kept_groups; ++i) kept[take_best(worth, p.groups)] = true;
  for (int64_t x = 0; x < p.experts; ++x)
    if (!kept[x / size]) choices[x] = -__builtin_inff();
}

// Shares of the logits near the chosen one, of those not chosen before it.
HR_INLINE void weigh_near(const Routes& p, const float* logits, const int32_t* chosen, float* weights) {
  float left[kMaxExperts];
  for (int64_t x = 0; x < p.experts; ++x) left[x] = logits[x];
  for (int64_t k = 0; k < p.top_k; ++k) {
    const float top = left[chosen[k]];
    float total = 0;
    for (int64_t x = 0; x < p.experts; ++x) {
      const float size = logits[x] < 0 ? -logits[x] : logits[x];
      const bool is_far = (top - logits[x]) / larger(size, top) > 2 * p.jitter;
      if (!is_far) total += exponential(left[x] - top);
    }
    weights[k] = p.scale / total;
    left[chosen[k]] = -__builtin_inff();
  }
}

HR_INLINE void weigh(const Routes& p, const float* logits, const float* scores, const int32_t* chosen, float* weights) {
  float total = 0;
  if (p.mode & kSoftmaxChosen) {
    float top = -__builtin_inff();
    for (int64_t k = 0; k < p.top_k; ++k) top = larger(logits[chosen[k]], top);
    for (int64_t k = 0; k < p.top_k; ++k) total += weights[k] = exponential(logits[chosen[k]] - top);
  } else {
    const bool opens = p.mode & kChosenSigmoid;
    for (int64_t k = 0; k < p.top_k; ++k) total += weights[k] = opens ? opened(scores[chosen[k]]) : scores[chosen[k]];
    total = p.mode & kRenormalize ? total + kSumEps : 1.0f;
  }
  for (int64_t k = 0; k < p.top_k; ++k) weights[k] = weights[k] / total * p.scale;
}

void route_tokens(void* context, int64_t i) {
  const Routes& p = *static_cast<const Routes*>(context);
  const int64_t end = smaller((i + 1) * kTokensPerChunk, p.tokens), slots = p.top_k + p.shared;
  float scores[kMaxExperts], choices[kMaxExperts];
  for (int64_t t = i * kTokensPerChunk; t < end; ++t) {
    const float* logits = p.logits + t * p.columns;
    int32_t* chosen = p.experts_of + t * slots;
    float* weights = p.weights + t * slots;
    score_experts(p, logits, scores);
    for (int64_t x = 0; x < p.experts; ++x) choices[x] = p.bias ? scores[x] + p.bias[x] : scores[x];
    if (p.groups > 1) keep_groups(p, choices);
    for (int64_t k = 0; k < p.top_k; ++k) chosen[k] = int32_t(take_best(choices, p.experts));
    if (p.mode & kSparseMixer) weigh_near(p, logits, chosen, weights);
    else weigh(p, logits, scores, chosen, weights);
    for (int64_t s = 0; s < p.shared; ++s) {
      chosen[p.top_k + s] = int32_t(p.experts + s);
      weights[p.top_k + s] = p.mode & kSharedGate ? opened(logits[p.experts]) : 1.0f;
    }
  }
}

}  // namespace

// logits [tokens, columns], bias [experts] or null; experts_of and weights [tokens, top_k + shared], all contiguous.
HR_PUBLIC int32_t HR_EXPORT(route)(const float* logits, const float* bias, int32_t* experts_of, float* weights,
                                   int64_t tokens, int64_t experts, int64_t columns, int64_t top_k, int64_t shared,
                                   int64_t groups, int64_t kept_groups, float scale, float jitter, int32_t mode) {
  if (experts < 1 || experts > kMaxExperts || top_k < 1 || top_k > experts || shared < 0 || groups < 1 ||
      groups > kMaxGroups || experts % groups || kept_groups < 1 || kept_groups > groups || columns < experts)
    return HR_BAD_SHAPE;
  Routes p{logits, bias, experts_of, weights, tokens, experts, columns, top_k, shared, groups, kept_groups, scale, jitter, mode};
  hr_parallel(route_tokens, &p, ceil_div(tokens, kTokensPerChunk));
  return HR_OK;
}
HR_REPLAYABLE(route)
