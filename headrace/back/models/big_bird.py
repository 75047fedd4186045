"""BigBird (Zaheer et al. 2020) for texts of up to so many tokens that every one sees all: BERT.

Longer ones, whose tokens see blocks around them, at the ends and at random, are refused: the
context is what can be read whole.
"""

from __future__ import annotations

from functools import partial

from headrace.back.layers.scope import Scope
from headrace.back.models.bert import build_bert
from headrace.back.models.encoder import Encoder
from headrace.back.models.roberta import first_token_head
from headrace.base.config.hf import ConfigReader

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """BigBirdModel, BigBirdForSequenceClassification, BigBirdForTokenClassification,
    BigBirdForMaskedLM."""
    for key, needed in (("use_bias", True), ("rescale_embeddings", False)):
        if config.bool(key, needed) is not needed:
            raise config.wrong(key, str(needed).lower())
    config.choice("attention_type", ("block_sparse", "original_full"), "block_sparse")
    named = config.choice("hidden_act", ACTIVATIONS, "gelu_new")
    reader = ConfigReader({**config.raw, "hidden_act": named}, config.where)
    return build_bert(
        scope,
        reader,
        prefix="bert",
        first_position=0,
        head=partial(first_token_head, activation=ACTIVATIONS[named]),
    )
