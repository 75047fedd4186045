"""CodeGen: GPT-J with query, value and key in one tensor, in four groups of heads (Nijkamp et al.
2022)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames
from headrace.back.layers.linear import MergedTensor
from headrace.back.layers.scope import Scope
from headrace.back.models import gptj
from headrace.back.models.blocks import Decoder
from headrace.back.models.families import HEADS
from headrace.base.config.hf import ConfigReader

GROUPS = 4
"""Cores of the machine that trained it."""
ATTENTION = AttentionNames(
    module="attn",
    grouped=MergedTensor(name="qkv_proj", parts=(0, 2, 1), groups=GROUPS),
    out="out_proj",
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """CodeGenForCausalLM."""
    if config.int("num_attention_heads", aliases=HEADS, ge=1) % GROUPS:
        raise config.wrong("n_head", f"a multiple of {GROUPS}")
    return gptj.build(scope, config, attention=ATTENTION)
