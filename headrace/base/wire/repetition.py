"""When an answer that repeats itself ends."""

from __future__ import annotations

import msgspec

MAX_PATTERN_TOKENS = 1024
MAX_PATTERN_COUNT = 65536


class RepetitionDetection(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Ends an answer ("repetition") whose last tokens are one pattern of `min_pattern_size` (0: 1)
    to `max_pattern_size` tokens, `min_count` times over. A greatest size of 0 is off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0
