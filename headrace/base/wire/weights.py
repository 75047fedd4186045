"""What the workers are told about new weights, and what they answer (back/transfer carries it
out)."""

from __future__ import annotations

import msgspec

from headrace.base.errors import WireError

BESIDE_STEPS = ("join", "leave")
"""Actions that wait for others, and that no step waits for."""


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One storage on a GPU, as another process may open it: what torch's `_share_cuda_` gives."""

    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    awaits_event: bool


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors, in their order. Where they share a buffer they lie in it one after another, without
    gaps."""

    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A process group with the trainer as rank 0. `first_rank`: the rank of worker 0."""

    name: str = "weights"
    address: str = ""
    port: int = 0
    first_rank: int = 1
    world_size: int = 2
    backend: str = "auto"


class WeightOrder(msgspec.Struct, frozen=True, kw_only=True, tag="weights"):
    """What the workers do, in the order of the plans but for `join` and `leave`.

    action    begin   pushes follow, of which none is the last; the workers do nothing
              push    take in tensors; the first push begins an update. `last`: nothing follows,
                      unless it was begun
              finish  nothing follows what was pushed
              drop    forget an update that has not been finished
              read    the values of the tensor `names[0]`, at most `count` of them
              digest  a hash of all weights
              join, leave   a process group, beside the steps
    way       of a push: "files" (`path`: a folder or a file of safetensors), "group" (a broadcast
              from rank 0 for each tensor, or one for all if `packed`), "handles" (of memory on the
              GPUs, by their UUIDs)
    """

    action: str
    way: str = "files"
    path: str = ""
    layout: Layout = Layout()
    packed: bool = False
    handles: dict[str, SharedMemory] = {}
    group: Group = Group()
    count: int = 0
    last: bool = False


class WeightReply(msgspec.Struct, frozen=True, kw_only=True, tag="weighed"):
    """What became of it. `num_bytes` have been written to this rank's weights; `changed`: whether
    any of them may differ from before. `seconds`: of a push, by phase: `open` what it names,
    `begin` an update, `check`, `scan` for what is not finite, `copy`, `wait` for the device."""

    num_bytes: int = 0
    changed: bool = False
    seconds: dict[str, float] = {}
    digest: str = ""
    values: list[float] = []
    error: WireError | None = None
