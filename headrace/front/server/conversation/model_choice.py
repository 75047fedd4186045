"""Which of several models a request is for: what the handlers know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace.base.wire.models import ModelPlace, ServedModelState

if TYPE_CHECKING:
    from headrace.front.server.conversation.context import RequestContext


class HeldModel(Protocol):
    """A model that a request uses."""

    def again(self, context: RequestContext) -> None:
        """The same for another context, while this use lasts."""
        ...


class ModelChoice(Protocol):
    """Several models in one server. Implemented by front/server/many_models.py."""

    @property
    def names(self) -> list[str]:
        """Every name that requests may give."""
        ...

    @property
    def places(self) -> list[ModelPlace]:
        """Every model, with its files."""
        ...

    def check(self, name: str) -> None:
        """ModelNotFound, with the names there are, for any other."""
        ...

    async def states(self) -> list[tuple[ModelPlace, ServedModelState]]:
        """All models, and what becomes of each."""
        ...

    async def change(self, name: str, *, load: bool) -> None:
        """Loads a model, or unloads it once it is idle; returns when that is done."""
        ...

    async def close(self) -> None:
        """The process ends."""
        ...

    async def choose(self, context: RequestContext, document: object, *, runs: bool) -> None:
        """Gives the context the services of the model that a body names, and its `model_use`. If it
        `runs`, the model is loaded from then on; what it waits for can be asked (explain)."""
        ...
