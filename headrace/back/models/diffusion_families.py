"""Diffusion language models that write blocks, as a row for `published_families.py`, and what their
config.json files may leave out. Without torch, so that `launch` can ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.base.config.denoising import MOST_BLOCK, DiffusionOptions
from headrace.base.config.hf import ConfigReader

FAMILY = "block_diffusion"


@dataclass(frozen=True, kw_only=True)
class PublishedBlocks:
    """Tokens of a block and of a part of it (None: all of it), the id of the mask, and whether
    logits say the token behind theirs."""

    length: int
    mask: int
    part: int | None = None
    shifted: bool = False


BLOCKS: Mapping[str, PublishedBlocks] = {
    "SDARForCausalLM": PublishedBlocks(length=4, mask=151_669),
    "SDARMoeForCausalLM": PublishedBlocks(length=4, mask=151_669),
    "LLaDA2MoeModelLM": PublishedBlocks(length=32, mask=156_895),
    "Fast_dLLM_QwenForCausalLM": PublishedBlocks(length=32, mask=151_665, part=8, shifted=True),
}
"""By the name of the architecture: tokens see those of their own block and of all before it."""
BLOCKS_PUBLISHED: Mapping[str, str] = dict.fromkeys(BLOCKS, FAMILY)


def blocks_of(config: ConfigReader, asked: DiffusionOptions) -> PublishedBlocks:
    """Of a config.json whose architecture is one of BLOCKS, unless it was asked for something
    else."""
    published = BLOCKS[config.list("architectures", of=str)[0]]
    names = ("block_length", "bd_size")
    length = config.int("block_size", published.length, aliases=names, ge=2, le=MOST_BLOCK)
    mask = config.int("mask_token_id", published.mask, ge=0)
    return replace(
        published,
        length=asked.block_length or length,
        mask=mask if asked.mask_token_id is None else asked.mask_token_id,
        part=asked.part_length or published.part,
    )
