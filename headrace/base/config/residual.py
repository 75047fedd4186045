"""What is added to the residual stream of a decoder, and what of it is told, decided."""

from __future__ import annotations

import msgspec


class ControlSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Control vectors: GGUF files with the factor of each, and the first and last layer behind
    which they are added; `named`: by name, files that requests of one of `rows` rows may ask
    for."""

    files: tuple[tuple[str, float], ...]
    first: int
    last: int
    named: tuple[tuple[str, str], ...] = ()
    rows: int = 0


class HiddenStatesSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Files of hidden states, in the folder `path`: in front of which layers, and the number of
    layers for behind the last."""

    layers: tuple[int, ...]
    path: str
