"""How layers share the KV memory: grouping (a pure function), the size of a block, the number of blocks, the tensors.

Layers with one kind of cache (full, or one window size) form groups of equal size; the i-th layer of every group lives
in KV tensor i, so that one pool of blocks serves all groups and a group of a request takes its own blocks from it.
A group that is short of layers leaves its part of the last tensors unused: that is the waste the group size minimises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.attention.kv_layer import KVLayer
from headrace.back.kernels.kv_write.coded import codes_and_scales
from headrace.base.config.resolved import KVSpec
from headrace.base.errors import ConfigError
from headrace.base.wire.step import KVGroup

MAX_GROUPS = 8
"""Each group costs a block table per row and an attention plan per step; more groups are not worth less waste."""


def group_layers(layers: Sequence[KVLayer]) -> tuple[KVGroup, ...]:
    """Splits the layers into groups of one kind and nearly one size; full attention first, then by rising window.

    The size wastes the fewest padded layers among those that give at most MAX_GROUPS groups (or as few groups as there
    are kinds); of equal ones the largest, hence the fewest groups.
    """
    if not layers:
        return ()
    kinds: dict[int, list[int]] = {}
    for layer in layers:
        kinds.setdefault(layer.window or 0, []).append(layer.layer)
    size = _group_size([len(members) for members in kinds.values()])
    return tuple(
        KVGroup(
            kind="window" if window else "full",
            layers=tuple(kinds[window][start : start + size]),
            window=window or None,
        )
        for window in sorted(kinds)
        for start in range(0, len(kinds[window]), size)
    )


def _group_size(counts: list[int]) -> int:
    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    most = max(MAX_GROUPS, len(counts))
    sizes = [size for size in range(1, max(counts) + 1) if groups(size) <= most]
    return min(sizes, key=lambda size: (groups(size) * size - sum(counts), -size))


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Where each layer's cache lies. `elements[i]`: elements of a block of KV tensor i (its largest layer's)."""

    groups: tuple[KVGroup, ...]
    elements: tuple[int, ...]
    block_tokens: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all KV tensors."""
        return sum(self.elements) * self.dtype.itemsize

    @property
    def group_of_layer(self) -> dict[int, int]:
        """Layer -> index of its group."""
        return {layer: i for i, group in enumerate(self.groups) for layer in group.layers}


def lay_out(layers: Sequence[KVLayer], *, block_tokens: int, dtype: torch.dtype) -> KVLayout:
    """The layout of the KV cache for these layers; `dtype` is that of those that are not coded."""
    groups = group_layers(layers)
    assert len({layer.coded for layer in layers}) <= 1, "either all layers are coded or none"
    if any(layer.coded for layer in layers):
        dtype = torch.int8
    numel = {layer.layer: 2 * layer.kv_heads * block_tokens * layer.token_width for layer in layers}
    size = max((len(group.layers) for group in groups), default=0)
    elements = tuple(
        max(numel[group.layers[i]] for group in groups if i < len(group.layers))
        for i in range(size)
    )
    return KVLayout(groups=groups, elements=elements, block_tokens=block_tokens, dtype=dtype)


def count_blocks(spec: KVSpec, layout: KVLayout) -> int:
    """The number of blocks, block 0 (null, nobody's) included; a pool too small for one token is refused."""
    if spec.num_blocks is not None:
        num_blocks = spec.num_blocks
    else:
        assert spec.memory_bytes is not None, "KVSpec has neither num_blocks nor memory_bytes"
        num_blocks = spec.memory_bytes // layout.block_bytes
    least = 1 + len(layout.groups)
    if num_blocks < least:
        raise ConfigError(
            f"the KV cache holds {num_blocks} blocks of {layout.block_bytes} bytes; at least {least} are needed: "
            f"raise --kv-memory to {least * layout.block_bytes} bytes or more (or --kv-blocks to {least})",
            field="kv_memory",
        )
    return num_blocks


GRAPH_BYTES = 1 << 30
"""Kept free for what recorded graphs take beside their shared pool of activations."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What the largest step has shown of a device, in bytes. held: allocated between steps, so weights and tables;
    step: what the step took on top at its peak; free: what the device has left with nothing cached."""

    held: int
    step: int
    free: int


def fit_kv(profile: Profile, *, budget: int, wanted: int, least: int) -> int:
    """Bytes for the KV cache: `wanted`, or what is left of the budget once the step has its memory twice (launched, and
    in the graphs' pool). ConfigError if that is less than `least`."""
    taken = profile.held + 2 * profile.step + GRAPH_BYTES
    room = min(budget - taken, profile.free - 2 * profile.step - GRAPH_BYTES)
    if room < least:
        gib = 1 << 30
        raise ConfigError(
            f"{(least - room) / gib:.1f} GiB more are needed on the device for a KV cache of {least / gib:.2f} GiB: "
            f"of {budget / gib:.1f} GiB the weights and tables take {profile.held / gib:.1f}, and the largest step "
            f"{2 * profile.step / gib:.1f}. Lower --max-step-tokens or --max-model-len, raise --gpu-memory, or use "
            "--tensor-parallel 2",
            field="gpu_memory",
        )
    return min(wanted, room)


class KVMemory:
    """The KV tensors. `layers[l]` is layer l's view [num_blocks, 2, kv_heads, block_tokens, head_dim] (of coded
    layers the token width in place of head_dim).

    Zeroed at start: a masked position may be multiplied by an attention weight of zero but never be NaN.
    """

    def __init__(
        self, layers: Sequence[KVLayer], layout: KVLayout, *, num_blocks: int, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.tensors = tuple(
            _zeros(num_blocks, elements, dtype=layout.dtype, device=device)
            for elements in layout.elements
        )
        index = {layer: i for group in layout.groups for i, layer in enumerate(group.layers)}
        ordered = sorted(layers, key=lambda layer: layer.layer)
        assert [layer.layer for layer in ordered] == list(range(len(ordered))), ordered
        self.layers = tuple(
            _view(self.tensors[index[layer.layer]], layer, layout.block_tokens) for layer in ordered
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all KV tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def release(self) -> None:
        """Gives the memory back, also where a kernel still holds a view; on a CPU it goes with the last view."""
        for tensor in self.tensors:
            if tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)

    def scrub(self, blocks: torch.Tensor) -> None:
        """Replaces what is not finite in these blocks by 0 and leaves every finite value, so that a failed row leaves
        nothing behind for the blocks' next owner (reliability 1.15). `blocks` int64 [B]."""
        if self.tensors and self.tensors[0].dtype == torch.int8:
            self._scrub_scales(blocks)
            return
        for tensor in self.tensors:
            clean = tensor.index_select(0, blocks).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            tensor.index_copy_(0, blocks, clean)

    def _scrub_scales(self, blocks: torch.Tensor) -> None:
        """The same for codes: only scales can be anything but finite."""
        for layer in self.layers:
            scales = codes_and_scales(layer)[1]
            scales[blocks] = scales[blocks].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _zeros(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [rows, columns]. On a CPU by calloc: pages nobody has written cost no memory and no time at start."""
    if device.type != "cpu":
        return torch.zeros((rows, columns), dtype=dtype, device=device)
    raw = np.zeros(rows * columns * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(rows, columns)


def _view(tensor: torch.Tensor, layer: KVLayer, block_tokens: int) -> torch.Tensor:
    shape = (2, layer.kv_heads, block_tokens, layer.token_width)
    numel = 2 * layer.kv_heads * block_tokens * layer.token_width
    return tensor[:, :numel].unflatten(1, shape)
