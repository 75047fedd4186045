"""LUKE and mLUKE (Yamada et al. 2020), over words alone: RoBERTa with token types. What it knows of
entities is not read."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bert import build_bert, pooler_head
from headrace.back.models.encoder import Encoder
from headrace.base.config.hf import ConfigReader

ENTITIES = (
    r"(luke\.)?entity_embeddings\..*",
    r"(.*\.)?attention\.self\.(w2e|e2w|e2e)_query\.(weight|bias)",
    r"entity_predictions\..*",
)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """LukeModel, LukeForSequenceClassification, LukeForTokenClassification, LukeForMaskedLM."""
    return build_bert(
        scope,
        config,
        prefix="luke",
        first_position=config.int("pad_token_id", 1, ge=0) + 1,
        head=pooler_head,
        ignored=ENTITIES,
    )
