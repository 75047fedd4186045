"""New weights while the server runs, by the names that frameworks for reinforcement learning use
(vLLM's and SGLang's)."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest, Unsupported
from headrace.base.wire.weights import Group, Layout, SharedMemory, WeightOrder
from headrace.front.client.weights import as_text, replace_weights, stored_in_shared_memory
from headrace.front.server.administration.parameters import Mode, NoParameters
from headrace.front.server.conversation.context import RequestContext

Json = dict[str, Any]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Version = Annotated[str, Meta(max_length=200, description="how answers name them; none: a number")]
Name = Annotated[str, Meta(min_length=1, max_length=500)]
Names = Annotated[list[Name], Meta(min_length=1, max_length=1 << 20)]
Size = Annotated[int, Meta(ge=0, le=1 << 48)]
Shapes = Annotated[
    list[Annotated[list[Size], Meta(max_length=8)]], Meta(min_length=1, max_length=1 << 20)
]
_WORD = re.compile(r"[\x21-\x7e]{0,200}")


class UpdateParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Weights from files."""

    model: Annotated[
        str, Meta(min_length=1, max_length=4096, description="folder of safetensors; all or some")
    ]
    version: Version = ""
    mode: Annotated[
        Mode, Meta(description="what runs: abort ends it, wait lets it finish, keep freezes it")
    ] = "wait"


async def update_weights(context: RequestContext, asked: UpdateParameters) -> Json:
    """Puts the tensors of a folder in place of the present ones, between steps. What does not fit
    is refused, and nothing changes."""
    order = WeightOrder(action="push", way="files", path=asked.model, last=True)
    return await _replaced(context, order, asked.version, asked.mode)


async def weights(context: RequestContext, asked: NoParameters) -> Json:
    """The version of each engine core's weights, and whether they are a mixture of two."""
    return {"engines": await context.services.engine.call("weights_version")}


async def _replaced(
    context: RequestContext, order: WeightOrder, version: str, mode: Mode = "wait"
) -> Json:
    if not _WORD.fullmatch(version):
        raise InvalidRequest(
            f"weight_version: {version!r:.60} is not printable ASCII without spaces",
            field="weight_version",
        )
    engine = context.services.engine
    replies = await replace_weights(engine, [order], version=version, mode=mode)
    reply = replies[0] if replies else {"version": "", "mixed": False, "num_bytes": 0}
    return {
        "success": True,
        "message": f"weights of version {reply['version']!r}",
        "weight_version": reply["version"],
        "mixed": reply["mixed"],
        "num_bytes": sum(one["num_bytes"] for one in replies),
    }


async def _beside(context: RequestContext, order: WeightOrder) -> list[Any]:
    return await context.services.engine.call("weights", order=as_text(order))


# SGLang's names


class FromDiskParameters(msgspec.Struct, frozen=True, kw_only=True):
    """`load_format`: auto or safetensors; the rest of it is not looked at. The cache is always
    cleared."""

    model_path: Path
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: Version | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    is_async: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0


class FromTensorParameters(msgspec.Struct, frozen=True, kw_only=True):
    """`serialized_named_tensors`: base64 of safetensors, one text or several that each hold other
    tensors. Pickles are never read."""

    serialized_named_tensors: Annotated[
        list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)
    ]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Version | None = None


class JoinParameters(msgspec.Struct, frozen=True, kw_only=True):
    """A process group with the trainer as rank 0; the first worker is rank `rank_offset`."""

    master_address: Annotated[str, Meta(min_length=1, max_length=255)]
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    world_size: Annotated[int, Meta(ge=2, le=1 << 16)]
    group_name: Annotated[str, Meta(min_length=1, max_length=200)] = "weight_update_group"
    backend: Annotated[str, Meta(max_length=20)] = "auto"


class LeaveParameters(msgspec.Struct, frozen=True, kw_only=True):
    """A process group that was joined."""

    group_name: Annotated[str, Meta(min_length=1, max_length=200)] = "weight_update_group"


class FromGroupParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that rank 0 of a group broadcasts, in this order; `load_format` "flattened_bucket":
    all of them as one buffer of bytes, without gaps."""

    names: Names
    dtypes: Names
    shapes: Shapes
    group_name: Annotated[str, Meta(min_length=1, max_length=200)] = "weight_update_group"
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Version | None = None


class ByNameParameters(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor by its checkpoint name, and how many of its values are told."""

    name: Name
    truncate_size: Annotated[int, Meta(ge=1, le=100_000)] = 100


