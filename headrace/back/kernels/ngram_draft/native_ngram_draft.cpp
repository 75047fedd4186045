// Drafts by prompt lookup: op.py holds the definition.

#include "../native/simd.h"

namespace {

// The last token of the best earlier place, or -1. Most places differ in their last token: they cost one comparison.
HR_INLINE int64_t best_place(const int32_t* tokens, int64_t length, int64_t most, int64_t min_match, int64_t max_match) {
  const int32_t newest = tokens[length - 1];
  int64_t best = min_match - 1, place = -1;
  for (int64_t end = 0; end < length - 1; ++end) {
    if (tokens[end] != newest) continue;
    const int64_t limit = end + 1 < max_match ? end + 1 : max_match;
    int64_t match = 1;
    while (match < limit && tokens[end - match] == tokens[length - 1 - match]) ++match;
    const bool whole = end + most < length;
    // Of equal places the latest that is whole; of those that are not the earliest, which was met first.
    if (match > best || (match == best && match >= min_match && whole)) {
      best = match;
      place = end;
    }
  }
  return place;
}

}  // namespace

HR_PUBLIC int32_t HR_EXPORT(ngram_draft)(const int32_t* row, const int32_t* query_start, int32_t* tokens,
                                         const int32_t* length, int32_t* count, int64_t num_rows, int64_t table_rows,
                                         int64_t columns, int64_t min_match, int64_t max_match) {
  if (min_match < 1 || max_match < min_match) return HR_BAD_SHAPE;
  for (int64_t r = 0; r < num_rows; ++r) {
    if (row[r] < 0 || row[r] >= table_rows) return HR_BAD_INDEX;
    const int64_t most = int64_t(query_start[r + 1]) - query_start[r] - 1, known = length[row[r]];
    count[row[r]] = 0;
    if (most <= 0) continue;
    if (known < 1 || known + most > columns) return HR_BAD_INDEX;
    int32_t* mine = tokens + row[r] * columns;
    const int64_t place = best_place(mine, known, most, min_match, max_match);
    if (place < 0) continue;
    const int64_t behind = known - 1 - place, drafts = behind < most ? behind : most;
    for (int64_t i = 0; i < drafts; ++i) mine[known + i] = mine[place + 1 + i];
    count[row[r]] = int32_t(drafts);
  }
  return HR_OK;
}
HR_REPLAYABLE(ngram_draft)
