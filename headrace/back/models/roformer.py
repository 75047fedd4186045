"""RoFormer (Su et al. 2021): BERT with pairs of neighbours rotated instead of learned positions,
over embeddings that may be narrower than its layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames, build_bert
from headrace.back.models.encoder import Encoder, EncoderSizes, SpanAttentionLayer
from headrace.back.models.roberta import first_token_head
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(wide="embeddings_project")


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """RoFormerModel, RoFormerForSequenceClassification, RoFormerForTokenClassification,
    RoFormerForMaskedLM."""
    if config.bool("rotary_value", False):
        raise config.wrong("rotary_value", "false")

    def attention_of(inside: Scope, sizes: EncoderSizes) -> Callable[[Scope], SpanAttentionLayer]:
        rope = read_rope(
            config, head_dim=sizes.head_dim, max_positions=scope.max_positions, layout="pairs"
        )
        return lambda at: SpanAttentionLayer(
            at, sizes, names=NAMES.projections, out=NAMES.out, rope=rope
        )

    return build_bert(
        scope,
        config,
        prefix="roformer",
        first_position=None,
        head=partial(first_token_head, activation="gelu"),
        names=NAMES,
        attention_of=attention_of,
    )
