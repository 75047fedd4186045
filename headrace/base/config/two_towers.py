"""CLIP, MetaCLIP 2, SigLIP and SigLIP 2 as their config.json has them: what it leaves out, and how
a text and an image become what the two towers read. Without torch, so that launch can ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.config.ctc import with_encoder_sizes

_CLIP_TEXT = {
    **{"vocab_size": 49_408, "hidden_size": 512, "intermediate_size": 2048},
    **{"num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77},
    **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
_CLIP_VISION = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "image_size": 224, "patch_size": 32},
    **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
_SIGLIP_TEXT = {
    **{"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072},
    **{"num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 64},
    **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "pad_token_id": 1},
}
_SIGLIP_VISION = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "image_size": 224, "patch_size": 16},
    **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
TWO_TOWERS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "CLIPModel": (_CLIP_TEXT, _CLIP_VISION),
    "MetaClip2Model": (_CLIP_TEXT, _CLIP_VISION),
    "SiglipModel": (_SIGLIP_TEXT, _SIGLIP_VISION),
    "Siglip2Model": (_SIGLIP_TEXT, {**_SIGLIP_VISION, "image_size": None, "num_patches": 256}),
}
"""What the text's and the image's sections say by default, by architecture (transformers 5.23)."""


def is_two_towers(config: Mapping[str, Any]) -> bool:
    """Whether a config is of such a model."""
    return (config.get("architectures") or [""])[0] in TWO_TOWERS


def is_clip(config: Mapping[str, Any]) -> bool:
    """Whether such a model's texts are read left to right, and its images have a class token."""
    return config["architectures"][0] in ("CLIPModel", "MetaClip2Model")


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what its sections leave out, and that of a model that labels frames with its
    sizes (ctc.py); any other as it is. `text_config_dict` and
    `vision_config_dict` of older files go before their sections."""
    if not is_two_towers(config):
        return with_encoder_sizes(config)
    sections = dict[str, Any]()
    for key, default in zip(("text_config", "vision_config"), _defaults(config), strict=True):
        stated = {**(config.get(key) or {}), **(config.get(f"{key}_dict") or {})}
        sections[key] = {**default, **stated}
    return {**config, **sections}


def _defaults(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return TWO_TOWERS[config["architectures"][0]]


def padding_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """To how many tokens a text is filled up, and with which; (0, 0): it is not. SigLIP's texts
    were filled up in training, and the filling is seen (Zhai et al. 2023, section 4)."""
    if is_clip(config):
        return 0, 0
    text = config["text_config"]
    return text["max_position_embeddings"], text.get("pad_token_id", 1)
