"""What a row of the table of GGUF dialects is (gguf_dialects.py), and the numbers that metadata
hold in place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.back.models.load import gguf_names as names
from headrace.back.models.load.gguf_heads import RowOrder
from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import need_int


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one architecture's tensors differ: block names, interleaved query and key rows, what is
    `added` to norms by the ends of their names, rows in another `order`. `layers`: where blocks
    lie, `top`: names outside of them, `further`: blocks of another name, with their place and
    names; `drafts`: layers behind the last ones only draft tokens; `joined`: what is one tensor
    here and several in the file, `stacked`: what is several here, by their names; `unstacked`: the
    same of a layer, with a name for each; `stated`: numbers of each layer in the metadata, by their
    keys there, and what they are called with the layer's number in it."""

    blocks: Mapping[str, str]
    interleaved: bool = False
    added: Mapping[str, float] = field(default_factory=dict)
    order: Callable[[Mapping[str, Any]], RowOrder] | None = None
    layers: str = "model.layers"
    top: Mapping[str, str] = field(default_factory=lambda: names.TOP)
    further: tuple[tuple[str, str, Mapping[str, str]], ...] = ()
    drafts: bool = False
    joined: tuple[Joined, ...] = ()
    stacked: Mapping[str, str] = field(default_factory=dict)
    unstacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stated: Mapping[str, str] = field(default_factory=dict)

    @property
    def sections(self) -> tuple[tuple[str, str, Mapping[str, str]], ...]:
        """Blocks: what files call them, where they lie, and the names in one."""
        return (("blk", self.layers, self.blocks), *self.further)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A tensor `name` of a layer that lies in `parts` of the file, side by side in dimension 1 of
    [heads or experts, rows, columns]. `turned`: the first of them has rows and columns exchanged;
    `flat`: the first two dimensions are one."""

    name: str
    parts: tuple[str, str]
    turned: bool = False
    flat: bool = False


def stated_numbers(file: GGUFFile, dialect: Dialect) -> dict[str, float]:
    """Numbers of layers that metadata hold, by their names here."""
    values: dict[str, float] = {}
    for key, name in dialect.stated.items():
        layers = need_int(file, f"{file.text('general.architecture')}.block_count")
        listed = file.numbers(key) or ()
        if len(listed) != layers:
            raise file.wrong(key, f"a list of {layers} numbers, one for each layer")
        values |= {name.format(i): float(one) for i, one in enumerate(listed)}
    return values
