"""Diffusion language models: what `--diffusion-config` may say, and what is decided of it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

MOST_BLOCK = 128
"""Tokens of a block with KV at most, which are those of the largest KV block."""
MOST_CANVAS = 4096
LAST_TIME = 1e-3
"""Where Dream's times end, which begin at 1."""
Order = Literal["confidence", "entropy", "margin"]


class DiffusionOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a block's masks become tokens: by confidence, in passes of the model over the block
    (low-confidence remasking)."""

    block_length: Annotated[int, Meta(ge=2, le=MOST_CANVAS)] | None = None
    """Tokens of a block; a power of two, at most MOST_BLOCK, where blocks have KV. None: as
    config.json says, else as the family was published."""
    steps: Annotated[int, Meta(ge=1, le=MOST_CANVAS)] | None = None
    """Passes in which a block is decided at most: each decides its share of the block at least.
    None: block_length, a token each."""
    threshold: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """A pass decides all tokens whose probability is greater, where these are more than its share.
    1: the share alone. None: 0.95 for blocks with KV, 1 for those of a canvas."""
    part_length: Annotated[int, Meta(ge=1, le=MOST_BLOCK)] | None = None
    """Tokens of a part of a block: parts are decided from left to right. None: as the family was
    published, mostly the whole block."""
    mask_token_id: Annotated[int, Meta(ge=0)] | None = None
    """What stands for a token that is not decided. None: as config.json says, else as the family
    was published."""
    canvas_length: Annotated[int, Meta(ge=2, le=MOST_CANVAS)] | None = None
    """Of models whose tokens all see each other: masks that are laid out behind a text at most, of
    which a request takes no more than it may answer with. None: 512."""
    order: Order | None = None
    """Of the same: which tokens a pass decides first: by their probability, by the least entropy,
    or by how far the likeliest is before the next. None: as the family was published."""


class DenoisingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See DiffusionOptions; all numbers decided. `length`: tokens of a block; `mask`: the token
    that stands for one that is not decided, which no answer holds; `part`: tokens of a part of a
    block. `shifted`: logits say the token behind theirs, so that the first one of a block follows
    from the block before. `canvas`: see `canvas_length`; 0: blocks have KV, and see no later ones.
    `timed`: a pass decides a share of what is open, by Dream's times, not of the block."""

    length: int
    steps: int
    threshold: float
    mask: int
    part: int
    shifted: bool = False
    canvas: int = 0
    order: Order = "confidence"
    timed: bool = False

    def shares(self, turn: int, open_K: np.ndarray) -> np.ndarray:
        """Tokens that pass `turn`, from 0 on, decides at least of each of K blocks, of which so
        many are open, int64. Even shares of a block, the first passes taking what does not divide;
        or by times that fall evenly from 1 to LAST_TIME the share of what is open by which time
        falls, rounded down, in the last pass all (Dream's sampler)."""
        if not self.timed:
            share, rest = divmod(self.length, self.steps)
            return np.full(open_K.size, share + (turn < rest), np.int64)
        if turn >= self.steps - 1:
            return open_K.astype(np.int64)
        times = np.linspace(1.0, LAST_TIME, self.steps + 1, dtype=np.float32)
        passed = np.float32(1.0) - times[turn + 1] / times[turn]
        shares_K: np.ndarray = (open_K.astype(np.float32) * passed).astype(np.int64)
        return shares_K
