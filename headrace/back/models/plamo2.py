"""PLaMo 2: Mamba 2 with a selection of Mamba 1's and attention in turn, norms before and behind
each branch whose stored weights lack constants of their own."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import RMS_UNIT_OFFSET, NormPlacement, NormSpec
from headrace.back.layers.qk_norm import QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.selected_mamba2 import SelectedMamba2Spec
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.ssm import read_layer_kinds
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(
    before_attention="pre_mixer_norm",
    after_attention="post_mixer_norm",
    before_mlp="pre_mlp_norm",
    after_mlp="post_mlp_norm",
)
BEHIND = {
    "post_mixer_norm": NormSpec(offset=1 / 5),
    "post_mlp_norm": NormSpec(offset=5**-1.5),
}
"""What branches add is small at first."""
KINDS = {one: one for one in ("mamba", "full_attention", "sliding_attention")}
RENAMED = ((r"\.([qk])_weight$", r".\1_norm.weight"), (r"_norm_weight$", "_norm.weight"))
QK_EPS = 1e-6


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Plamo2ForCausalLM."""
    sizes = read_sizes(config, tied=True)
    mamba = _mamba(config, sizes)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    window = config.int("sliding_window", None, ge=1)

    def mixer(kind: str) -> SelectedMamba2Spec | AttentionSpec:
        if kind == "mamba":
            return mamba
        return AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            window=window if kind == "sliding_attention" else None,
            qk_norm=QKNorm(over="each", eps=QK_EPS),
            names=AttentionNames(module="mixer", merged="qkv_proj"),
        )

    layers = tuple(
        LayerSpec(
            mixer=mixer(kind),
            placement=PLACEMENT,
            feed_forward=GatedMLPSpec(merged="gate_up_proj"),
            norms=BEHIND,
        )
        for kind in read_layer_kinds(config, sizes.layers, KINDS)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=RMS_UNIT_OFFSET,
            names=DecoderNames(layers="layers.layers"),
            renamed=RENAMED,
        ),
    )


def _mamba(config: ConfigReader, sizes: DecoderSizes) -> SelectedMamba2Spec:
    return SelectedMamba2Spec(
        width=sizes.width,
        heads=config.int("mamba_num_heads", 64, ge=1),
        head_dim=sizes.head_dim,
        state_dim=config.int("mamba_d_state", 64, ge=1),
        step_rank=max(64, sizes.width // 16),
        taps=config.int("mamba_d_conv", 4, ge=2, le=8),
        eps=sizes.eps,
    )
