"""Diffusion language models that write blocks: what `--diffusion-config` may say, and what is
decided of it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MOST_BLOCK = 128
"""Tokens of a block at most, which are those of the largest KV block."""


class DiffusionOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a block's masks become tokens: by confidence, in passes of the model over the block
    (low-confidence remasking)."""

    block_length: Annotated[int, Meta(ge=2, le=MOST_BLOCK)] | None = None
    """Tokens of a block, a power of two. None: as config.json says, else as the family was
    published."""
    steps: Annotated[int, Meta(ge=1, le=MOST_BLOCK)] | None = None
    """Passes in which a block is decided at most: each decides its share of the block at least.
    None: block_length, a token each."""
    threshold: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.95
    """A pass decides all tokens whose probability is greater, where these are more than its share.
    1: the share alone."""
    part_length: Annotated[int, Meta(ge=1, le=MOST_BLOCK)] | None = None
    """Tokens of a part of a block: parts are decided from left to right. None: as the family was
    published, mostly the whole block."""
    mask_token_id: Annotated[int, Meta(ge=0)] | None = None
    """What stands for a token that is not decided. None: as config.json says, else as the family
    was published."""


class DenoisingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See DiffusionOptions; all numbers decided. `length`: tokens of a block; `mask`: the token
    that stands for one that is not decided, which no answer holds; `part`: tokens of a part of a
    block. `shifted`: logits say the token behind theirs, so that the first one of a block follows
    from the block before."""

    length: int
    steps: int
    threshold: float
    mask: int
    part: int
    shifted: bool = False

    def share(self, turn: int) -> int:
        """Tokens of a block that pass `turn`, from 0 on, decides at least; the first passes take
        what does not divide evenly."""
        share, rest = divmod(self.length, self.steps)
        return share + (turn < rest)
