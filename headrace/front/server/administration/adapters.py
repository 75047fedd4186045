"""Low-rank adapters loaded and unloaded while the server runs, under the names other servers have
for it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.front.server.administration.parameters import NoParameters
from headrace.front.server.conversation.context import RequestContext

LoraName = Annotated[str, Meta(min_length=1, max_length=200)]


class LoadAdapterParameters(msgspec.Struct, frozen=True, kw_only=True):
    """`lora_path`: a folder below one of --lora-folders. `load_inplace`: an adapter of this name is
    replaced; requests that run go on with the one before."""

    lora_name: LoraName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterParameters(msgspec.Struct, frozen=True, kw_only=True):
    """`lora_int_id` is another server's number of it, and not looked at."""

    lora_name: LoraName
    lora_int_id: int | None = None


async def load(context: RequestContext, asked: LoadAdapterParameters) -> dict[str, Any]:
    """Loads an adapter into every engine core; where one refuses, none keeps it."""
    name, engine = asked.lora_name, context.services.engine
    if name in context.services.text.model_names:
        raise InvalidRequest(f"lora_name: {name!r} is the model's own name", field="lora_name")
    replies = await engine.call_each(
        "load_adapter", name=name, folder=asked.lora_path, replaces=asked.load_inplace
    )
    errors = [reply for reply in replies if isinstance(reply, HeadraceError)]
    if errors:
        if len(errors) < len(replies):
            await engine.call_each("unload_adapter", name=name)
        raise errors[0]
    return {"message": f"Success: LoRA adapter '{name}' added successfully."}


async def unload(context: RequestContext, asked: UnloadAdapterParameters) -> dict[str, Any]:
    """Requests cannot name it any more; those that run with it go on."""
    await context.services.engine.call("unload_adapter", name=asked.lora_name)
    return {"message": f"Success: LoRA adapter '{asked.lora_name}' removed successfully."}


async def listed(context: RequestContext, asked: NoParameters) -> dict[str, Any]:
    """What each engine core has loaded: name, path, rank, bytes, slot and requests."""
    return {"engines": await context.services.engine.call("adapters")}
