"""Moonshine (Jeffries et al. 2024): speech to text whose encoder reads the samples of a sound of
any length through three convolutions; places turn queries and keys of both halves, and norms
without biases stand before each branch (transformers 5.23, modeling_moonshine.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import MergedTensor
from headrace.back.layers.mlp import ElementwiseActivation, GatedMLPSpec, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LAYER_NO_BIAS
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import PLAIN_ACTIVATIONS, DecoderSizes
from headrace.back.models.crossing_layer import CrossLayerSpec, plain_cross_layer
from headrace.back.models.encoder import EncoderLayer, EncoderSizes, SpanAttentionLayer
from headrace.back.models.encoder_decoder import EncoderDecoder, EncoderDecoderSpec, StackSpec
from headrace.base.config.hf import ConfigReader
from headrace.base.config.speech import MOONSHINE
from headrace.base.wire.media import encoder_outputs

EPS = 1e-5
"""Of all norms; no config states it."""
NORMS = ("input_layernorm", "post_attention_layernorm", "final_layernorm")
MLP = PlainMLPSpec(name="mlp", up="fc1", down="fc2", bias=True)
GATED = GatedMLPSpec(bias=True, merged=MergedTensor(name="fc1", parts=(1, 0)), down="fc2")
QKV = ("q_proj", "k_proj", "v_proj")
CROSS = ("encoder_attn", *QKV, "o_proj")


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """MoonshineForConditionalGeneration."""
    longest = encoder_outputs(MOONSHINE, MOONSHINE[1])
    scope = replace(scope, encoder_tokens=longest)
    sizes, encoder = _sizes(config, "decoder"), _sizes(config, "encoder")
    bias, rope = config.bool("attention_bias", False), _rope(config, encoder, longest)
    spec = EncoderDecoderSpec(
        sizes=sizes,
        encoder_layers=encoder.layers,
        encoder_layer=lambda at, i: _encoder_layer(
            replace(at, max_positions=longest), encoder, rope, bias=bias
        ),
        layers=(cross_layer(scope, config, sizes, bias=bias),) * sizes.layers,
        norm=LAYER_NO_BIAS,
        encoder=StackSpec(stack="encoder", norm="layer_norm"),
        decoder=StackSpec(stack="decoder", norm="norm"),
        hears=SampleSource,
        shared="decoder.embed_tokens",
        head=None if sizes.tied else "proj_out",
        ignored=(r"proj_out\.weight",) if sizes.tied else (),
    )
    return EncoderDecoder(scope, spec)


class SampleSource:
    """See SoundSource."""

    def __init__(self, scope: Scope, width: int) -> None:
        self._dtype = scope.dtype
        shapes: dict[str, tuple[int, ...]] = {
            "conv1.weight": (width, 1, 127),
            "groupnorm.weight": (width,),
            "groupnorm.bias": (width,),
            "conv2.weight": (2 * width, width, 7),
            "conv2.bias": (2 * width,),
            "conv3.weight": (width, 2 * width, 3),
            "conv3.bias": (width,),
        }
        self._params = {name: scope.param(name, shape) for name, shape in shapes.items()}
        self._weights: dict[str, torch.Tensor] = {}
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = {name: param.take() for name, param in self._params.items()}

    def read(self, sounds: Sequence[torch.Tensor]) -> torch.Tensor:
        """See SoundSource."""
        return torch.cat([self._read(one) for one in sounds])

    def _read(self, samples_N: torch.Tensor) -> torch.Tensor:
        at = self._weights
        x = torch.tanh(
            F.conv1d(samples_N.to(self._dtype)[None, None], at["conv1.weight"], stride=64)
        )
        x = F.group_norm(x, 1, at["groupnorm.weight"], at["groupnorm.bias"], EPS)
        x = F.gelu(F.conv1d(x, at["conv2.weight"], at["conv2.bias"], stride=3))
        x = F.gelu(F.conv1d(x, at["conv3.weight"], at["conv3.bias"], stride=2))
        return x[0].T.contiguous()


def _rope(config: ConfigReader, sizes: DecoderSizes, longest: int, share: float = 0.9) -> RopeSpec:
    return read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=longest,
        default_share=share,
        layout="pairs",
    )


def cross_layer(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, *, bias: bool, share: float = 0.9
) -> CrossLayerSpec:
    """A layer of the decoder; `share`: of a head that turns, where the config says none."""
    layer = plain_cross_layer(scope, sizes, bias=bias, cross=CROSS, feed_forward=GATED, norms=NORMS)
    turned = _rope(config, sizes, scope.max_positions, share)
    return replace(layer, attention=replace(layer.attention, rope=turned, out_bias=False))


def _encoder_layer(
    scope: Scope, sizes: DecoderSizes, rope: RopeSpec, *, bias: bool
) -> EncoderLayer:
    encoder = EncoderSizes(
        vocabulary=sizes.vocabulary,
        width=sizes.width,
        inner=sizes.inner,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.heads,
        head_dim=sizes.head_dim,
        eps=sizes.eps,
        activation=sizes.activation,
    )
    before, middle = (LAYER_NO_BIAS.build(scope / name, sizes.width, eps=EPS) for name in NORMS[:2])
    activation = ElementwiseActivation(scope, sizes.activation)
    return EncoderLayer(
        attention=SpanAttentionLayer(
            scope / "self_attn", encoder, names=QKV, out="o_proj", bias=bias, rope=rope
        ),
        mlp=PlainMLP(scope / "mlp", MLP, encoder.feed_forward, activation),
        before_attention=before,
        before_mlp=middle,
    )


def _sizes(config: ConfigReader, half: str) -> DecoderSizes:
    """Those of one half, checked."""
    width = config.int("hidden_size", ge=1)
    heads = config.int(f"{half}_num_attention_heads", 8, ge=1)
    if config.int(f"{half}_num_key_value_heads", heads, ge=1) != heads:
        raise config.wrong(f"{half}_num_key_value_heads", f"{half}_num_attention_heads ({heads})")
    if width % heads:
        raise config.wrong(f"{half}_num_attention_heads", f"a divisor of hidden_size ({width})")
    default = "silu" if half == "decoder" else "gelu"
    named = config.choice(f"{half}_hidden_act", PLAIN_ACTIVATIONS, default)
    return DecoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=width,
        inner=config.int("intermediate_size", ge=1),
        layers=config.int(f"{half}_num_hidden_layers", ge=1),
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        eps=EPS,
        activation=PLAIN_ACTIVATIONS[named],
        tied=config.bool("tie_word_embeddings", True),
    )
