"""ColPali, ColQwen 2 and 2.5, ColQwen 3: a vision-language model whose head is a projection of each
token, by which images of pages and queries are compared token by token (Faysse et al. 2024). The
projection is read with the pooling (load/dense.py)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.vlm_inside import inside_vlm, vlm_family
from headrace.base.config.hf import ConfigReader

PROJECTIONS = (r"(.*\.)?(embedding_proj_layer|custom_text_proj)\..*",)
VLM = r"(?:vlm\.)?(?:model\.)?"
LAYOUTS = {
    "qwen2_vl": (
        (VLM + r"(visual\..*)", r"vlm.\1"),
        (VLM + r"(?:language_model\.)?((?:layers|embed_tokens|norm)\b.*)", r"vlm.model.\1"),
    ),
    "qwen3_vl": ((VLM + r"((?:visual|language_model)\..*)", r"vlm.model.\1"),),
    "paligemma": (
        (VLM + r"((?:vision_tower|multi_modal_projector)\..*)", r"vlm.\1"),
        (VLM + r"language_model\.(?:model\.)?(.*)", r"vlm.language_model.model.\1"),
    ),
}
"""How checkpoints name the tensors of the model inside: below `vlm`, `vlm.model`, `model` or
nothing."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """ColPaliForRetrieval, ColQwen2ForRetrieval, ColQwen3 and OpsColQwen3Model."""
    from headrace.back.models.registry import FAMILIES

    inside = ConfigReader(inside_vlm(config.raw), f"{config.where}: vlm_config")
    family = vlm_family(config.raw)
    decoder = FAMILIES.load(family)(scope / "vlm", inside)
    assert isinstance(decoder, Decoder), family
    weights = decoder.weights
    decoder.weights = replace(
        weights,
        renamed=(*weights.renamed, *LAYOUTS[family]),
        ignored=(*weights.ignored, *PROJECTIONS, r"(.*\.)?lm_head\..*"),
    )
    return decoder