class CheckerParameters(msgspec.Struct, frozen=True, kw_only=True):
    """`action`: "checksum" tells a hash for each engine core, "compare" whether all are
    `expected`."""

    action: str
    expected: Annotated[str, Meta(max_length=200)] = ""


class VersionParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Another name for the weights that are there."""

    new_version: Annotated[str, Meta(min_length=1, max_length=200)]
    abort_all_requests: bool = False


def _mode(aborts: bool) -> Mode:
    return "abort" if aborts else "wait"


async def from_disk(context: RequestContext, asked: FromDiskParameters) -> Json:
    """Weights from a folder of safetensors."""
    _check_format(asked.load_format, ("auto", "safetensors"))
    order = WeightOrder(action="push", way="files", path=asked.model_path, last=True)
    mode = _mode(asked.abort_all_requests)
    return await _replaced(context, order, asked.weight_version or "", mode)


async def from_tensor(context: RequestContext, asked: FromTensorParameters) -> Json:
    """Weights in the request itself: for small models."""
    _check_format(asked.load_format, ("auto", "safetensors"))
    contents = [_decoded(text) for text in dict.fromkeys(asked.serialized_named_tensors)]
    with stored_in_shared_memory(contents) as folder:
        order = WeightOrder(action="push", way="files", path=folder, last=True)
        mode = _mode(asked.abort_all_requests)
        return await _replaced(context, order, asked.weight_version or "", mode)


def _decoded(text: str) -> bytes:
    field = "serialized_named_tensors"
    try:
        content = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{field}: not base64", field=field) from None
    if len(content) < 10 or content[8:9] != b"{":
        raise InvalidRequest(
            f"{field}: not safetensors (safetensors.torch.save); pickles are never read",
            field=field,
        )
    return content


def _check_format(form: str | None, allowed: tuple[str, ...]) -> None:
    if form is not None and form not in allowed:
        raise InvalidRequest(
            f"load_format: {form!r:.60} given; allowed: {', '.join(allowed)}", field="load_format"
        )


async def join(context: RequestContext, asked: JoinParameters) -> Json:
    """Meets the trainer in a process group; answers once all its members have come."""
    replicas: Any = context.services.config.get("max_replicas", 1)
    if int(replicas) > 1:
        raise Unsupported(
            "process groups for weights take one engine core: start it with --replicas 1, or push "
            "from files"
        )
    group = Group(
        name=asked.group_name,
        address=asked.master_address,
        port=asked.master_port,
        first_rank=asked.rank_offset,
        world_size=asked.world_size,
        backend=asked.backend,
    )
    await _beside(context, WeightOrder(action="join", group=group))
    return {"success": True, "message": f"joined group {asked.group_name}"}


async def leave(context: RequestContext, asked: LeaveParameters) -> Json:
    """Leaves a process group."""
    await _beside(context, WeightOrder(action="leave", group=Group(name=asked.group_name)))
    return {"success": True, "message": f"left group {asked.group_name}"}


async def from_group(context: RequestContext, asked: FromGroupParameters) -> Json:
    """Weights that the trainer broadcasts meanwhile."""
    _check_format(asked.load_format, ("auto", "flattened_bucket"))
    order = WeightOrder(
        action="push",
        way="group",
        layout=Layout(names=asked.names, dtypes=asked.dtypes, shapes=asked.shapes),
        packed=asked.load_format == "flattened_bucket",
        group=Group(name=asked.group_name),
        last=True,
    )
    mode = _mode(asked.abort_all_requests)
    return await _replaced(context, order, asked.weight_version or "", mode)


async def by_name(context: RequestContext, asked: ByNameParameters) -> Json:
    """The first values of a tensor that the model holds as it is, of each engine core."""
    layout = Layout(names=[asked.name])
    order = WeightOrder(action="read", layout=layout, count=asked.truncate_size)
    replies: list[Any] = await _beside(context, order)
    return {"name": asked.name, "values": [reply["values"] for reply in replies]}


async def check(context: RequestContext, asked: CheckerParameters) -> Json:
    """A hash of all weights, to be compared."""
    if asked.action not in ("checksum", "compare"):
        raise InvalidRequest(
            f"action: {asked.action!r:.60} given; allowed: checksum, compare", field="action"
        )
    replies: list[Any] = await _beside(context, WeightOrder(action="digest"))
    digests = [reply["digest"] for reply in replies]
    if asked.action == "checksum":
        return {"success": True, "digests": digests}
    equal = all(digest == asked.expected for digest in digests)
    return {"success": equal, "message": "equal" if equal else "different", "digests": digests}


async def version(context: RequestContext, asked: NoParameters) -> Json:
    """The version of the weights that answers come from."""
    return {"weight_version": context.services.engine.weights_version}


async def name_version(context: RequestContext, asked: VersionParameters) -> Json:
    """Gives the present weights another name."""
    if not _WORD.fullmatch(asked.new_version):
        raise InvalidRequest(
            f"new_version: {asked.new_version!r:.60} is not printable ASCII without spaces",
            field="new_version",
        )
    await context.services.engine.call("weights_version", version=asked.new_version)
    return {"success": True, "new_version": asked.new_version}


# vLLM's names


class InitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Of backend "nccl" (or gloo): where the trainer waits; of "ipc" nothing."""

    master_address: Annotated[str, Meta(max_length=255)] = ""
    master_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    rank_offset: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    world_size: Annotated[int, Meta(ge=2, le=1 << 16)] = 2
    backend: Annotated[str, Meta(max_length=20)] = "auto"


class InitParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How weights will come."""

    init_info: InitInfo = InitInfo()


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors in their order: `handles` by the UUID of a GPU, of a buffer that holds them without
    gaps; or broadcast by the trainer, `packed` as one such buffer. `path`: from a folder."""

    names: Annotated[list[Name], Meta(max_length=1 << 20)] = []
    dtype_names: Annotated[list[Name], Meta(max_length=1 << 20)] = []
    shapes: Annotated[
        list[Annotated[list[Size], Meta(max_length=8)]], Meta(max_length=1 << 20)
    ] = []
    packed: bool = False
    handles: dict[str, SharedMemory] = {}
    path: Annotated[str, Meta(max_length=4096)] = ""


class UpdateInfoParameters(msgspec.Struct, frozen=True, kw_only=True):
    """One push of an update."""

    update_info: UpdateInfo
    weight_version: Version = ""


class StartParameters(msgspec.Struct, frozen=True, kw_only=True):
    """`is_checkpoint_format`: tensors come as a checkpoint names them, which is the only way."""

    is_checkpoint_format: bool = True


class FinishParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The version of what has come."""

    weight_version: Version = ""


GROUP = "weights"
"""The group of vLLM's routes, which have no names for theirs."""


async def init(context: RequestContext, asked: InitParameters) -> Json:
    """Prepares for weights: joins the trainer's process group, if there is an address."""
    info = asked.init_info
    if info.master_address:
        await join(
            context,
            JoinParameters(
                master_address=info.master_address,
                master_port=info.master_port,
                rank_offset=info.rank_offset,
                world_size=info.world_size,
                group_name=GROUP,
                backend=info.backend,
            ),
        )
    return {"message": "Weight transfer initialized"}


async def start(context: RequestContext, asked: StartParameters) -> Json:
    """Begins an update of several pushes, in a pause that is there."""
    if not asked.is_checkpoint_format:
        raise InvalidRequest(
            "is_checkpoint_format: false given; tensors are taken by their checkpoint names",
            field="is_checkpoint_format",
        )
    await _beside(context, WeightOrder(action="begin"))
    return {"message": "Weight update started"}


async def update(context: RequestContext, asked: UpdateInfoParameters) -> Json:
    """Takes in some tensors; without a start before, they are the whole update."""
    info = asked.update_info
    way = "handles" if info.handles else "files" if info.path else "group"
    order = WeightOrder(
        action="push",
        way=way,
        path=info.path,
        layout=Layout(names=info.names, dtypes=info.dtype_names, shapes=info.shapes),
        packed=info.packed,
        handles=info.handles,
        group=Group(name=GROUP),
        last=True,
    )
    return await _replaced(context, order, asked.weight_version)


async def finish(context: RequestContext, asked: FinishParameters) -> Json:
    """Ends an update of several pushes: what has come is a version of its own."""
    return await _replaced(context, WeightOrder(action="finish"), asked.weight_version)
