"""Diffusion language models that write blocks from left to right: SDAR (Cheng et al. 2025,
arXiv:2510.06303) over Qwen 3's decoders, LLaDA 2 (arXiv:2512.15745) over Ling 2's.

A token sees all of its own block and of those before it, so that the KV of a whole block stays as
it is. How masks become tokens: back/runner/denoising.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.back.layers.mutual_attention import BLOCKS
from headrace.back.layers.scope import Scope
from headrace.back.models import bailing_moe, qwen3, qwen3_moe
from headrace.back.models.blocks import BuildFamily, Decoder
from headrace.base.config.denoising import MOST_BLOCK
from headrace.base.config.hf import ConfigReader

DECODERS: Mapping[str, BuildFamily] = {
    "SDARForCausalLM": qwen3.build,
    "SDARMoeForCausalLM": qwen3_moe.build,
    "LLaDA2MoeModelLM": bailing_moe.build,
}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """SDARForCausalLM, SDARMoeForCausalLM, LLaDA2MoeModelLM. The last block may end behind the
    longest text."""
    decoder = DECODERS[config.list("architectures", of=str)[0]]
    longest = scope.max_positions + MOST_BLOCK
    return decoder(replace(scope, mutual=BLOCKS, max_positions=longest), config)
