"""ColBERT checkpoints as its authors store them: the projection beside the encoder's tensors
(`linear.weight`), and how texts become tokens in `artifact.metadata`. The other layout is that of
sentence-transformers (pooling_modules.py)."""

from __future__ import annotations

import string
from pathlib import Path

from headrace.back.models.pooling_families import COLBERTS
from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.pooling import DenseSpec, LateSpec
from headrace.base.config.safetensors_header import read_safetensors_header
from headrace.base.config.weight_files import find_weight_files
from headrace.base.errors import CheckpointError
from headrace.launch.pooling_modules import Modules

PROJECTIONS = ("linear.weight", "colbert_linear.weight")


def read_colbert(folder: Path, config: ConfigReader) -> Modules | None:
    """The projection, and the tokens of queries and documents; what is not said is as ColBERTv2 has
    it. None for any other checkpoint."""
    if not COLBERTS.intersection(config.list("architectures", (), of=str)[:1]):
        return None
    path = folder / "artifact.metadata"
    metadata = ConfigReader(read_json(path) if path.is_file() else {}, str(path))
    metadata.choice("similarity", ("cosine",), "cosine")
    masks = metadata.bool("attend_to_mask_tokens", False)
    punctuation = tuple(string.punctuation) if metadata.bool("mask_punctuation", True) else ()
    late = LateSpec(
        query_prefix=str(metadata.raw.get("query_token_id") or "[unused0]"),
        document_prefix=str(metadata.raw.get("doc_token_id") or "[unused1]"),
        query_tokens=metadata.int("query_maxlen", 32, ge=4, le=1 << 20),
        document_tokens=metadata.int("doc_maxlen", 220, ge=4, le=1 << 20),
        expands=masks,
        skipped=punctuation,
    )
    name, (outputs, inputs), bias = matrix_of(folder, *PROJECTIONS)
    dense = DenseSpec(
        path="",
        name=name.removesuffix(".weight"),
        inputs=inputs,
        outputs=outputs,
        bias=bias,
        of="every",
    )
    return Modules(how="tokens", normalize=True, dense=(dense,), late=late, unattended=not masks)


def matrix_of(folder: Path, *names: str) -> tuple[str, tuple[int, int], bool]:
    """Name and shape of the first of these matrices that the checkpoint has, and whether there is a
    bias beside it."""
    headers = [read_safetensors_header(file) for file in find_weight_files(folder).files]
    stored = {name: tensor for header in headers for name, tensor in header.items()}
    for name in names:
        tensor = stored.get(name)
        if tensor is not None and len(tensor.shape) == 2:
            biased = f"{name.removesuffix('.weight')}.bias" in stored
            return name, (tensor.shape[0], tensor.shape[1]), biased
    raise CheckpointError(f"{folder}: no matrix {' or '.join(names)}, which projects every token")
