"""NLLB-200 with experts (NLLB Team et al. 2022): M2M-100 whose every fourth feed-forward is a
mixture of which each token takes two experts, weighed by what the softmax gives both.

No expert leaves out a token: of a prompt alone the published config's bound, as many as there are
tokens, leaves out none. What is kept of the experts' results is what training kept on average.
"""

from __future__ import annotations

from headrace.back.layers.mlp import FeedForwardSpec, PlainMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.stacked import UngatedExperts
from headrace.back.layers.positions import SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.base.config.hf import ConfigReader

LAYOUT = UngatedExperts(
    up="experts.expert_{}.fc1.weight",
    down="experts.expert_{}.fc2.weight",
    up_bias="experts.expert_{}.fc1.bias",
    down_bias="experts.expert_{}.fc2.bias",
)
DENSE = PlainMLPSpec(name="ffn", up="fc1", down="fc2", bias=True)


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """NllbMoeForConditionalGeneration."""
    config.choice("activation_function", ("relu",), "relu")
    config.choice("second_expert_policy", ("all",), "all")
    if config.float("moe_eval_capacity_token_fraction", 1.0) != 1.0:
        raise config.wrong("moe_eval_capacity_token_fraction", "1.0: no expert leaves out a token")

    def feed_forward(half: str, layer: int) -> FeedForwardSpec:
        step = config.int(f"{half}_sparse_step", 4, ge=0)
        return _mixture(config, half) if step and (layer + 1) % step == 0 else DENSE

    form = BartForm(
        pre=True,
        embedding_norm=False,
        logits_bias=False,
        feed_forward=feed_forward,
        cross="cross_attention",
        norms=("self_attn_layer_norm", "cross_attention_layer_norm", "ff_layer_norm"),
    )
    first = config.int("pad_token_id", 1, ge=0) + 1
    return build_bart(scope, config, form, positions=SinusoidalPositions(first=first, spread=1))


def _mixture(config: ConfigReader, half: str) -> MixtureSpec:
    dropped = config.float("moe_token_dropout", 0.2, ge=0.0)
    if dropped >= 1.0:
        raise config.wrong("moe_token_dropout", "below 1")
    return MixtureSpec(
        router=RouterSpec(
            experts=config.int("num_experts", 128, ge=2),
            top_k=2,
            renormalize=True,
            scale=1.0 - dropped,
            name="router.classifier",
            linear_bias=config.bool("router_bias", False),
        ),
        inner=config.int(f"{half}_ffn_dim", 4096, ge=1),
        layout=LAYOUT,
        name="ffn",
        activation="relu",
    )
