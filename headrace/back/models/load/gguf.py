"""GGUF checkpoints as a source: tensors under the names transformers gives them, dequantized to
floats as they are copied.

The file stays mapped; a tensor is dequantized in chunks of rows straight into the model's memory,
so a quantized model never exists twice. Three conventions of GGUF are undone: names, the
interleaved rows of query and key projections, and the 1 that is added to Gemma's norms.
"""

from __future__ import annotations

import math
import mmap
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from headrace.back.models.load.gguf_dequant import DEQUANTIZE
from headrace.back.models.load.gguf_dialect import Dialect, Joined, stated_numbers
from headrace.back.models.load.gguf_dialects import dialect_of
from headrace.back.models.load.gguf_heads import RowOrder
from headrace.back.models.load.gguf_scales import OuterScales
from headrace.back.models.load.source import HOST, CheckpointTensor
from headrace.back.parallel.param import StoredRows
from headrace.back.quant.formats.groups import Groups
from headrace.back.quant.gguf_kept import KEPT_TYPES
from headrace.base.config.gguf import GGUFFile, GGUFTensor, read_gguf
from headrace.base.config.gguf_config import gguf_config
from headrace.base.config.quantization import Numbers
from headrace.base.errors import CheckpointError

CHUNK_ELEMENTS = 1 << 20
"""Elements dequantized at once: 4 MB of float32, about what a core's cache holds."""
TABLE = "I32"
"""The type of tables of whole numbers."""
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Rotary factors: part of the configuration (`gguf_config`), not weights."""


class GGUFSource:
    """An opened GGUF model (all files of a split one)."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        file = read_gguf(path)
        config = gguf_config(file)
        self._heads = (config.get("num_attention_heads", 0), config.get("num_key_value_heads", 0))
        self._kv_heads: list[int] = config.get("num_key_value_heads_per_layer", [])
        self._dialect = dialect_of(str(file.text("general.architecture")), file.tensors)
        order = self._dialect.order
        self._order: RowOrder | None = None if order is None else order(config)
        _refuse_types(file)
        known = frozenset(name for name in file.tensors if _new_name(name, self._dialect) != name)
        self._outer = OuterScales(file, known)
        self._tensors = {
            name: tensor
            for name, tensor in _renamed(
                file, self._dialect, config.get("num_hidden_layers", 0)
            ).items()
            if tensor.name not in self._outer.names
        }
        places = {part: number for number, part in enumerate(file.paths)}
        self.entries: dict[str, CheckpointTensor] = {
            name: CheckpointTensor(
                shape=tensor.shape,
                dtype=self._kept_as(name, tensor),
                where=str(tensor.path),
                order=(places[tensor.path], tensor.offset),
                dequantized=tensor.type.name != TABLE,
                squeezed=True,
                scheme=self._scheme(name, tensor),
            )
            for name, tensor in self._tensors.items()
        }
        self._joined = _joined(file, self._dialect)
        self.entries |= {
            name: CheckpointTensor(
                shape=_shape_of(joined, parts),
                dtype=self._joined_type(joined, parts),
                where=str(parts[0].path),
                order=(places[parts[0].path], parts[0].offset),
                dequantized=True,
            )
            for name, (joined, parts) in self._joined.items()
        }
        self._stated = stated_numbers(file, self._dialect)
        self.entries |= {
            name: CheckpointTensor(shape=(1,), dtype="F32", where=str(path), squeezed=True)
            for name in self._stated
        }
        self._maps = {part: mapped(part) for part in file.paths}

    def copy(
        self, name: str, shape: tuple[int, ...], source: tuple[slice, ...], target: torch.Tensor
    ) -> None:
        """Dequantizes the wanted rows to float32, chunk by chunk, and writes them in the target's
        dtype."""
        if name in self._joined:
            target.copy_(torch.from_numpy(self._join(name))[source])
            return
        if name in self._stated:
            target.fill_(self._stated[name])
            return
        tensor = self._tensors[name]
        rows_of = self._blocks(tensor)
        heads = self._interleaved_heads(name)
        if len(shape) == 1:
            values = self._dequantize(tensor, rows_of).reshape(-1)
            values = deinterleaved(values, heads) if heads else values
            values = self._in_order(name, values)
            values = _logarithm(name, values) - self._added(name)
            target.copy_(torch.from_numpy(values)[source])
            return
        if len(shape) == 4:  # rates of decay by head
            values = _logarithm(name, self._dequantize(tensor, rows_of)).reshape(shape)
            target.copy_(torch.from_numpy(values)[source])
            return
        if heads:
            rows_of = deinterleaved(rows_of, heads)
        rows_of = self._in_order(name, rows_of)
        if len(shape) == 3 and shape[1] == 1:  # a convolution, whose dimension of 1 is not stored
            shape, source, target = (shape[0], shape[2]), (source[0], source[2]), target[:, 0]
        columns = shape[-1]
        rows_of = rows_of.reshape(*shape[:-1], columns // tensor.type.block, tensor.type.size)
        if len(shape) == 3:  # experts
            each = [tensor] * len(rows_of)
            if self._outer.of(tensor) is not None:
                each = list(_unstacked(tensor, "{}").values())
            for i, (one, rows) in enumerate(zip(each[source[0]], rows_of[source[0]], strict=True)):
                self._copy_rows(name, one, rows[source[1]], source[-1], target[i])
            return
        order = None if self._order is None else self._order.columns(name)
        self._copy_rows(name, tensor, rows_of[source[0]], source[-1], target, order)

    def blocks(self, name: str) -> StoredRows:
        """The rows of the map; those of interleaved projections in their new order, and those of
        joined ones behind each other, copied."""
        if name in self._joined:
            both = np.concatenate([self._blocks(part) for part in self._joined[name][1]])
            return StoredRows(both, np.arange(len(both)))
        data = self._blocks(self._tensors[name])
        order = np.arange(len(data))
        if heads := self._interleaved_heads(name):
            order = deinterleaved(order, heads)
        return StoredRows(data, self._in_order(name, order))

    def groups(
        self, name: str, source: tuple[slice, ...], device: torch.device = HOST
    ) -> tuple[Groups, Numbers]:
        """A rectangle of a matrix of one of `KEPT_TYPES`, or of one expert's, whole blocks of its
        inputs at a time."""
        *outer, rows_cut, columns = source
        tensor, stored = self._tensors[name], self.blocks(name)
        data, order = stored.data, stored.order
        for cut in outer:
            expert = cut.indices(len(data))[0]
            tensor = list(_unstacked(tensor, "{}").values())[expert]
            data = data[expert].reshape(tensor.shape[0], -1)
            order = np.arange(len(data))
        kind = KEPT_TYPES[tensor.type.name]
        rows = np.ascontiguousarray(data[order[rows_cut]])
        values, scales = kind.unpack(rows.reshape(-1, tensor.type.size))
        scales = self._outer.multiply(tensor, scales).reshape(len(rows), -1)
        first, last, _ = columns.indices(tensor.shape[-1])
        groups = Groups(
            values_RC=torch.from_numpy(values.reshape(len(rows), -1)[:, columns]).to(device),
            scales_RG=torch.from_numpy(np.ascontiguousarray(scales)).to(device),
            group_C=torch.arange(first, last, device=device) // kind.group,
        )
        return groups, kind.numbers

    def close(self) -> None:
        """Drops the maps."""
        self._maps = {}

    def _copy_rows(
        self,
        name: str,
        tensor: GGUFTensor,
        rows: np.ndarray,
        columns: slice,
        target: torch.Tensor,
        order: np.ndarray | None = None,
    ) -> None:
        step = max(1, CHUNK_ELEMENTS // (rows.shape[1] * tensor.type.block))
        for row in range(0, len(rows), step):
            part = rows[row : row + step]
            values = self._dequantize(tensor, part.reshape(-1, tensor.type.size)).reshape(
                len(part), -1
            )
            values = _logarithm(name, values if order is None else values[:, order])
            target[row : row + step].copy_(torch.from_numpy(values)[:, columns])

    def _join(self, name: str) -> np.ndarray:
        """The values of a tensor that is several in the file."""
        joined, tensors = self._joined[name]
        parts = [
            self._dequantize(tensor, self._blocks(tensor)).reshape(tensor.shape)
            for tensor in tensors
        ]
        if joined.turned:
            parts[0] = parts[0].swapaxes(1, 2)
        return np.concatenate(parts, axis=parts[0].ndim - 2).reshape(_shape_of(joined, tensors))

    def _blocks(self, tensor: GGUFTensor) -> np.ndarray:
        """The raw blocks of a tensor: a row for each index of its first dimension."""
        data = self._maps[tensor.path][tensor.offset : tensor.offset + tensor.num_bytes]
        return data.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)

    def _dequantize(self, tensor: GGUFTensor, data: np.ndarray) -> np.ndarray:
        blocks = np.ascontiguousarray(data).reshape(-1, tensor.type.size)
        with np.errstate(all="ignore"):  # a damaged scale may be NaN; the scan for it is an option
            values = DEQUANTIZE[tensor.type.name](blocks)
        return self._outer.multiply(tensor, values)

    def _interleaved_heads(self, name: str) -> int:
        if not self._dialect.interleaved:
            return 0
        match = re.search(r"layers\.(\d+)\.self_attn\.([qk])_proj\.(weight|bias)$", name)
        if match is None:
            return 0
        layer, is_key = int(match[1]), match[2] == "k"
        return self._kv_heads[layer] if is_key and self._kv_heads else self._heads[is_key]

    def _in_order(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows in the order of the checkpoint that the file was made of."""
        order = None if self._order is None else self._order.rows(name)
        return rows if order is None else rows[order]

    def _kept_as(self, name: str, tensor: GGUFTensor) -> str:
        """The type; of a matrix whose blocks of inputs do not stay whole, or that is multiplied,
        that of floats, of a table that which models have."""
        if tensor.type.name == TABLE:
            return "I64"
        moved = self._order is not None and self._order.columns(name) is not None
        return "F32" if moved or self._multiplied(tensor) else tensor.type.name

    def _scheme(self, name: str, tensor: GGUFTensor) -> str:
        """What holds a matrix in groups, with a scale beside it where that has one of its own."""
        kind = KEPT_TYPES.get(tensor.type.name)
        moved = self._order is not None and self._order.columns(name) is not None
        if kind is None or len(tensor.shape) != 2 or moved or self._multiplied(tensor):
            return ""
        return kind.scheme

    def _multiplied(self, tensor: GGUFTensor) -> bool:
        """Whether a tensor beside it scales it, where its own numbers do not take that up."""
        return self._outer.of(tensor) is not None and tensor.type.name != "NVFP4"

    def _joined_type(self, joined: Joined, parts: Parts) -> str:
        """That of its rows; floats where they are not those of the file, one after another."""
        first, second = (part.type.name for part in parts)
        rows_stay = len(parts[0].shape) == 2 and not joined.turned and not joined.flat
        multiplied = any(self._outer.of(part) is not None for part in parts)
        return first if rows_stay and first == second and not multiplied else "F32"

    def _added(self, name: str) -> np.float32:
        """To a norm, when the file was written."""
        for ending, number in self._dialect.added.items():
            if name.endswith(ending):
                return np.float32(number)
        return np.float32(0)


def _logarithm(name: str, values: np.ndarray) -> np.ndarray:
    """Rates of decay, which files hold as -exp of what checkpoints have."""
    return np.log(-values) if name.endswith(".A_log") else values


def deinterleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's order of rotary rows: a head's row 2i is the i-th of its first half, row 2i+1
    of its second."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


Parts = tuple[GGUFTensor, GGUFTensor]


def _joined(file: GGUFFile, dialect: Dialect) -> dict[str, tuple[Joined, Parts]]:
    """What is one tensor here and two in the file, by its name here."""
    by_name: dict[str, tuple[Joined, Parts]] = {}
    for joined in dialect.joined:
        first, second = joined.parts
        for name, tensor in file.tensors.items():
            match = re.fullmatch(rf"blk\.(\d+)\.{first}\.weight", name, re.ASCII)
            other = match and file.tensors.get(f"blk.{match[1]}.{second}.weight")
            if match and other is not None:
                _check_parts(joined, (tensor, other))
                by_name[f"{dialect.layers}.{match[1]}.{joined.name}"] = joined, (tensor, other)
    return by_name


def _check_parts(joined: Joined, parts: Parts) -> None:
    first, second = (part.shape for part in parts)
    columns = first[-2] if joined.turned else first[-1]
    sizes = (*first[:-2], columns), (*second[:-2], second[-1])
    if len(first) != len(second) or len(first) < 2 + joined.turned or sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{parts[0].path}: tensors {parts[0].name} {first} and {parts[1].name} {second} do "
            f"not go together as {joined.name}"
        )


def _shape_of(joined: Joined, parts: Parts) -> tuple[int, ...]:
    first, second = (part.shape for part in parts)
    rows = (first[-1] if joined.turned else first[-2]) + second[-2]
    shape = (*second[:-2], rows, second[-1])
    return (shape[0] * shape[1], shape[2]) if joined.flat else shape


def _renamed(file: GGUFFile, dialect: Dialect, layers: int) -> dict[str, GGUFTensor]:
    """Tensors by their transformers name; one that has none keeps its own, and is refused as
    unknown later. Layers behind the last one only draft tokens, and are left out."""
    tensors_by_name: dict[str, GGUFTensor] = {}
    parts = {tensor.name for _, both in _joined(file, dialect).values() for tensor in both}
    for name, tensor in file.tensors.items():
        if name in parts:
            continue
        match = re.match(r"blk\.(\d+)\.", name, re.ASCII)
        drafts = dialect.drafts and match is not None and int(match[1]) >= layers
        if name in CONFIG_TENSORS or drafts:
            continue
        several = (
            dialect.unstacked.get(name.removesuffix(".weight")[match.end() :]) if match else None
        )
        if name in dialect.stacked:
            tensors_by_name |= _unstacked(tensor, dialect.stacked[name])
        elif match is not None and several is not None:
            if tensor.shape[0] > len(several):
                raise CheckpointError(
                    f"{tensor.path}: tensor {name} has the shape {tensor.shape}; it holds at most "
                    f"{len(several)} one behind the other"
                )
            at = f"{dialect.layers}.{match[1]}"
            parts_of = _unstacked(tensor, "{}")
            tensors_by_name |= {f"{at}.{several[int(i)]}": one for i, one in parts_of.items()}
        else:
            tensors_by_name[_new_name(name, dialect)] = _flat(tensor)
    return tensors_by_name


def _unstacked(tensor: GGUFTensor, names: str) -> dict[str, GGUFTensor]:
    """The matrices that lie in one tensor behind each other."""
    count, size = tensor.shape[0], tensor.num_bytes // tensor.shape[0]
    return {
        names.format(i): replace(
            tensor, shape=tensor.shape[1:], offset=tensor.offset + i * size, num_bytes=size
        )
        for i in range(count)
    }


def _flat(tensor: GGUFTensor) -> GGUFTensor:
    """Norms over groups have a row for each."""
    if not tensor.name.endswith(".ssm_norm.weight"):
        return tensor
    return replace(tensor, shape=(math.prod(tensor.shape),))


def _new_name(name: str, dialect: Dialect) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in dialect.top:
        return _ended(dialect.top[stem], kind)
    # A whole name, with its ending or without any, before one that all endings share.
    for part, ending in ((name, "weight"), (stem, kind)):
        for prefix, place, blocks in dialect.sections:
            match = re.fullmatch(rf"{prefix}\.(\d+)\.([\w.]+)", part, re.ASCII)
            if match and match[2] in blocks and ending in ("weight", "bias"):
                return f"{place}.{match[1]}.{_ended(blocks[match[2]], ending)}"
    return name


def _ended(module: str, kind: str) -> str:
    """With the tensor's ending, unless the name ends with a dot."""
    return module.removesuffix(".") if module.endswith(".") else f"{module}.{kind}"


def _refuse_types(file: GGUFFile) -> None:
    for tensor in file.tensors.values():
        if tensor.type.name not in DEQUANTIZE:
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name!r} has the type {tensor.type.name}; "
                f"supported: {', '.join(sorted(DEQUANTIZE))}"
            )


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(data, dtype=np.uint8)
