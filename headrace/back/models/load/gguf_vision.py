"""A GGUF model with a vision tower in a file of its own ("mmproj"): the decoder's tensors below the
module they have in the whole model, the tower's by their transformers names.

Tensors of towers are small beside decoders: each is widened whole. What the format takes apart is
put together (frames of a patch, query beside key and value), what it turns is turned back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from headrace.back.models.load.gguf import GGUFSource, deinterleaved, mapped
from headrace.back.models.load.gguf_dequant import DEQUANTIZE
from headrace.back.models.load.source import HOST, CheckpointTensor, RenamedSource
from headrace.back.parallel.param import StoredRows
from headrace.back.quant.formats.groups import Groups
from headrace.base.config.gguf import GGUFFile, read_gguf
from headrace.base.config.gguf_vision import PROJECTOR, deep_layers, row_of
from headrace.base.config.quantization import Numbers
from headrace.base.errors import CheckpointError

FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
QKV = ("attn_q", "attn_k", "attn_v")
UNREAD = ("v.token_embd.img_break",)


@dataclass(frozen=True, kw_only=True)
class _Names:
    """`decoder`: the module of the text part; `layers`: of the tower's; `blocks`: modules of one,
    `top`: others. `merges`: query, key and value are one tensor of this module; `turned`: rows of
    queries and keys are interleaved; `plus_one`: stored so much greater. `plain`: top tensors
    without an ending."""

    decoder: str
    layers: str
    blocks: Mapping[str, str]
    top: Mapping[str, str]
    merges: str = ""
    turned: bool = False
    plus_one: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    deep: tuple[str, Mapping[str, str]] = ("", MappingProxyType({}))


_QWEN_BLOCKS = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QWEN2 = _Names(
    decoder="model.",
    layers="visual.blocks",
    blocks={**_QWEN_BLOCKS, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    top={
        "v.patch_embd": "visual.patch_embed.proj",
        "v.post_ln": "visual.merger.ln_q",
        "mm.0": "visual.merger.mlp.0",
        "mm.2": "visual.merger.mlp.2",
    },
    merges="attn.qkv",
)
_SIGLIP_BLOCKS = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_SIGLIP_TOP = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
    "v.pre_ln": "pre_layrnorm",
    "v.class_embd": "embeddings.class_embedding",
}


def _below(tower: str) -> dict[str, str]:
    return {name: f"{tower}.{module}" for name, module in _SIGLIP_TOP.items()}


_NAMES: Mapping[str, _Names] = {
    "qwen2vl_merger": _QWEN2,
    "qwen2.5vl_merger": _Names(
        decoder="model.",
        layers="visual.blocks",
        blocks=_QWEN_BLOCKS | _GATED,
        top=_QWEN2.top,
        merges="attn.qkv",
    ),
    "qwen3vl_merger": _Names(
        decoder="model.language_model.",
        layers="model.visual.blocks",
        blocks={**_QWEN_BLOCKS, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        top={
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.position_embd": "model.visual.pos_embed",
            "v.post_ln": "model.visual.merger.norm",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
        },
        merges="attn.qkv",
        deep=(
            "model.visual.deepstack_merger_list",
            {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"},
        ),
    ),
    "gemma3": _Names(
        decoder="language_model.model.",
        layers="vision_tower.encoder.layers",
        blocks=_SIGLIP_BLOCKS,
        top={
            **_below("vision_tower"),
            "mm.input_projection": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        plus_one=("mm.soft_emb_norm.weight",),
        plain=("mm.input_projection",),
    ),
    "mlp": _Names(
        decoder="language_model.model.",
        layers="vision_tower.encoder.layers",
        blocks=_SIGLIP_BLOCKS,
        top={
            **_below("vision_tower"),
            "mm.0": "multi_modal_projector.linear_1",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        plain=("v.class_embd",),
    ),
    "pixtral": _Names(
        decoder="language_model.model.",
        layers="vision_tower.transformer.layers",
        blocks={
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.o_proj",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        top={
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        },
        turned=True,
    ),
    "internvl": _Names(
        decoder="language_model.model.",
        layers="vision_tower.encoder.layer",
        blocks={
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_q_norm": "attention.q_norm",
            "attn_k_norm": "attention.k_norm",
            "attn_out": "attention.projection_layer",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
            "ls1": "lambda_1.",
            "ls2": "lambda_2.",
        },
        top={
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "v.position_embd": "vision_tower.embeddings.position_embeddings",
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "v.post_ln": "vision_tower.layernorm",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        plain=("v.class_embd", "v.position_embd"),
    ),
    "idefics3": _Names(
        decoder="model.text_model.",
        layers="model.vision_model.encoder.layers",
        blocks=_SIGLIP_BLOCKS,
        top={
            **_below("model.vision_model"),
            "mm.model.fc": "model.connector.modality_projection.proj",
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What a tensor is made of: stored ones, `frames`: side by side as frames of a patch, else row
    by row."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    frames: bool = False
    heads: int = 0
    minus: float = 0.0


class SeeingGGUFSource:
    """An opened GGUF model with its tower."""

    def __init__(self, model: Path, tower: Path) -> None:
        file = read_gguf(tower)
        row_of(file)
        self.where, self._file = f"{model} and {tower}", file
        names = _NAMES[str(file.text(PROJECTOR) or file.text("clip.vision.projector_type"))]
        head = "language_model.lm_head" if names.decoder.startswith("language_model") else "lm_head"
        renames = ((r"^model\.", names.decoder), (r"^lm_head", head))
        self._text = RenamedSource(GGUFSource(model), renames)
        self._recipes = _recipes(file, names)
        entries = dict(self._text.entries)
        for name, recipe in self._recipes.items():
            entries[name] = CheckpointTensor(
                shape=recipe.shape, dtype="F32", where=str(tower), order=(1, 0), squeezed=True
            )
        self.entries: Mapping[str, CheckpointTensor] = entries
        self._map = mapped(tower)

    def copy(
        self, name: str, shape: tuple[int, ...], source: tuple[slice, ...], target: torch.Tensor
    ) -> None:
        """See Source."""
        recipe = self._recipes.get(name)
        if recipe is None:
            self._text.copy(name, shape, source, target)
            return
        values = self._values(recipe).reshape(shape)
        target.copy_(torch.from_numpy(np.ascontiguousarray(values[source])))

    def _values(self, recipe: _Recipe) -> np.ndarray:
        parts = []
        for name in recipe.parts:
            tensor = self._file.tensors[name]
            data = self._map[tensor.offset : tensor.offset + tensor.num_bytes]
            blocks = np.ascontiguousarray(data).reshape(-1, tensor.type.size)
            values = DEQUANTIZE[tensor.type.name](blocks).reshape(tensor.shape)
            parts.append(deinterleaved(values, recipe.heads) if recipe.heads else values)
        whole = np.stack(parts, axis=2) if recipe.frames else np.concatenate(parts)
        return whole - np.float32(recipe.minus)

    def blocks(self, name: str) -> StoredRows:
        """See Source."""
        return self._text.blocks(name)

    def groups(
        self, name: str, source: tuple[slice, ...], device: torch.device = HOST
    ) -> tuple[Groups, Numbers]:
        """There are none in this format."""
        raise AssertionError(f"{name} is not stored in groups")

    def close(self) -> None:
        """Drops the maps."""
        self._text.close()
        self._map = np.empty(0, np.uint8)


def _recipes(file: GGUFFile, names: _Names) -> dict[str, _Recipe]:
    """By the model's names; what has none keeps its own, and is refused as unknown later."""
    heads = file.whole("clip.vision.attention.head_count") or 0
    deep = {str(layer): index for index, layer in enumerate(deep_layers(file))}
    swapped = _swapped(file)
    recipes: dict[str, _Recipe] = {}
    for name, tensor in file.tensors.items():
        if tensor.type.name not in DEQUANTIZE:
            known = ", ".join(sorted(DEQUANTIZE))
            raise CheckpointError(
                f"{tensor.path}: tensor {name!r} has the type {tensor.type.name}; supported: {known}"
            )
        if name in UNREAD or name == FRAMES[1]:
            continue
        stem, _, kind = name.rpartition(".")
        if name == FRAMES[0] and FRAMES[1] in file.tensors:
            shape = (*tensor.shape[:2], 2, *tensor.shape[2:])
            recipes[f"{names.top[stem]}.weight"] = _Recipe(parts=FRAMES, shape=shape, frames=True)
            continue
        match = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", stem, re.ASCII)
        if match and names.merges and match[2] in QKV:
            target = f"{names.layers}.{match[1]}.{names.merges}.{kind}"
            parts = tuple(f"v.blk.{match[1]}.{part}.{kind}" for part in QKV)
            rows = 3 * tensor.shape[0]
            recipes[target] = _Recipe(parts=parts, shape=(rows, *tensor.shape[1:]))
            continue
        recipes[_target(name, names, deep, swapped)] = _Recipe(
            parts=(name,),
            shape=tensor.shape,
            heads=heads if names.turned and _is_turned(name) else 0,
            minus=1.0 if name in names.plus_one else 0.0,
        )
    return recipes


