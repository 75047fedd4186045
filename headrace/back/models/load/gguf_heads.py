"""Rows that GGUF files hold in another order than checkpoints: value heads of Qwen 3.5's recurrent
layers, and queries, keys and values of several in one tensor.

llama.cpp, conversion/qwen.py (_LinearAttentionVReorderBase), falcon.py, bloom.py, gptneox.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

_ROWS = {
    "linear_attn.in_proj_z.weight": True,
    "linear_attn.in_proj_a.weight": False,
    "linear_attn.in_proj_b.weight": False,
    "linear_attn.A_log": False,
    "linear_attn.dt_bias": False,
}
"""Tensor -> whether a head has as many rows as a value has numbers, or one."""
_BEHIND_KEYS = ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")
_COLUMNS = "linear_attn.out_proj.weight"


class RowOrder(Protocol):
    """Where the rows and columns of a checkpoint's tensors lie in the file."""

    def rows(self, name: str) -> np.ndarray | None:
        """Row i of the tensor is row rows[i] of the file's; None: the order is the same."""
        ...

    def columns(self, name: str) -> np.ndarray | None:
        """The same of columns."""
        ...


class ValueHeads:
    """Of the gated delta rule: files have the first value head of each key head, then the second of
    each, checkpoints those of a key head side by side."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._keys = int(config["linear_num_key_heads"])
        self._each = int(config["linear_num_value_heads"]) // self._keys
        self._size = int(config["linear_value_head_dim"])
        self._before = 2 * self._keys * int(config["linear_key_head_dim"])

    def rows(self, name: str) -> np.ndarray | None:
        """See RowOrder."""
        if name.endswith(_BEHIND_KEYS):
            first = np.arange(self._before)
            return np.concatenate((first, self._before + self._places(self._size)))
        for ending, is_wide in _ROWS.items():
            if name.endswith(ending):
                return self._places(self._size if is_wide else 1)
        return None

    def columns(self, name: str) -> np.ndarray | None:
        """See RowOrder."""
        return self._places(self._size) if name.endswith(_COLUMNS) else None

    def _places(self, size: int) -> np.ndarray:
        """Of heads of that many rows."""
        tiled = np.arange(self._keys * self._each * size).reshape(self._each, self._keys, size)
        return tiled.swapaxes(0, 1).reshape(-1)


class GroupedHeads:
    """Of attention: files have all queries, then all keys, then all values, checkpoints the queries
    of a group of heads before its key and its value."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        groups, size = int(config["num_key_value_heads"]), int(config["head_dim"])
        each = int(config["num_attention_heads"]) // groups
        queries = np.arange(groups * each * size).reshape(groups, each * size)
        others = groups * each * size + np.arange(2 * groups * size).reshape(2, groups, size)
        self._rows = np.concatenate((queries, others[0], others[1]), axis=1).reshape(-1)

    def rows(self, name: str) -> np.ndarray | None:
        """See RowOrder."""
        return self._rows if name.rpartition(".")[0].endswith("query_key_value") else None

    def columns(self, name: str) -> np.ndarray | None:
        """See RowOrder."""
        return None
