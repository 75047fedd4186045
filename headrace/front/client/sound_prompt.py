"""A window of speech as a medium of a prompt."""

from __future__ import annotations

import hashlib

from headrace.base.wire.media import MediaInput
from headrace.front.media.placeholders import PreparedMedium
from headrace.front.media.processing import ProcessedMedia


def prepared_window(sound: ProcessedMedia) -> PreparedMedium:
    """Its one input, with the key of its content."""
    (one,) = sound.inputs
    rows = one.rows.tobytes()
    whole = MediaInput(
        kind="audio",
        key=hashlib.sha256(b"window" + rows).digest(),
        offset=0,
        num_tokens=one.num_tokens,
        grid=one.grid,
        rows=rows,
    )
    return PreparedMedium(kind="audio", inputs=(whole,), layout=sound.layout)
