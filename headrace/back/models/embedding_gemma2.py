"""EmbeddingGemma 2 (Google 2026), text: Gemma 4's layers, of which each token sees both sides, with
inputs of each layer that are projections of the token's embedding; what comes out is projected to
the size of embeddings.

T tokens, E hidden size, L layers, P width of a layer's input.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import QKNorm
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.layer_tail import InputGate
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import GatedMLP
from headrace.back.layers.norm import RMS, BlockNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    read_encoder_sizes,
)
from headrace.back.models.gemma2 import embedding_scale
from headrace.back.models.gemma3 import gemma3_windows
from headrace.back.models.gemma4 import layer_heads
from headrace.base.config.hf import ConfigReader

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
KINDS = (("sliding_attention", 10_000.0), ("full_attention", 1e6))
"""Of layers with a window and without, with the bases of their rotations."""


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """EmbeddingGemma2Model, EmbeddingGemma2TextModel."""
    sizes = read_encoder_sizes(
        config,
        eps=1e-6,
        activation_key="hidden_activation",
        eps_key="rms_norm_eps",
        default_activation="gelu_pytorch_tanh",
    )
    inputs = config.int("hidden_size_per_layer_input", 512, ge=1)
    windows = gemma3_windows(config, sizes.layers)
    embed = GemmaInputs(scope, sizes, inputs)
    layers = [
        GemmaLayer(
            scope / "layers" / str(layer), config, sizes, layer, window=window, inputs=inputs
        )
        for layer, window in enumerate(windows)
    ]
    return Encoder(
        scope,
        sizes,
        embed=embed.embed,
        layers=layers,
        norm=GemmaEnd(scope, sizes, config.int("embedding_dim", 768, ge=1)),
        classifier=None,
        ignored=(r"(.*\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*",),
    )


class GemmaInputs:
    """Of tokens the embedding and, behind it, the inputs of all layers, [T, E + L * P]."""

    def __init__(self, scope: Scope, sizes: EncoderSizes, inputs: int) -> None:
        self._words = TokenEmbedding(
            scope / "embed_tokens",
            sizes.vocabulary,
            sizes.width,
            scale=embedding_scale(sizes.width, scope.dtype),
        )
        at = scope / "ple"
        joined = sizes.layers * inputs
        self._projection = WholeLinear(at / "per_layer_model_projection", sizes.width, joined)
        self._norm = RMS.build(at / "per_layer_projection_norm", inputs, eps=sizes.eps)
        self._layers, self._scale = sizes.layers, sizes.width**-0.5

    def embed(self, batch: Batch) -> torch.Tensor:
        """See the class."""
        x_TE = self._words.lookup(batch.token_ids_T)
        projected_TJ = self._projection.project(x_TE) * self._scale
        inputs_TLP = self._norm.norm(projected_TJ.unflatten(1, (self._layers, -1)))
        return torch.cat((x_TE, inputs_TLP.flatten(1)), dim=1)


class GemmaLayer:
    """One layer, over what GemmaInputs gives."""

    def __init__(
        self,
        scope: Scope,
        config: ConfigReader,
        sizes: EncoderSizes,
        layer: int,
        *,
        window: int | None,
        inputs: int,
    ) -> None:
        first = sizes.width + layer * inputs
        self._width, self._own = sizes.width, slice(first, first + inputs)
        self._layer = _layer(scope, config, sizes, layer, window)
        self._gate = InputGate(
            scope / "ple_block",
            sizes.width,
            inputs,
            activation=sizes.activation,
            norms=RMS,
            eps=sizes.eps,
        )
        self._scale = scope.param("layer_scalar", (1,), init="ones")
        self._scale_1 = torch.empty(0)
        scope.on_finish(self._finish)

    def forward(self, x_TX: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The same, with the embedding behind the layer."""
        x_TE = self._layer.forward(x_TX[:, : self._width].contiguous(), batch)
        x_TE = x_TE + self._gate.branch(x_TE, x_TX[:, self._own])
        x_TX[:, : self._width] = x_TE * self._scale_1
        return x_TX

    def _finish(self) -> None:
        self._scale_1 = self._scale.take()


class GemmaEnd:
    """The last norm and the projection to embeddings."""

    def __init__(self, scope: Scope, sizes: EncoderSizes, embedding: int) -> None:
        self._width = sizes.width
        self._norm = RMS.build(scope / "norm", sizes.width, eps=sizes.eps)
        self._projection = WholeLinear(scope / "embedding_projection", sizes.width, embedding)

    def norm(self, x_TX: torch.Tensor) -> torch.Tensor:
        """The embedding of each token."""
        return self._projection.project(self._norm.norm(x_TX[:, : self._width].contiguous()))


def _layer(
    scope: Scope, config: ConfigReader, sizes: EncoderSizes, layer: int, window: int | None
) -> EncoderLayer:
    kind, theta = KINDS[window is None]
    head_dim, kv_heads = layer_heads(config, sizes, layer, whole=window is None)
    rope = read_rope(
        config,
        head_dim=head_dim,
        max_positions=scope.max_positions,
        layer_type=kind,
        default_theta=theta,
    )

    def norm(name: str) -> BlockNorm:
        return RMS.build(scope / name, sizes.width, eps=sizes.eps)

    return EncoderLayer(
        before_attention=norm("input_layernorm"),
        attention=SpanAttentionLayer(
            scope / "self_attn",
            replace(sizes, head_dim=head_dim, kv_heads=kv_heads),
            names=PROJECTIONS,
            out="o_proj",
            bias=config.bool("attention_bias", False),
            rope=rope,
            window=window,
            scale=1.0,
            qk_norm=QKNorm(eps=sizes.eps),
            value_eps=sizes.eps,
        ),
        behind_attention=norm("post_attention_layernorm"),
        before_mlp=norm("pre_feedforward_layernorm"),
        mlp=GatedMLP(scope / "mlp", sizes.feed_forward),
        behind_mlp=norm("post_feedforward_layernorm"),
    )
