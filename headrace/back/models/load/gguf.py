"""GGUF checkpoints as a source: tensors under the names transformers gives them, dequantized to
floats as they are copied.

The file stays mapped; a tensor is dequantized in chunks of rows straight into the model's memory,
so a quantized model never exists twice. Three conventions of GGUF are undone: names, the
interleaved rows of query and key projections, and the 1 that is added to Gemma's norms.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.back.models.load.gguf_dequant import DEQUANTIZE
from headrace.back.models.load.gguf_heads import COLUMNS, ValueHeads
from headrace.back.models.load.source import HOST, CheckpointTensor
from headrace.back.parallel.param import StoredRows
from headrace.back.quant.formats.groups import Groups
from headrace.base.config.gguf import GGUFFile, GGUFTensor, read_gguf
from headrace.base.config.gguf_config import ARCHITECTURES, gguf_config
from headrace.base.config.quantization import Numbers
from headrace.base.errors import CheckpointError

CHUNK_ELEMENTS = 1 << 20
"""Elements dequantized at once: 4 MB of float32, about what a core's cache holds."""
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Rotary factors: part of the configuration (`gguf_config`), not weights."""

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MIXTURE = {
    **_BLOCK,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    **_BLOCK,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_GPT_OSS = {
    **_MIXTURE,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks.",  # a name of its own
}
_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias.",
    "ssm_a": "linear_attn.A_log.",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SANDWICH = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_MLP = {**_BLOCK, "ffn_up": "mlp.gate_up_proj"}


@dataclass(frozen=True, kw_only=True)
class _Dialect:
    """How one architecture's tensors differ: block names, interleaved query and key rows, norms
    stored plus one (but those of recurrent layers), value heads of these in another order."""

    blocks: Mapping[str, str]
    interleaved: bool = False
    norm_plus_one: bool = False
    other_heads: bool = False


_DIALECTS: Mapping[str, _Dialect] = {
    "llama": _Dialect(blocks=_MIXTRAL, interleaved=True),
    "qwen2moe": _Dialect(blocks=_MIXTURE),
    "qwen3moe": _Dialect(blocks=_MIXTURE),
    "olmoe": _Dialect(blocks=_MIXTURE),
    "gpt-oss": _Dialect(blocks=_GPT_OSS),
    "qwen3next": _Dialect(blocks=_MIXTURE | _DELTA, norm_plus_one=True),
    "qwen35": _Dialect(blocks=_BLOCK | _DELTA, norm_plus_one=True, other_heads=True),
    "qwen35moe": _Dialect(blocks=_MIXTURE | _DELTA, norm_plus_one=True, other_heads=True),
    "qwen3vl": _Dialect(blocks=_BLOCK),
    "qwen3vlmoe": _Dialect(blocks=_MIXTURE),
    "qwen2": _Dialect(blocks=_BLOCK),
    "qwen2vl": _Dialect(blocks=_BLOCK),
    "qwen3": _Dialect(blocks=_BLOCK),
    "gemma2": _Dialect(blocks=_SANDWICH, norm_plus_one=True),
    "gemma3": _Dialect(blocks=_SANDWICH, norm_plus_one=True),
    "phi3": _Dialect(blocks=_FUSED_MLP),
    "olmo2": _Dialect(blocks=_SANDWICH),
    "granite": _Dialect(blocks=_BLOCK, interleaved=True),
    "smollm3": _Dialect(blocks=_BLOCK, interleaved=True),
}
assert _DIALECTS.keys() == ARCHITECTURES.keys()


class GGUFSource:
    """An opened GGUF model (all files of a split one)."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        file = read_gguf(path)
        config = gguf_config(file)
        self._heads = (config["num_attention_heads"], config["num_key_value_heads"])
        self._dialect = _DIALECTS[str(file.text("general.architecture"))]
        self._value_heads = ValueHeads(config) if self._dialect.other_heads else None
        _refuse_types(file)
        self._tensors = _renamed(file, self._dialect, config["num_hidden_layers"])
        order = {part: number for number, part in enumerate(file.paths)}
        self.entries: Mapping[str, CheckpointTensor] = {
            name: CheckpointTensor(
                shape=tensor.shape,
                dtype=self._kept_as(name, tensor),
                where=str(tensor.path),
                order=(order[tensor.path], tensor.offset),
                dequantized=True,
                squeezed=True,
            )
            for name, tensor in self._tensors.items()
        }
        self._maps = {part: mapped(part) for part in file.paths}

    def copy(
        self, name: str, shape: tuple[int, ...], source: tuple[slice, ...], target: torch.Tensor
    ) -> None:
        """Dequantizes the wanted rows to float32, chunk by chunk, and writes them in the target's
        dtype."""
        tensor = self._tensors[name]
        rows_of = self._blocks(tensor)
        heads = self._interleaved_heads(name)
        if len(shape) == 1:
            values = self._dequantize(tensor, rows_of).reshape(-1)
            values = deinterleaved(values, heads) if heads else values
            values = self._in_order(name, values)
            values = values - 1 if self._plus_one(name) else values
            if name.endswith(".A_log"):  # stored as -exp of it
                values = np.log(-values)
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
            for i, rows in enumerate(rows_of[source[0]]):
                self._copy_rows(tensor, rows[source[1]], source[-1], target[i])
            return
        order = None if self._value_heads is None else self._value_heads.columns(name)
        self._copy_rows(tensor, rows_of[source[0]], source[-1], target, order)

    def blocks(self, name: str) -> StoredRows:
        """The rows of the map; those of interleaved projections in their new order."""
        data = self._blocks(self._tensors[name])
        order = np.arange(len(data))
        if heads := self._interleaved_heads(name):
            order = deinterleaved(order, heads)
        return StoredRows(data, self._in_order(name, order))

    def groups(
        self, name: str, source: tuple[slice, ...], device: torch.device = HOST
    ) -> tuple[Groups, Numbers]:
        """There are none in this format."""
        raise AssertionError(f"{name} is not stored in groups")

    def close(self) -> None:
        """Drops the maps."""
        self._maps = {}

    def _copy_rows(
        self,
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
            values = values if order is None else values[:, order]
            target[row : row + step].copy_(torch.from_numpy(values)[:, columns])

    def _blocks(self, tensor: GGUFTensor) -> np.ndarray:
        """The raw blocks of a tensor: a row for each index of its first dimension."""
        data = self._maps[tensor.path][tensor.offset : tensor.offset + tensor.num_bytes]
        return data.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)

    def _dequantize(self, tensor: GGUFTensor, data: np.ndarray) -> np.ndarray:
        blocks = np.ascontiguousarray(data).reshape(-1, tensor.type.size)
        with np.errstate(all="ignore"):  # a damaged scale may be NaN; the scan for it is an option
            return DEQUANTIZE[tensor.type.name](blocks)

    def _interleaved_heads(self, name: str) -> int:
        if not self._dialect.interleaved:
            return 0
        match = re.search(r"self_attn\.([qk])_proj\.(weight|bias)$", name)
        return 0 if match is None else self._heads[match[1] == "k"]

    def _in_order(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows in the order of the checkpoint that the file was made of."""
        order = None if self._value_heads is None else self._value_heads.rows(name)
        return rows if order is None else rows[order]

    def _kept_as(self, name: str, tensor: GGUFTensor) -> str:
        """The type; of a matrix whose blocks of inputs do not stay whole that of floats."""
        moved = self._value_heads is not None and name.endswith(COLUMNS)
        return "F32" if moved else tensor.type.name

    def _plus_one(self, name: str) -> bool:
        named = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        return self._dialect.norm_plus_one and named


def deinterleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's order of rotary rows: a head's row 2i is the i-th of its first half, row 2i+1
    of its second."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _renamed(file: GGUFFile, dialect: _Dialect, layers: int) -> dict[str, GGUFTensor]:
    """Tensors by their transformers name; one that has none keeps its own, and is refused as
    unknown later. Layers behind the last one only draft tokens, and are left out."""
    tensors_by_name: dict[str, GGUFTensor] = {}
    for name, tensor in file.tensors.items():
        match = re.match(r"blk\.(\d+)\.", name, re.ASCII)
        drafts = dialect.other_heads and match is not None and int(match[1]) >= layers
        if name not in CONFIG_TENSORS and not drafts:
            tensors_by_name[_new_name(name, dialect)] = tensor
    return tensors_by_name


def _new_name(name: str, dialect: _Dialect) -> str:
    stem, _, kind = name.rpartition(".")
    if kind == "ssm_a":  # without an ending
        stem, kind = name, "weight"
    if kind in ("weight", "bias"):
        if stem == "output":
            return f"lm_head.{kind}"
        if stem in _TOP:
            return f"model.{_TOP[stem]}.{kind}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem, re.ASCII)
        if match and match[2] in dialect.blocks:
            module = dialect.blocks[match[2]]
            ending = kind if not module.endswith(".") else ""
            return (
                f"model.layers.{match[1]}.{module.removesuffix('.')}{'.' if ending else ''}{ending}"
            )
    return name


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
