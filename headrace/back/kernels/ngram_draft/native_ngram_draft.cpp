// Drafts by prompt lookup: op.py holds the definition.

#include "../native/simd.h"

namespace {

struct Place {
  int64_t match, end;  // of `end` -1: none
};

// The best of the places of `text` whose last tokens are those that `newest` points behind. Most places differ in their
// last token: they cost one comparison. `known`: how many tokens stand before `newest`.
HR_INLINE Place best_place(const int32_t* text, int64_t length, const int32_t* newest, int64_t known, int64_t most,
                           int64_t min_match, int64_t max_match) {
  const int32_t last = newest[-1];
  const int64_t longest = known < max_match ? known : max_match;
  Place best{min_match - 1, -1};
  for (int64_t end = 0; end < length - 1; ++end) {
    if (text[end] != last) continue;
    const int64_t limit = end + 1 < longest ? end + 1 : longest;
    int64_t match = 1;
    while (match < limit && text[end - match] == newest[-1 - match]) ++match;
    const bool whole = end + most < length;
    // Of equal places the latest that is whole; of those that are not the earliest, which was met first.
    if (match > best.match || (match == best.match && match >= min_match && whole)) best = {match, end};
  }
  return best;
}

}  // namespace

HR_PUBLIC int32_t HR_EXPORT(ngram_draft)(const int32_t* row, const int32_t* query_start, int32_t* tokens,
                                         const int32_t* length, int32_t* count, const int32_t* predicted,
                                         int64_t num_rows, int64_t table_rows, int64_t columns, int64_t min_match,
                                         int64_t max_match) {
  if (min_match < 1 || max_match < min_match) return HR_BAD_SHAPE;
  for (int64_t r = 0; r < num_rows; ++r) {
    if (row[r] < 0 || row[r] >= table_rows) return HR_BAD_INDEX;
    const int64_t most = int64_t(query_start[r + 1]) - query_start[r] - 1, known = length[row[r]];
    count[row[r]] = 0;
    if (most <= 0) continue;
    if (known < 1 || known + most > columns) return HR_BAD_INDEX;
    int32_t* mine = tokens + row[r] * columns;
    const int32_t* text = mine;
    int64_t size = known;
    Place place = best_place(mine, known, mine + known, known, most, min_match, max_match);
    int64_t behind = predicted ? predicted[row[r]] : 0;
    if (behind < 0 || behind > columns) return HR_BAD_INDEX;
    if (behind > 0 && known + most <= columns - behind) {
      const int32_t* other = mine + columns - behind;
      const Place there = best_place(other, behind, mine + known, known, most, min_match, max_match);
      if (there.end >= 0 && there.match >= place.match) text = other, size = behind, place = there;
    }
    if (place.end < 0) continue;
    const int64_t left = size - 1 - place.end, drafts = left < most ? left : most;
    for (int64_t i = 0; i < drafts; ++i) mine[known + i] = text[place.end + 1 + i];
    count[row[r]] = int32_t(drafts);
  }
  return HR_OK;
}
HR_REPLAYABLE(ngram_draft)
