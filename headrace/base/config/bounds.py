"""Types of options that several groups share: sizes, counts and times with their bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

Auto = Literal["auto"]
_SIZE = r"\d+(\.\d+)?\s*([kKmMgGtT]i?)?[bB]?"
Bytes = Annotated[str, Meta(pattern=f"^{_SIZE}$")]
BytesOrAuto = Annotated[str, Meta(pattern=f"^(auto|{_SIZE})$")]
"""Not `Auto | Bytes`: of a union with a literal the pattern must hold for the literal too."""
MAX_COUNT = (1 << 31) - 1
"""Counts go into int32 arrays."""
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Natural = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Processes = Annotated[int, Meta(ge=1, le=1024)]
Length = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
