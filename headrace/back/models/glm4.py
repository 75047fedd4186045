"""GLM-4-0414 and GLM-Z1 (dense): GLM-4 with norms around both branches."""

from __future__ import annotations

from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.glm import build_glm
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Glm4ForCausalLM."""
    return build_glm(scope, config, PLACEMENT)
