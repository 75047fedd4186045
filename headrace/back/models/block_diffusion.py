"""Diffusion language models that write blocks from left to right: SDAR (Cheng et al. 2025,
arXiv:2510.06303) over Qwen 3's decoders, LLaDA 2 (arXiv:2512.15745) over Ling 2's, Fast-dLLM v2
(Wu et al. 2025, arXiv:2509.26328) over Qwen 2.5's.

A token sees all of its own block and of those before it, so that the KV of a whole block stays as
it is. How masks become tokens: back/runner/denoising.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.back.layers.mutual_attention import BLOCKS
from headrace.back.layers.scope import Scope
from headrace.back.models import bailing_moe, qwen2, qwen3, qwen3_moe
from headrace.back.models.blocks import BuildFamily, Decoder
from headrace.base.config.denoising import MOST_BLOCK
from headrace.base.config.hf import ConfigReader

DECODERS: Mapping[str, BuildFamily] = {
    "SDARForCausalLM": qwen3.build,
    "SDARMoeForCausalLM": qwen3_moe.build,
    "LLaDA2MoeModelLM": bailing_moe.build,
    "Fast_dLLM_QwenForCausalLM": qwen2.build,
}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """The architectures of DECODERS. The last block may end behind the longest text."""
    build_decoder = DECODERS[config.list("architectures", of=str)[0]]
    longest = scope.max_positions + MOST_BLOCK
    decoder = build_decoder(replace(scope, mutual=BLOCKS, max_positions=longest), config)
    if any(form.kind != "full" for form in decoder.kv_forms):
        raise config.wrong("use_sliding_window", "false")
    return decoder
