"""One row of the table of GGUF architectures (gguf_config.py), and how metadata are read for it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.base.config.gguf import GGUFFile
from headrace.base.errors import CheckpointError

Config = dict[str, Any]
SILU: Final = {"hidden_act": "silu"}
GELU: Final = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}

LATENT: Final = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
"""Keys of attention over latents."""


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """How one value of `general.architecture` is read.

    `model_type` and `architecture` are config.json's; `fixed` holds keys the metadata leave unsaid;
    `keys` further metadata keys (without the architecture's prefix) by their config key; `adjust`
    does what a table cannot. `latent`: attention over latents; `recurrent`: no attention at all;
    `varied`: layers with more or fewer KV heads.
    """

    model_type: str
    architecture: str
    fixed: Config = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    adjust: Callable[[GGUFFile, str, Config], None] | None = None
    latent: bool = False
    recurrent: bool = False
    varied: bool = False
    short_values: bool = False


def latent_sizes(file: GGUFFile, name: str, config: Config) -> None:
    """Of attention over latents in files that state the lengths of whole heads."""
    rotary, heads = config["qk_rope_head_dim"], config["num_attention_heads"]
    length = config["head_dim"]
    if length <= rotary:
        raise file.wrong(f"{name}.attention.key_length", f"a number above {rotary}")
    values = count(file, f"{name}.attention.value_length", config["hidden_size"] // heads)
    config.update(qk_nope_head_dim=length - rotary, v_head_dim=values, head_dim=rotary)
    config["num_key_value_heads"] = heads
    config.setdefault("q_lora_rank", None)
    config.pop("partial_rotary_factor", None)


def need_int(file: GGUFFile, key: str) -> int:
    """A whole number of at least 1 that must be there."""
    value = file.whole(key)
    if value is None or value < 1:
        raise file.wrong(key, "a whole number of at least 1")
    return value


def count(file: GGUFFile, key: str, default: int) -> int:
    """The same, or a default."""
    if key not in file.metadata:
        return default
    return need_int(file, key)


def factors(file: GGUFFile, tensor: str, length: int) -> list[float]:
    """Rotary factors, which lie in a tensor."""
    stored = file.tensors.get(tensor)
    if stored is None or stored.shape != (length,):
        shape = None if stored is None else stored.shape
        raise CheckpointError(
            f"{file.paths[0]}: tensor {tensor} has the shape {shape}, not ({length},)"
        )
    return file.floats(tensor)


def present(file: GGUFFile, names: dict[str, str]) -> Config:
    """The metadata that are there, by their config keys."""
    values = {key: file.metadata.get(name) for key, name in names.items()}
    return {key: value for key, value in values.items() if value is not None}


def rows_of(file: GGUFFile, tensor: str) -> int:
    """The rows of a matrix that must be there."""
    stored = file.tensors.get(tensor)
    if stored is None or len(stored.shape) != 2:
        raise CheckpointError(f"{file.paths[0]}: tensor {tensor} is missing or no matrix")
    return stored.shape[0]


def each_of(file: GGUFFile, key: str, layers: int) -> tuple[int, ...]:
    """A number of at least 0 for each layer; one number is that of all."""
    if not isinstance(file.metadata.get(key), array):
        return (need_int(file, key),) * layers
    listed = tuple(int(one) for one in file.numbers(key) or ())
    if len(listed) != layers or min(listed, default=0) < 0 or not any(listed):
        raise file.wrong(key, f"a list of {layers} numbers of at least 0, not all of them 0")
    return listed
