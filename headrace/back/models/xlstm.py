"""xLSTM (Beck et al. 2025, "xLSTM 7B"): layers with a matrix for a memory and gated MLPs, without
attention."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.mlstm import MLstmSpec
from headrace.back.models.blocks import Decoder, DecoderNames, DecoderSizes, DecoderSpec, LayerSpec
from headrace.back.models.gemma2 import soft_cap
from headrace.back.models.ssm import read_recurrent_sizes
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(prefix="backbone", embedding="embeddings", layers="blocks", norm="out_norm")
PLACEMENT = NormPlacement(before_attention="norm_mlstm", before_mlp="norm_ffn")
MLP = GatedMLPSpec(name="ffn", gate="proj_up_gate", up="proj_up", down="proj_down")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """xLSTMForCausalLM."""
    sizes = read_recurrent_sizes(config, tied=False, eps=1e-6)
    if config.bool("use_bias", False):
        raise config.wrong("use_bias", "false")
    if not config.bool("add_out_norm", True):
        raise config.wrong("add_out_norm", "true")
    config.choice("weight_mode", ("single",), "single")
    round_up = config.int("ffn_round_up_to_multiple_of", 64, ge=1)
    inner = sizes.width * config.float("ffn_proj_factor", 2.667, ge=0.0)
    sizes = replace(sizes, inner=int((inner + round_up - 1) // round_up) * round_up)
    layer = LayerSpec(mixer=_memory(config, sizes), placement=PLACEMENT, feed_forward=MLP)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            logits_softcap=soft_cap(config, "output_logit_soft_cap", 30.0),
            names=NAMES,
        ),
    )


def _memory(config: ConfigReader, sizes: DecoderSizes) -> MLstmSpec:
    heads = config.int("num_heads", 8, ge=1)
    keys, values = (
        int(sizes.width * config.float(f"{name}_dim_factor", default, ge=0.0))
        for name, default in (("qk", 0.5), ("v", 1.0))
    )
    if not keys or not values or keys % heads or values % heads:
        why = f"a divisor of the sizes of all keys ({keys}) and of all values ({values})"
        raise config.wrong("num_heads", why)
    return MLstmSpec(
        width=sizes.width,
        heads=heads,
        key_dim=keys // heads,
        value_dim=values // heads,
        cap=config.float("gate_soft_cap", 15.0, ge=1e-6, le=40.0),
        eps=sizes.eps,
    )
