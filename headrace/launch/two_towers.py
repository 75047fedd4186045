"""Models with a tower for texts and one for images: how their vectors are pooled, and the prompt
that stands for an image."""

from __future__ import annotations

from pathlib import Path

from headrace.base.config.hf import ConfigReader
from headrace.base.config.two_towers import is_two_towers, padding_of
from headrace.front.media.processors.files import first_special
from headrace.launch.pooling_modules import Modules


def read_two_towers(folder: Path, config: ConfigReader) -> Modules | None:
    """The last token's vector, for an image that of the token in whose place it stands; None for
    any other checkpoint."""
    if not is_two_towers(config.raw):
        return None
    mark = first_special(folder)
    return Modules(
        how="last",
        normalize=True,
        image_form="" if mark is None else mark[1],
        padded=padding_of(config.raw),
    )
