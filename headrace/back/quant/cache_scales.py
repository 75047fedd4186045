"""Scales of KV caches that a checkpoint holds, for the attention layers to find by their names.

An fp8 cache uses them: keys and values become e4m3 numbers in units of these, instead of a scale
that each token and head finds for itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.shard import Part, Shard
from headrace.base.errors import CheckpointError

FORM = "fp8"
"""The form of a cache that they are for."""
_LAYER = re.compile(r".*\.(layers\.\d+\..+)")


class CacheScales:
    """Attention module -> its scales of keys ("k") and values ("v"): float32, one for all heads or
    one for each. `where` names the checkpoint."""

    def __init__(self, by_module: Mapping[str, Mapping[str, torch.Tensor]], where: str) -> None:
        self._by_module, self._where = by_module, where
        self._asked: set[str] = set()

    def __len__(self) -> int:
        return sum(len(halves) for halves in self._by_module.values())

    def of(self, path: str, kv_heads: int, axis: Axis) -> torch.Tensor | None:
        """[2, K] of the attention at `path`, of this rank's KV heads; None: it has none. Names
        differ in what stands before the layers."""
        module = self._module_of(path)
        if module is None:
            return None
        self._asked.add(module)
        scales = self._by_module[module]
        if set(scales) != {"k", "v"}:
            raise CheckpointError(
                f"{self._where}: {module} has a scale of its KV cache for "
                f"{' and '.join(sorted(scales))} alone; it must be for k and v"
            )
        heads = Shard(axis="tp", dim=0, parts=(Part("heads", kv_heads, kv_heads),))
        cuts = [slice(span.start, span.start + span.size) for span in heads.spans(axis)]
        both = [self._of_heads(module, half, scales[half], kv_heads) for half in ("k", "v")]
        return torch.stack([torch.cat([one[cut] for cut in cuts]) for one in both])

    def _module_of(self, path: str) -> str | None:
        if path in self._by_module:
            return path
        tail = _tail(path)
        modules = [module for module in self._by_module if tail and _tail(module) == tail]
        return modules[0] if len(modules) == 1 else None

    def _of_heads(self, module: str, half: str, scale: torch.Tensor, heads: int) -> torch.Tensor:
        if scale.numel() not in (1, heads):
            raise CheckpointError(
                f"{self._where}: the {half} scale of the KV cache of {module} has the shape "
                f"{list(scale.shape)}; it must be one, or one for each of {heads} KV heads"
            )
        return scale.reshape(-1).expand(heads)

    def check_all_asked(self, ignored: tuple[str, ...]) -> None:
        """That each belongs to an attention of the model that takes it, or to what it ignores."""
        patterns = [re.compile(pattern) for pattern in ignored]
        for module in sorted(self._by_module.keys() - self._asked):
            if not any(pattern.fullmatch(f"{module}.k_scale") for pattern in patterns):
                raise CheckpointError(
                    f"{self._where}: {module} has scales of its KV cache, but no attention of the "
                    "model takes them; --kv-dtype int8 and auto need none",
                    field="kv_dtype",
                )


def _tail(path: str) -> str:
    match = _LAYER.fullmatch(f".{path}")
    return match[1] if match else ""
