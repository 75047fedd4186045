"""Jina Embeddings v3 (Sturua et al. 2024): XLM-RoBERTa with rotary instead of learned positions.

Its adapters for tasks are adapters apart from the model, which embeds without one here, as
transformers' class does.
"""

from __future__ import annotations

from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP, PlainMLPSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import Encoder, EncoderSizes
from headrace.back.models.nomic_bert import RotaryBert, build_rotary_bert
from headrace.back.models.roberta import first_token_head
from headrace.base.config.hf import ConfigReader

ADAPTERS = r".*\.parametrizations\.weight\.\d+\.lora_[AB]"
_MLP = PlainMLPSpec(up="fc1", down="fc2", bias=True)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """JinaEmbeddingsV3Model, and its ForSequenceClassification, ForTokenClassification,
    ForMaskedLM, and XLMRobertaModel and its heads as Jina publishes them (published_keys.py), with
    adapters beside the weights that they change; the reranker's positions are learned."""
    stated = config.choice("position_embedding_type", ("rotary", "absolute"), "rotary")
    learned = stated == "absolute" and "use_flash_attn" in config
    kind = RotaryBert(
        prefix="roberta",
        attention="mixer",
        biased=True,
        theta=20_000.0,
        eps=1e-5,
        pools=False,
        mlp=_plain_mlp,
        head=first_token_head,
        first_position=config.int("pad_token_id", 1, ge=0) + 1 if learned else None,
        ignored=(ADAPTERS,),
        renamed=((r"\.parametrizations\.weight\.original$", ".weight"),),
    )
    return build_rotary_bert(scope, config, kind)


def _plain_mlp(scope: Scope, sizes: EncoderSizes, _: int) -> PlainMLP:
    activation = ElementwiseActivation(scope, sizes.activation)
    return PlainMLP(scope, _MLP, sizes.feed_forward, activation)
