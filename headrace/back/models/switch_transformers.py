"""Switch Transformers (Fedus et al. 2021): T5 whose every second MLP is one of many, without gates.

Here no expert leaves out a token: the bound that training sets on the tokens of each does not hold.
"""

from __future__ import annotations

from headrace.back.layers.mlp import FeedForwardSpec, PlainMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.stacked import UngatedExperts
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.back.models.t5 import T5Form, build_t5
from headrace.base.config.hf import ConfigReader

LAYOUT = UngatedExperts(up="experts.expert_{}.wi.weight", down="experts.expert_{}.wo.weight")


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """SwitchTransformersForConditionalGeneration."""
    tied = config.bool("tie_word_embeddings", True)
    return build_t5(scope, config, T5Form(scaled=tied, feed_forward=_feed_forward))


def _feed_forward(config: ConfigReader, stack: str, layer: int, name: str) -> FeedForwardSpec:
    step = config.int(f"{stack}_sparse_step", 2, ge=0)
    name = name.replace("DenseReluDense", "mlp")
    if step == 0 or layer % step != min(1, step - 1):
        return PlainMLPSpec(name=name, up="wi", down="wo")
    config.choice("dense_act_fn", ("relu",), "relu")
    return MixtureSpec(
        router=RouterSpec(
            experts=config.int("num_experts", 8, ge=1),
            top_k=1,
            name="router.classifier",
            linear_bias=config.bool("router_bias", False),
        ),
        inner=config.int("d_ff", ge=1),
        layout=LAYOUT,
        name=name,
        activation="relu",
    )
