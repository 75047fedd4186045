"""Refact (Small Magellanic Cloud AI 2023): one KV head, ALiBi, layer norms without bias and gated
MLPs (names and keys of the published checkpoint)."""

from __future__ import annotations

from headrace.back.layers.alibi import alibi_slopes
from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.linear import MergedTensor
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import LAYER_NO_BIAS
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.gpt2 import MASKS, NAMES, PLACEMENT
from headrace.base.config.hf import ConfigReader

KEYS_AND_VALUES = MergedTensor(name="kv", parts=(1, 2))
ATTENTION = AttentionNames(module="attn", query="q", grouped=KEYS_AND_VALUES, out="c_proj")
MLP = GatedMLPSpec(merged="gate_up_proj", down="c_proj")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GPTRefactForCausalLM."""
    if not config.bool("multi_query", True):
        raise config.wrong("multi_query", "true")
    config.choice("activation_function", ("silu", "swish"), "silu")
    sizes = read_sizes(config, kv_heads=1, eps=1e-5)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=None,
            slopes=alibi_slopes(sizes.heads),
            names=ATTENTION,
        ),
        placement=PLACEMENT,
        feed_forward=MLP,
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER_NO_BIAS,
            names=NAMES,
            ignored=(MASKS,),
            renamed=((r"^ln_f\.", "transformer.ln_f."),),
        ),
    )
