"""Input and output of pooling models in forms of their own (satellite images, time series, tables):
an installed package turns what a client sends into texts or token ids, and what the model gives for
them into an answer. The server asks it in a thread; what it raises is an error of that request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from headrace.base import extensions
from headrace.base.config.resolved import TextSpec
from headrace.base.errors import ConfigError


class IOProcessor(Protocol):
    """Made by `make(text)` of an entry point of `headrace.io_processors`; `text` says what is
    served. Called from several threads at a time."""

    def prompts(self, data: Any) -> Sequence[str | list[int]]:
        """The texts or lists of token ids that are pooled for `data`, JSON of a request. ValueError
        says what is wrong with it."""
        ...

    def answer(self, data: Any, vectors: Sequence[np.ndarray]) -> Any:
        """What the client gets, as JSON. `vectors`: of each prompt in order, float32 [width], or
        [tokens, width] of models that pool each token."""
        ...


def io_processor_of(text: TextSpec) -> IOProcessor | None:
    """The one that is served; ConfigError with its name if it cannot be made."""
    name = text.io_processor
    if name is None:
        return None
    make = cast(Callable[[TextSpec], IOProcessor], extensions.load(extensions.IO_PROCESSORS, name))
    try:
        return make(text)
    except Exception as error:
        raise ConfigError(
            f"extension {name} failed: {type(error).__name__}: {error}", field="io_processor"
        ) from error
