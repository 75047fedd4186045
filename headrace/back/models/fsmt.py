"""FSMT: fairseq's translators of WMT19 (Ng et al. 2019), norms behind each branch alone, sines and
cosines as positions, and a vocabulary of each language."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.positions import SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, bart_spec
from headrace.back.models.encoder_decoder import EncoderDecoder, ReadSpec
from headrace.base.config.hf import ConfigReader

IGNORED = (
    r"model\.decoder\.output_projection\.weight",  # the decoder's embedding once more
    r"model\.(encoder|decoder)\.embed_positions\.weight",
)


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """FSMTForConditionalGeneration."""
    said = {
        "vocab_size": config.int("tgt_vocab_size", ge=1),
        "activation_function": config.raw.get("activation_function", "relu"),
        "scale_embedding": config.bool("scale_embedding", True),
        "tie_word_embeddings": True,
    }
    form = BartForm(pre=False, embedding_norm=False, logits_bias=False)
    first = config.int("pad_token_id", 1, ge=0) + 1
    reader = ConfigReader({**config.raw, **said}, config.where)
    positions = SinusoidalPositions(first=first, spread=1)
    spec = bart_spec(scope, reader, form, positions=positions)
    read = replace(spec.sizes, vocabulary=config.int("src_vocab_size", ge=1))
    return EncoderDecoder(
        scope,
        replace(
            spec,
            shared="decoder.embed_tokens",
            reads=ReadSpec(sizes=read, scale=spec.embedding_scale),
            ignored=IGNORED,
        ),
    )
