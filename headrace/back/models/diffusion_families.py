"""Diffusion language models, as rows for `published_families.py`, and what their config.json files
may leave out. Without torch, so that `launch` can ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.base.config.denoising import MOST_BLOCK, DiffusionOptions, Order
from headrace.base.config.hf import ConfigReader

FAMILY = "block_diffusion"
CANVAS = "canvas_diffusion"
CANVAS_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class PublishedBlocks:
    """Tokens of a block and of a part of it (None: all of it), the id of the mask, and whether
    logits say the token behind theirs. `order`, `timed`: see DenoisingSpec; `length` None: all that
    a request may answer with."""

    length: int | None
    mask: int
    part: int | None = None
    shifted: bool = False
    order: Order = "confidence"
    timed: bool = False


BLOCKS: Mapping[str, PublishedBlocks] = {
    "SDARForCausalLM": PublishedBlocks(length=4, mask=151_669),
    "SDARMoeForCausalLM": PublishedBlocks(length=4, mask=151_669),
    "LLaDA2MoeModelLM": PublishedBlocks(length=32, mask=156_895),
    "Fast_dLLM_QwenForCausalLM": PublishedBlocks(length=32, mask=151_665, part=8, shifted=True),
}
"""By the name of the architecture: tokens see those of their own block and of all before it."""
CANVASES: Mapping[str, PublishedBlocks] = {
    "LLaDAModelLM": PublishedBlocks(length=32, mask=126_336),
    "LLaDAMoEModelLM": PublishedBlocks(length=32, mask=156_895),
    "DreamModel": PublishedBlocks(
        length=None, mask=151_666, shifted=True, order="entropy", timed=True
    ),
}
"""The same of those whose tokens all see each other, as their samplers' examples call them."""
BLOCKS_PUBLISHED: Mapping[str, str] = {
    **dict.fromkeys(BLOCKS, FAMILY),
    **dict.fromkeys(CANVASES, CANVAS),
}


def blocks_of(config: ConfigReader, asked: DiffusionOptions) -> PublishedBlocks:
    """Of a config.json whose architecture is one of BLOCKS or CANVASES, unless it was asked for
    something else."""
    named = config.list("architectures", of=str)[0]
    published = BLOCKS.get(named) or CANVASES[named]
    length = published.length
    if named in BLOCKS:
        names = ("block_length", "bd_size")
        length = config.int("block_size", length, aliases=names, ge=2, le=MOST_BLOCK)
    mask = config.int("mask_token_id", published.mask, ge=0)
    return replace(
        published,
        length=asked.block_length or length,
        order=asked.order or published.order,
        mask=mask if asked.mask_token_id is None else asked.mask_token_id,
        part=asked.part_length or published.part,
    )
