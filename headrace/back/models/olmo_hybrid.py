"""OLMo hybrid: three layers with the gated delta rule, norms before their branches, to one of OLMo
3's with norms behind them. Its attention has no position embedding unless the config has one."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.norm import POST
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import DeltaNames
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.hybrid import linear_layers, read_gated_delta
from headrace.base.config.hf import ConfigReader

GATE_EPS = 1e-5
"""Of the gated norms, in all published models: not the model's own."""
RENAMED = (
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
)
"""What the recurrent layers' norms are called where they are not called as Llama's."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """OlmoHybridForCausalLM."""
    sizes = read_sizes(config)
    bias = config.bool("attention_bias", False)
    section = config.section("rope_parameters") or config
    rope = None
    if "rope_theta" in section:
        rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(over="width", eps=sizes.eps),
    )
    turns = config.bool("linear_allow_neg_eigval", True)
    linear = read_gated_delta(
        config,
        sizes,
        DeltaNames(),
        heads=sizes.heads,
        key_dim=3 * sizes.width // (4 * sizes.heads),
        eps=GATE_EPS,
        norm="o_norm",
        beta_scale=2.0 if turns else 1.0,
    )
    kinds = linear_layers(config, sizes.layers, default=lambda i: i % 4 != 3)
    layers = tuple(
        LayerSpec(mixer=linear) if is_linear else LayerSpec(mixer=attention, placement=POST)
        for is_linear in kinds
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, renamed=RENAMED))
