"""BigBird (Zaheer et al. 2020): BERT that attends in blocks over texts that are too long for every
token to see all (bigbird_pegasus.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BERT, build_bert
from headrace.back.models.bigbird_pegasus import BlockSparseAttention, read_blocks
from headrace.back.models.encoder import Encoder, EncoderSizes, TokenLayer
from headrace.back.models.roberta import first_token_head
from headrace.base.config.hf import ConfigReader

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """BigBirdModel, BigBirdForSequenceClassification, BigBirdForTokenClassification,
    BigBirdForMaskedLM."""
    for key, needed in (("use_bias", True), ("rescale_embeddings", False)):
        if config.bool(key, needed) is not needed:
            raise config.wrong(key, str(needed).lower())
    blocks = read_blocks(config)

    def attention_of(inside: Scope, sizes: EncoderSizes) -> Callable[[Scope], TokenLayer]:
        assert blocks is not None
        return partial(
            BlockSparseAttention, sizes=sizes, blocks=blocks, names=BERT.projections, out=BERT.out
        )

    named = config.choice("hidden_act", ACTIVATIONS, "gelu_new")
    reader = ConfigReader({**config.raw, "hidden_act": named}, config.where)
    return build_bert(
        scope,
        reader,
        prefix="bert",
        first_position=0,
        head=partial(first_token_head, activation=ACTIVATIONS[named]),
        attention_of=None if blocks is None else attention_of,
    )
