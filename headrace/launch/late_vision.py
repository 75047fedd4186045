"""Models that compare pages as images with queries, token by token: where their projection lies,
and the texts that their processors put around an image and into a query."""

from __future__ import annotations

from pathlib import Path

from headrace.back.models.vlm_inside import is_late_vision, late_forms, late_is_encoder
from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.pooling import DenseSpec, LateSpec
from headrace.launch.colbert import matrix_of
from headrace.launch.pooling_modules import Modules

PROJECTIONS = ("embedding_proj_layer", "custom_text_proj")
MAX_TOKENS = 1 << 20


def read_late_vision(folder: Path, config: ConfigReader) -> Modules | None:
    """The projection of every token, of the size that its weight has; None for any other
    checkpoint."""
    if not is_late_vision(config.raw):
        return None
    within = [f"{prefix}{name}" for name in PROJECTIONS for prefix in ("", "vlm.", "model.")]
    name, (outputs, inputs), bias = matrix_of(folder, *(f"{each}.weight" for each in within))
    dense = DenseSpec(
        path="",
        name=name.removesuffix(".weight"),
        inputs=inputs,
        outputs=outputs,
        bias=bias,
        of="every",
    )
    path = folder / "processor_config.json"
    processor = ConfigReader(read_json(path) if path.is_file() else {}, str(path))
    query, image = late_forms(
        config.raw,
        prompt=processor.str("visual_prompt_prefix", None),
        prefix=processor.str("query_prefix", None),
    )
    late = LateSpec(
        query_tokens=MAX_TOKENS,
        document_tokens=MAX_TOKENS,
        query_form=query,
        image_form=image,
        adds_special=late_is_encoder(config.raw),
    )
    return Modules(how="tokens", normalize=True, dense=(dense,), late=late)
