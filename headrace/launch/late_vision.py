"""Models that compare pages as images with queries, token by token: where their projection lies, and
the texts that their processors put around an image and into a query (transformers 5.23,
processing_colpali.py, processing_colqwen2.py; those of ColQwen 3 are ColQwen 2's)."""

from __future__ import annotations

from pathlib import Path

from headrace.back.models.vlm_inside import LATE_VISION, vlm_family
from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.resolved import DenseSpec, LateSpec
from headrace.launch.colbert import matrix_of
from headrace.launch.pooling_modules import Modules

PROJECTIONS = ("embedding_proj_layer", "custom_text_proj")
MAX_TOKENS = 1 << 20
AUGMENTATION = 10
"""Tokens behind a query that gather what it may mean besides."""
QWEN_IMAGE = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>"
)


def read_late_vision(folder: Path, config: ConfigReader) -> Modules | None:
    """The projection of every token, of the size that its weight has; None for any other
    checkpoint."""
    names = config.raw.get("architectures") or [""]
    if names[0] not in LATE_VISION:
        return None
    within = [f"{prefix}{name}" for name in PROJECTIONS for prefix in ("", "vlm.", "model.")]
    name, (outputs, inputs), bias = matrix_of(folder, *(f"{each}.weight" for each in within))
    dense = DenseSpec(
        path="",
        name=name.removesuffix(".weight"),
        inputs=inputs,
        outputs=outputs,
        bias=bias,
        activation="identity",
    )
    path = folder / "processor_config.json"
    processor = ConfigReader(read_json(path) if path.is_file() else {}, str(path))
    late = _forms(vlm_family(config.raw), processor)
    return Modules(how="tokens", normalize=True, dense=(dense,), late=late)


def _forms(family: str, processor: ConfigReader) -> LateSpec:
    if family == "paligemma":
        prompt = processor.str("visual_prompt_prefix", "Describe the image.")
        image = f"<image><bos>{prompt}\n"
        query = f"<bos>{processor.str('query_prefix', 'Question: ')}{{}}{'<pad>' * AUGMENTATION}\n"
    else:
        image = processor.str("visual_prompt_prefix", QWEN_IMAGE)
        ending = "<|endoftext|>" * AUGMENTATION
        query = f"{processor.str('query_prefix', 'Query: ')}{{}}{ending}\n"
    return LateSpec(
        query_tokens=MAX_TOKENS, document_tokens=MAX_TOKENS, query_form=query, image_form=image
    )
