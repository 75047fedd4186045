"""GTE (Zhang et al. 2024, "mGTE"), which Snowflake's Arctic Embed 2 takes over: BERT with rotary
instead of learned positions and gated MLPs. Names are those of its published checkpoints."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.linear import MergedTensor
from headrace.back.layers.mlp import GatedMLP
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import pooler_head
from headrace.back.models.encoder import Encoder, EncoderSizes
from headrace.back.models.nomic_bert import RotaryBert, build_rotary_bert
from headrace.base.config.hf import ConfigReader

UP_GATE = MergedTensor(name="up_gate_proj", parts=(1, 0))


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """GteModel, NewModel (GteNewModel), and their ForSequenceClassification,
    ForTokenClassification, ForMaskedLM."""
    for key in ("logn_attention_scale", "logn_attention_clip1"):
        if config.bool(key, False):
            raise config.wrong(key, "false")
    config.choice("position_embedding_type", ("rope",), "rope")
    named = config.list("architectures", of=str)[0]
    kind = RotaryBert(
        prefix="new" if named.startswith(("New", "GteNew")) else "gte",
        layers="encoder.layer",
        embedding_norm="embeddings.LayerNorm",
        attention="attention",
        merged="qkv_proj",
        out="o_proj",
        norms=("attn_ln", "mlp_ln"),
        biased=True,
        rope=_rope(scope, config),
        eps=1e-12,
        pools=True,
        mlp=_mlp,
        head=pooler_head,
    )
    return build_rotary_bert(scope, config, kind)


def _rope(scope: Scope, config: ConfigReader) -> RopeSpec:
    """What its authors call "ntk" is the same for texts of every length: a base that many times as
    great, and frequencies divided by factor^(2 / head_dim) besides."""
    head_dim = config.int("hidden_size", ge=1) // config.int("num_attention_heads", ge=1)
    sizes = {"head_dim": head_dim, "max_positions": scope.max_positions}
    scaling = config.section("rope_scaling")
    if scaling is None or scaling.str("type", "") != "ntk":
        return read_rope(config, **sizes, default_theta=160_000.0)
    if scaling.float("mixed_b", None) is not None:
        raise scaling.wrong("mixed_b", "null")
    factor = scaling.float("factor", ge=1.0)
    base = config.float("rope_theta", 10_000.0, ge=1.0) * factor
    rope = read_rope(config, **sizes, theta=base)
    slower = factor ** (2 / head_dim)
    return replace(rope, frequencies=tuple(one / slower for one in rope.frequencies))


def _mlp(scope: Scope, sizes: EncoderSizes, _: int) -> GatedMLP:
    names = ("gate", "up", "down_proj")
    return GatedMLP(scope, sizes.feed_forward, merged=UP_GATE, names=names, down_bias=True)
