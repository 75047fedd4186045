"""What the files of a checkpoint hold, told by their headers: parameters, bytes and types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.base.config.checkpoint_parts import all_weight_files
from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_types import KEPT_BITS
from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.config.quantized_tensors import QuantizedTensor, find_quantized
from headrace.base.config.safetensors_header import StoredTensor
from headrace.base.config.tensorizer_header import read_weights_header

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What the files hold: parameters, bytes, and the dtype most bytes have (None: quantized or
    mixed)."""

    num_params: int
    num_bytes: int
    dtype: str | None


def safetensors_stored(folder: Path, config: Mapping[str, Any]) -> Stored:
    """Of all weight files of a folder."""
    headers: dict[str, StoredTensor] = {}
    files = all_weight_files(folder, config)
    for path in files.files:
        prefix = files.prefixes.get(path, "")
        headers |= {prefix + name: one for name, one in read_weights_header(path).items()}
    quantization = stored_quantization(config, f"{folder}/config.json")
    if quantization is None:
        return _stored(headers.values())
    tensors = find_quantized(
        quantization, headers, lambda name: _content(headers[name]), str(folder)
    )
    hidden = tensors.claimed | tensors.activation_scales
    plain = _stored(tensor for name, tensor in headers.items() if name not in hidden)
    count = sum(math.prod(weight.shape) for weight in tensors.weights.values())
    dtype_bytes = DTYPE_BYTES[plain.dtype or "bfloat16"]
    kept = sum(_in_memory(one, headers, dtype_bytes) for one in tensors.weights.values())
    return Stored(
        num_params=plain.num_params + count, num_bytes=plain.num_bytes + kept, dtype=plain.dtype
    )


def gguf_stored(file: GGUFFile) -> Stored:
    """Of a GGUF file, whose types are its own; narrow ones take more once loaded."""
    tensors = file.tensors.values()
    kept = (
        math.prod(tensor.shape) * KEPT_BITS[tensor.type.name] / 8 - tensor.num_bytes
        for tensor in tensors
        if tensor.type.name in KEPT_BITS
    )
    return Stored(
        num_params=sum(math.prod(tensor.shape) for tensor in tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors) + int(sum(kept)),
        dtype=None,
    )


def _in_memory(
    weight: QuantizedTensor, headers: Mapping[str, StoredTensor], dtype_bytes: int
) -> int:
    """About what a quantized weight takes once loaded: as stored, or as floats where no device's
    kernels read it (which ones this device has, the workers see)."""
    if not weight.stays_quantized:
        return math.prod(weight.shape) * dtype_bytes
    # kernels' scales take more than stored ones: of MXFP4 2 bytes for 1
    wider = 1.07 * weight.kept_bits / weight.numbers.bits
    if "bitmask" in weight.members:
        wider *= 2  # half of the numbers are stored
    return int(sum(headers[name].num_bytes for name in set(weight.members.values())) * wider)


def _content(tensor: StoredTensor) -> bytes:
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.num_bytes)


def _stored(tensors: Iterable[StoredTensor]) -> Stored:
    sizes: dict[str, int] = {}
    count = 0
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
        count += math.prod(tensor.shape)
    most = max(sizes, key=lambda name: sizes[name], default="")
    return Stored(num_params=count, num_bytes=sum(sizes.values()), dtype=_STORED_DTYPES.get(most))
