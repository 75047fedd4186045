"""MiniMax-Text-01 and MiniMax-M1 as they are published: MiniMax under keys of their own, with a
part of each head rotated (MiniMax 2025; keys and names as in the published config.json)."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models import minimax
from headrace.back.models.blocks import Decoder
from headrace.base.config.hf import ConfigReader

KINDS = ("linear_attention", "full_attention")
"""By the numbers of `attn_type_list`."""
FACTORS = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniMaxText01ForCausalLM, MiniMaxM1ForCausalLM."""
    kinds = config.list("attn_type_list", of=int)
    if not set(kinds) <= {0, 1}:
        raise config.wrong("attn_type_list", "a list of 0 (lightning) and 1 (softmax)")
    if not config.bool("postnorm", False):
        raise config.wrong("postnorm", "true: branches are added to what their norms give")
    if config.int("shared_intermediate_size", 0, ge=0):
        raise config.wrong("shared_intermediate_size", "0")
    head_dim = config.int("head_dim", ge=1)
    rotary = config.int("rotary_dim", head_dim, ge=2, le=head_dim)
    own = {"layer_types": [KINDS[kind] for kind in kinds]}
    own |= {"partial_rotary_factor": rotary / head_dim}
    for name, stated in FACTORS.items():
        for factor in ("alpha", "beta"):
            own[f"{name}_{factor}_factor"] = config.float(f"{stated}_{factor}", 1.0)
    return minimax.build(scope, ConfigReader({**config.raw, **own}, config.where))
