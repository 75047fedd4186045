"""Models around a model of another family, and the config of the model inside: those that compare
images and texts token by token, and those that speak what a thinker has written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import CheckpointError

LATE_VISION = frozenset(
    {"ColPaliForRetrieval", "ColQwen2ForRetrieval", "ColQwen2_5", "ColQwen3", "OpsColQwen3Model"}
    | {"ColModernVBertForRetrieval"}
)
INSIDE: Mapping[str, str] = {
    "paligemma": "PaliGemmaForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "modernvbert": "ModernVBertModel",
}
"""The architecture of the model inside, by its family."""
TYPES: Mapping[str, str] = {
    "paligemma": "paligemma",
    "colpali": "paligemma",
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_vl",
    "colqwen2": "qwen2_vl",
    "colqwen2_5": "qwen2_vl",
    "qwen3_vl": "qwen3_vl",
    "colqwen3": "qwen3_vl",
    "ops_colqwen3": "qwen3_vl",
    "modernvbert": "modernvbert",
    "colmodernvbert": "modernvbert",
}
"""Its family, by its `model_type`, or by that of a config that is both models'."""


AUGMENTATION = 10
"""Tokens behind a query that gather what it may mean besides."""
MODERNVBERT_IMAGE = "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"
QWEN_IMAGE = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>"
)


_QWEN2_5_OMNI = ("Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_thinker")
THINKERS: Mapping[str, tuple[str, str]] = {
    "Qwen2_5OmniModel": _QWEN2_5_OMNI,
    "Qwen2_5OmniForConditionalGeneration": _QWEN2_5_OMNI,
    "Qwen3OmniMoeForConditionalGeneration": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "qwen3_omni_moe_thinker",
    ),
    "Qwen3ASRForConditionalGeneration": ("Qwen3ASRForConditionalGeneration", "qwen3_asr"),
}
"""Architecture and `model_type` of the part that answers in text, which alone is served, of
checkpoints that have its config as a section."""
OF_ALL_PARTS = ("quantization_config", "torch_dtype", "dtype", "tie_word_embeddings")


def late_family(config: Mapping[str, Any]) -> str:
    """The family that builds one of LATE_VISION: an encoder is of its own, around a decoder there
    is one for all."""
    return "modernvbert" if late_is_encoder(config) else "late_vision"


def late_is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether an encoder of text stands behind what sees: its tokenizer's own tokens belong around
    a text."""
    return vlm_family(config) == "modernvbert"


def thinker_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the part that answers in text, or the config itself where it has no such
    section."""
    inside, names = config.get("thinker_config"), config.get("architectures") or [""]
    if not isinstance(inside, Mapping) or names[0] not in THINKERS:
        return dict(config)
    shared = {key: config[key] for key in OF_ALL_PARTS if key in config}
    architecture, kind = THINKERS[names[0]]
    return {**shared, **inside, "architectures": [architecture], "model_type": kind}


def is_late_vision(config: Mapping[str, Any]) -> bool:
    """Whether a config is of such a model."""
    names = config.get("architectures") or [""]
    return names[0] in LATE_VISION


def late_forms(
    config: Mapping[str, Any], *, prompt: str | None, prefix: str | None
) -> tuple[str, str]:
    """What a query becomes, whose place {} keeps, and the text around an image; `prompt`, `prefix`:
    as the checkpoint's processor states them (transformers 5.23, processing_colpali.py,
    processing_colqwen2.py)."""
    if vlm_family(config) == "modernvbert":
        query = f"{prefix or ''}{{}}{'<end_of_utterance>' * AUGMENTATION}"
        return query, prompt or MODERNVBERT_IMAGE
    if vlm_family(config) == "paligemma":
        query = f"<bos>{prefix or 'Question: '}{{}}{'<pad>' * AUGMENTATION}\n"
        return query, f"<image><bos>{prompt or 'Describe the image.'}\n"
    query = f"{prefix or 'Query: '}{{}}{'<|endoftext|>' * AUGMENTATION}\n"
    return query, prompt or QWEN_IMAGE


def inside_vlm(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the model inside one of LATE_VISION, named as its class."""
    inside, family = config.get("vlm_config"), vlm_family(config)
    if not isinstance(inside, Mapping):
        return {**config, "architectures": [INSIDE[family]], "model_type": family}
    return {**inside, "architectures": [INSIDE[family]]}


def vlm_family(config: Mapping[str, Any]) -> str:
    """The family of the model inside."""
    inside = config.get("vlm_config")
    kind = (inside if isinstance(inside, Mapping) else config).get("model_type")
    if kind not in TYPES:
        raise CheckpointError(
            f"config.json: vlm_config.model_type is {kind!r}; known: {', '.join(TYPES)}",
            field="vlm_config",
        )
    return TYPES[kind]
