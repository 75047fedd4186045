"""POST /slots/{id}: the conversation of a slot saved to a file, restored or erased, as llama.cpp's
server does it. Not behind the admin key: a key reaches its own conversations alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.base.errors import HeadraceError, NotFound
from headrace.front.server.administration.named import NamedRoute
from headrace.front.server.administration.operations import Json, Operation
from headrace.front.server.conversation.context import RequestContext

SlotId = Annotated[str, Meta(pattern=r"^\d{1,6}$", description="a number that GET /slots tells")]


class SlotParameters(msgspec.Struct, frozen=True, kw_only=True):
    """`filename`: a plain name below --slot-save-path; not for erase."""

    id: SlotId
    action: Annotated[
        Literal["save", "restore", "erase"], Meta(description="what becomes of the conversation")
    ]
    filename: Annotated[str, Meta(max_length=200, description="a plain name")] = ""


async def change(context: RequestContext, asked: SlotParameters) -> Json:
    """Saves the KV of a slot's last conversation to a file, restores it from one, or erases it from
    the prefix cache. Answers once it is done."""
    engine, number = context.services.engine, int(asked.id)
    cores: list[Any] = await engine.call("slots", tenant=context.tenant)
    places = [(core.get("core", ""), row) for core in cores for row in range(len(core["slots"]))]
    if number >= len(places):
        raise NotFound(f"id: {number} given, the slots are 0 to {len(places) - 1}", field="id")
    core, row = places[number]
    replies = await engine.call_each(
        "slot",
        core=core,
        row=row,
        action=asked.action,
        name=asked.filename,
        tenant=context.tenant,
    )
    errors = [reply for reply in replies if isinstance(reply, HeadraceError)]
    if errors:
        raise errors[0]
    done: Any = next(reply for reply in replies if isinstance(reply, dict) and "tokens" in reply)
    if asked.action == "erase":
        return {"id_slot": number, "n_erased": done["tokens"]}
    past, moved = ("saved", "written") if asked.action == "save" else ("restored", "read")
    return {
        "id_slot": number,
        "filename": asked.filename,
        f"n_{past}": done["tokens"],
        f"n_{moved}": done["num_bytes"],
        "timings": {f"{asked.action}_ms": done["ms"]},
    }


ROUTE = NamedRoute(
    path="/slots/{id}",
    operation=Operation(name="slot", run=change, parameters=SlotParameters, changes=True),
    reads=SlotParameters,
    has_body=True,
)
