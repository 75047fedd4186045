"""How many outputs of an encoder a request's cross caches hold."""

from __future__ import annotations

from headrace.base.wire.media import encoder_outputs
from headrace.base.wire.step import WorkerFacts
from headrace.core.request import TOKEN_BYTES


class CrossOutputs:
    """Of what requests send for the encoder. Floats have as many bytes as tokens."""

    def __init__(self, facts: WorkerFacts) -> None:
        self._reads_tokens = facts.encoder_tokens > 0
        self._sound = facts.spectrogram

    def of(self, encoder: bytes) -> int:
        """0: as many as there may be."""
        values = len(encoder) // TOKEN_BYTES
        if self._reads_tokens:
            return values
        if len(self._sound) > 2 and values:
            return encoder_outputs(self._sound, values // self._sound[0])
        return 0
