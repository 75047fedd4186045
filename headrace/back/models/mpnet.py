"""MPNet (Song et al. 2020): BERT without token types, whose scores have biases by distance
besides."""

from __future__ import annotations

from headrace.back.layers.position_bias import RelativeBias
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames, build_bert
from headrace.back.models.encoder import Encoder, EncoderSizes
from headrace.back.models.roberta import first_token_head
from headrace.back.parallel.shard import Part
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(
    projections=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    after_attention="attention.LayerNorm",
    typed=False,
)
BUCKETS, FARTHEST = 32, 128
FIRST_POSITION = 2
"""Behind the padding id, which is always 1."""


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """MPNetModel, MPNetForSequenceClassification, MPNetForTokenClassification, MPNetForMaskedLM."""
    if config.int("relative_attention_num_buckets", BUCKETS) != BUCKETS:
        raise config.wrong("relative_attention_num_buckets", str(BUCKETS))
    return build_bert(
        scope,
        config,
        prefix="mpnet",
        first_position=FIRST_POSITION,
        head=first_token_head,
        names=NAMES,
        bias_of=_bias,
    )


def _bias(inside: Scope, sizes: EncoderSizes) -> RelativeBias:
    return RelativeBias(
        inside / "encoder" / "relative_attention_bias",
        Part("heads", sizes.heads, sizes.heads),
        buckets=BUCKETS,
        max_distance=FARTHEST,
        both_ways=True,
    )
