"""ERNIE 1 to 3 (Sun et al. 2021): BERT whose tokens may be told their task besides."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bert import build_bert, pooler_head
from headrace.back.models.encoder import Encoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """ErnieModel, ErnieForSequenceClassification, ErnieForTokenClassification,
    ErnieForMaskedLM."""
    tasks = config.int("task_type_vocab_size", 3, ge=1)
    return build_bert(
        scope,
        config,
        prefix="ernie",
        first_position=0,
        head=pooler_head,
        num_tasks=tasks if config.bool("use_task_id", False) else 0,
    )
