"""SmallThinker (Song et al. 2025): experts that are chosen by what goes into their layer, before
its attention, so that they can be fetched meanwhile; layers with windows that rotate beside layers
without either.

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import add_norm
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.moe.mixture import Mixture, MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import SeparateExperts
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, plain_attention, read_sizes
from headrace.back.models.decoder_layer import DecoderSizes, Stream, handed_on
from headrace.back.parallel.collectives import Partial
from headrace.base.config.hf import ConfigReader

LAYOUT = SeparateExperts(
    gate="experts.{}.gate.weight", up="experts.{}.up.weight", down="experts.{}.down.weight"
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """SmallThinkerForCausalLM."""
    inner = config.int("moe_ffn_hidden_size", ge=1)
    sizes = read_sizes(config, inner=inner, default_activation="relu", tied=True)
    _refuse_others(config)
    experts = config.int("moe_num_primary_experts", ge=1)
    is_softmax = config.bool("moe_primary_router_apply_softmax", False)
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("moe_num_active_primary_experts", ge=1, le=experts),
            score="softmax" if is_softmax else "sigmoid",
            softmax_chosen=is_softmax,
            renormalize=not is_softmax,
            name="primary_router",
        ),
        inner=inner,
        layout=LAYOUT,
        name="block_sparse_moe",
        activation="relu",
    )
    count = sizes.layers
    turned = config.list("rope_layout", (1,) * count, of=int, length=count)
    windows = config.list("sliding_window_layout", (0,) * count, of=int, length=count)
    window = config.int("sliding_window_size", 4096, ge=1) if any(windows) else None
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, default_theta=1e6
    )
    layers = tuple(
        EarlyChoiceSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=rope if turns else None,
                window=window if slides else None,
            ),
            mixture=mixture,
        )
        for turns, slides in zip(turned, windows, strict=True)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


def _refuse_others(config: ConfigReader) -> None:
    """Variants that no published checkpoint has."""
    for key in ("use_qk_norm", "moe_enable_secondary_experts"):
        if config.bool(key, False):
            raise config.wrong(key, "false")
    if config.int("moe_shared_primary_experts", 0):
        raise config.wrong("moe_shared_primary_experts", "0")
    if not config.bool("moe_enable_early_router", True):
        raise config.wrong("moe_enable_early_router", "true")
    if not all(config.list("moe_layer_layout", (), of=int)):
        raise config.wrong("moe_layer_layout", "1 for each layer: all have experts")


@dataclass(frozen=True, kw_only=True)
class EarlyChoiceSpec:
    """Attention, then experts that were chosen by the residual before it."""

    mixer: MixerSpec
    mixture: MixtureSpec

    def build(
        self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec
    ) -> EarlyChoiceLayer:
        """See DecoderLayerSpec."""
        return EarlyChoiceLayer(scope, cache, self, sizes, norms)


class EarlyChoiceLayer:
    """See EarlyChoiceSpec."""

    takes_adapters = True
    tail: Tail | None = None

    def __init__(
        self, scope: Scope, cache: int, spec: EarlyChoiceSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        self._before_attention, self._before_mlp = (
            norms.build(scope / name, sizes.width, eps=sizes.eps)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        self.mixer = spec.mixer.build(scope, cache, adds=True)
        at = scope / spec.mixture.name
        activation = spec.mixture.activation or sizes.activation
        self._mixture = Mixture(at, spec.mixture, sizes.width, activation=activation)
        self._axis = scope.mesh.tp
        self._adapters = scope.adapters
        self.kv_forms = self.mixer.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        branch_TE, residual_TE = stream
        x_TE = add_norm(self._before_attention, branch_TE, residual_TE)
        handed, residual_TE, batch = handed_on(
            self.mixer, x_TE, residual_TE, batch, self._adapters, last=last
        )
        chosen = self._mixture.routes(residual_TE)
        branch_TE = self.mixer.attend_into(handed, residual_TE, batch)
        x_TE = add_norm(self._before_mlp, branch_TE, residual_TE)
        y_TE = self._mixture.of_chosen(x_TE, *chosen)
        return (y_TE if self._axis.size == 1 else Partial(y_TE, self._axis)), residual_TE
