"""The fields of a request that chooses its tokens by a chain of its own (docs/SAMPLING.md)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.base.wire.request import BOUNDS
from headrace.front.server.http.limits import Name


class ChainFields(msgspec.Struct, frozen=True, kw_only=True):
    """As they were sent; None: not at all."""

    top_n_sigma: Annotated[float, BOUNDS["top_n_sigma"].meta()] | None = None
    dynatemp_range: Annotated[float, BOUNDS["dynatemp_range"].meta()] | None = None
    dynatemp_exponent: Annotated[float, BOUNDS["dynatemp_exponent"].meta()] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, BOUNDS["mirostat_tau"].meta()] | None = None
    mirostat_eta: Annotated[float, BOUNDS["mirostat_eta"].meta()] | None = None
    adaptive_target: Annotated[float, BOUNDS["adaptive_target"].meta()] | None = None
    adaptive_decay: Annotated[float, BOUNDS["adaptive_decay"].meta()] | None = None
    samplers: Annotated[list[Name], Meta(max_length=16)] | None = None