def _is_turned(name: str) -> bool:
    return re.search(r"\.attn_[qk]\.(weight|bias)$", name) is not None


def _swapped(file: GGUFFile) -> bool:
    """Whether up and down have each other's names, as older files have them."""
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    width = file.whole("clip.vision.embedding_length")
    inner = file.whole("clip.vision.feed_forward_length")
    return up is not None and width != inner and up.shape[0] == width


def _target(name: str, names: _Names, deep: Mapping[str, int], swapped: bool) -> str:
    if re.search(r"\.ls[12]$", name):
        name += ".weight"
    stem, _, kind = name.rpartition(".")
    if name in names.plain or stem in names.plain:
        return names.top[stem if stem in names.plain else name]
    if stem in names.top:
        return f"{names.top[stem]}.{kind}"
    match = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", stem, re.ASCII)
    if match:
        block = match[2]
        if swapped and block in ("ffn_up", "ffn_down"):
            block = "ffn_down" if block == "ffn_up" else "ffn_up"
        if block in names.blocks:
            module = names.blocks[block]
            ending = "" if module.endswith(".") else f".{kind}"
            return f"{names.layers}.{match[1]}.{module.removesuffix('.')}{ending}"
    match = re.fullmatch(r"v\.deepstack\.(\d+)\.(\w+)", stem, re.ASCII)
    module, parts = names.deep
    if match and match[1] in deep and match[2] in parts:
        return f"{module}.{deep[match[1]]}.{parts[match[2]]}.{kind}"
    return name
