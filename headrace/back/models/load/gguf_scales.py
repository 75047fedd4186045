"""Numbers that whole matrices of a GGUF file are multiplied with, in tensors of their own: beside
`blk.0.attn_q.weight` `blk.0.attn_q.scale`, of experts one for each (NVFP4's second scale, BitNet's
one). `input_scale` is of inputs, which are not rounded.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headrace.base.config.gguf import GGUFFile, GGUFTensor
from headrace.base.errors import CheckpointError

Factors = npt.NDArray[np.float32]
_ENDING, _OF_INPUTS = ".scale", ".input_scale"


class OuterScales:
    """`names`: the tensors that hold them, which are no weights. `kept`: those that a model knows
    by a name of its own."""

    def __init__(self, file: GGUFFile, kept: frozenset[str]) -> None:
        self._factors: dict[str, tuple[GGUFTensor, Factors]] = {}
        names = set()
        for name in file.tensors.keys() - kept:
            ending = _OF_INPUTS if name.endswith(_OF_INPUTS) else _ENDING
            weight = file.tensors.get(f"{name.removesuffix(ending)}.weight")
            if not name.endswith(ending) or weight is None:
                continue
            names.add(name)
            if ending == _ENDING:
                self._factors[weight.name] = weight, _factors(file, name, weight)
        self.names = frozenset(names)

    def of(self, tensor: GGUFTensor) -> Factors | None:
        """Of each matrix that lies in a tensor, or in a part of one; None: there are none."""
        if tensor.name not in self._factors:
            return None
        whole, factors = self._factors[tensor.name]
        if len(factors) == 1 or tensor.num_bytes == whole.num_bytes:
            return factors
        first = (tensor.offset - whole.offset) // tensor.num_bytes
        return factors[first : first + 1]

    def multiply(self, tensor: GGUFTensor, values: Factors) -> Factors:
        """Values of a tensor, or of rows of its only matrix."""
        factors = self.of(tensor)
        if factors is None:
            return values
        return (values.reshape(len(factors), -1) * factors[:, None]).reshape(values.shape)


def _factors(file: GGUFFile, name: str, weight: GGUFTensor) -> Factors:
    count = weight.shape[0] if len(weight.shape) == 3 else 1
    stored = file.floats(name)
    if len(stored) not in (1, count) or not all(math.isfinite(one) for one in stored):
        forms = "one number" if count == 1 else f"one number or {count}"
        raise CheckpointError(
            f"{file.paths[0]}: tensor {name} holds {len(stored)} numbers (the first {stored[:1]}); "
            f"{weight.name} has the shape {weight.shape}: it must be {forms}, finite"
        )
    return np.array(stored, np.float32)
