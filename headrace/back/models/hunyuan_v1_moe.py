"""Hunyuan v1 with experts (A13B): the dense model's attention, softmax routing, one shared MLP of
an expert's size."""

from __future__ import annotations

from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.hunyuan_v1 import hunyuan_attention
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """HunYuanMoEV1ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    experts = config.int("num_experts", ge=1, aliases=("num_local_experts",))
    layer = LayerSpec(
        mixer=hunyuan_attention(scope, config, sizes),
        feed_forward=MixtureSpec(
            router=RouterSpec(
                experts=experts,
                top_k=_top_k(config, experts),
                renormalize=True,
                name="gate.wg",
            ),
            inner=sizes.inner,
            shared=SharedSpec(inner=sizes.inner, name="shared_mlp"),
        ),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))


def _top_k(config: ConfigReader, experts: int) -> int:
    """One number, or one for each layer, which are all the same in published models."""
    if not isinstance(config.raw.get("moe_topk"), list):
        return config.int("moe_topk", 1, ge=1, le=experts)
    each = set(config.list("moe_topk", of=int))
    if len(each) != 1 or not 1 <= min(each) <= experts:
        raise config.wrong("moe_topk", f"the same number for all layers, 1 to {experts}")
    return each.pop()
