"""`AsyncLLM`: the engine as clients see it, over the sockets of one or several engine cores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from headrace.base.config.resolved import TextSpec
from headrace.front.client.events import Event, Generation
from headrace.front.client.limits import Limits
from headrace.front.text.tokenizer import Tokenizer, load_tokenizer


class AsyncLLM:
    """Implements `events.Engine`."""

    def __init__(
        self,
        text: TextSpec,
        socket_paths: Sequence[str],
        *,
        limits: Limits | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.text = text
        self.limits = limits or Limits()
        self.tokenizer = tokenizer or load_tokenizer(text.tokenizer_path)
        self._paths = list(socket_paths)

    async def start(self) -> None:
        """Connects to every core and waits for its Hello."""
        raise NotImplementedError

    async def close(self) -> None:
        """Aborts what runs and closes the connections."""
        raise NotImplementedError

    def generate(self, generation: Generation) -> AsyncIterator[Event]:
        """See `events.Engine.generate`."""
        raise NotImplementedError

    async def explain(self, label: str) -> dict[str, object]:
        """See `events.Engine.explain`."""
        raise NotImplementedError

    async def call(self, operation: str, **arguments: object) -> list[object]:
        """See `events.Engine.call`."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Whether at least one core can take requests."""
        return False

    @property
    def alive(self) -> bool:
        """Whether every core answers its heartbeat."""
        return False
