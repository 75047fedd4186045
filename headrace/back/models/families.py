"""Architecture name in config.json -> family, and what else its name says: the head, and how its
tensors are named. Apart from `registry.py`, so that `launch` can ask without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.back.models import vlm_inside
from headrace.back.models.dense_families import DENSE
from headrace.back.models.encoder_families import (
    BIDIRECTIONAL,
    DECODERS_ALONE,
    EMBEDDERS,
    ENCODER_DECODERS,
    JUDGES,
    RERANKERS,
    SEES_BOTH_SIDES,
    TAGGERS,
    TEXT_ENCODERS,
)
from headrace.back.models.expert_families import EXPERTS
from headrace.back.models.media_families import WITH_MEDIA
from headrace.back.models.pooling_families import COLBERT, POOLERS, SEEING_POOLERS
from headrace.back.models.published_families import PUBLISHED
from headrace.back.models.recurrent_families import RECURRENT_DECODERS
from headrace.back.models.text_parts import BASES_WITHIN, TEXT_SECTIONS, TEXT_TYPES, WRAPPERS
from headrace.base import extensions
from headrace.base.config.ctc import is_ctc
from headrace.base.config.two_towers import is_two_towers
from headrace.base.errors import CheckpointError

TOWERS = "towers"
"""The head (`ModelSpec.head`) of a model of which the encoders of media are built alone."""
TABLE_READERS = ("kimia",)
"""Families whose towers add embeddings of tokens."""
FALLBACK = "transformers"
WIDTH = ("n_embd", "n_embed", "d_model", "dim", "emb_dim")
"""What `hidden_size` is called besides."""
HEADS = ("n_head", "n_heads", "num_heads", "attention_heads")
"""What `num_attention_heads` is called besides."""
ARCHITECTURES: Mapping[str, str] = {
    **DENSE,
    **EXPERTS,
    **RECURRENT_DECODERS,
    **PUBLISHED,
    **TEXT_ENCODERS,
}
BOTH_SIDES = "eurobert"
"""The family of decoders whose tokens see both sides."""
CAUSAL, MASKED, LM_HEAD = "ForCausalLM", "ForMaskedLM", "LMHeadModel"
_HEADS = {
    CAUSAL: "lm",
    "WithLMHeadModel": "none",
    "ForPreTraining": "none",
    LM_HEAD: "lm",
    MASKED: "none",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForProcessRewardModel": "token",
    "ForRewardModel": "sequence",
    "Model": "none",
}
_BASES = {
    name.removesuffix(CAUSAL).removesuffix(MASKED).removesuffix(LM_HEAD): family
    for name, family in ARCHITECTURES.items()
}
_BASES |= {"Gemma3Text": "gemma3", "Qwen3_5Text": "qwen3_5"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a class name says. `head`: lm, sequence, token or none. `bare`: the checkpoint is of the
    base model alone, whose tensor names lack the prefix. `within`: where the text part lies among
    others; `base_within`: where all of it but the head does, instead of below its prefix. `media`:
    the family builds the other parts too."""

    family: str
    head: str = "lm"
    bare: bool = False
    within: str = ""
    base_within: str = ""
    media: bool = False


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """By the first architecture a config.json names; what no row covers goes to the fallback."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        why = f"config.json: architectures is {names!r}; it must be a list of class names"
        raise CheckpointError(why, field="architectures")
    if names[0] in extensions.allowed(extensions.MODELS):
        return Architecture(family=names[0])
    if names[0] in ENCODER_DECODERS:
        return Architecture(family=ENCODER_DECODERS[names[0]])
    if names[0] in DECODERS_ALONE:
        return Architecture(family=DECODERS_ALONE[names[0]])
    if names[0] in JUDGES:
        return Architecture(family=JUDGES[names[0]], head="sequence")
    if names[0] in TAGGERS:
        return Architecture(family=TAGGERS[names[0]], head="token")
    if names[0] == COLBERT:
        turned = config.get("position_embedding_type") == "rotary"
        return Architecture(family="jina_embeddings_v3" if turned else "bert", head="none")
    if names[0] in POOLERS:
        family, head, bare = POOLERS[names[0]]
        return Architecture(family=family, head=head, bare=bare, media=names[0] in SEEING_POOLERS)
    if names[0] in BIDIRECTIONAL and config.get("use_bidirectional_attention"):
        return Architecture(family=BIDIRECTIONAL[names[0]], head="none", bare=True)
    if names[0] in PUBLISHED:
        return Architecture(family=PUBLISHED[names[0]])
    if names[0] in RERANKERS:
        family, bare = RERANKERS[names[0]]
        return Architecture(family=family, head="sequence", bare=bare)
    if names[0] in SEES_BOTH_SIDES and config.get("is_causal") is False:
        bare = names[0].endswith("Model")
        return Architecture(family=BOTH_SIDES, head="none", bare=bare)
    if names[0] in EMBEDDERS:
        family, within = EMBEDDERS[names[0]]
        return Architecture(family=family, head="none", bare=True, within=within)
    if names[0] in vlm_inside.LATE_VISION:
        return Architecture(family=vlm_inside.late_family(config), head="none", media=True)
    if is_two_towers(config):
        return Architecture(family="two_towers", head="none", media=True)
    if is_ctc(config):
        return Architecture(family="frame_labels", head="token", media=True)
    if names[0] in WITH_MEDIA:
        return Architecture(family=WITH_MEDIA[names[0]], media=True)
    text = config.get("text_config")
    within, base = WRAPPERS.get(names[0], ""), BASES_WITHIN.get(names[0], "")
    if (within or base) and isinstance(text, Mapping) and text.get("model_type") in TEXT_TYPES:
        family = TEXT_TYPES[text["model_type"]]
        return Architecture(family=family, within=within, base_within=base)
    for suffix, head in _HEADS.items():
        base = names[0].removesuffix(suffix)
        if base != names[0] and base in _BASES:
            return Architecture(family=_BASES[base], head=head, bare=suffix == "Model")
    return Architecture(family=FALLBACK)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the text part; whether its embeddings are tied, the whole model may say."""
    named = architecture_of(config)
    if vlm_inside.is_late_vision(config):
        return text_config(vlm_inside.inside_vlm(config))
    section = next((key for key in TEXT_SECTIONS if isinstance(config.get(key), Mapping)), None)
    apart = named.media and section is not None
    if not named.within and not named.base_within and not apart:
        return config
    over = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**config[section or "text_config"], **over}


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a config.json: that of the first architecture it names, else the fallback."""
    return architecture_of(config).family
