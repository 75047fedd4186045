"""Weights that lie in host memory: whole layers, or the routed experts of layers, of models larger
than their device.

While a model loads, the parameters of such a part are filled in host memory. When its layers' work
is due they are brought to the device, packed and bound to kernels as all others are; what came of
them goes back to host memory in one piece. Layers and bound kernels keep the tensors that they
have, which are pointed at other memory from then on: at one of the SLOTS pieces of device memory
that all parts share.

In a step the parts pass through the slots in their order. A stream of its own copies the part
after next into a slot as soon as the layer that read it is behind, so that copies run beside the
computation; a step takes the longer of both. All are events, and copies between fixed addresses:
steps are recorded as others are.

Routed experts are read where they are, over the link, in steps that choose few of them: the memory
is mapped into the device's address space, and the kernels read the chosen experts alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from headrace.back.kernels.launches import are_launched
from headrace.back.layers.reachable import bytes_of, room_of, tensors_of
from headrace.back.platforms import huge_pages
from headrace.base.errors import StartError

log = logging.getLogger(__name__)
SLOTS = 2
"""One that is read while the other one is filled."""
HOST = torch.device("cpu")
_PORTABLE_AND_MAPPED = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class _Held:
    """A tensor of a part, and where in it its storage begins, in bytes."""

    tensor: torch.Tensor
    start: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def point_at(self, memory: torch.Tensor) -> None:
        """Its elements are from now on those of `memory`, which holds the part."""
        item = self.tensor.element_size()
        offset = (memory.storage_offset() + self.start) // item + self.offset
        self.tensor.set_(memory.untyped_storage(), offset, self.size, self.stride)


class HostPart:
    """The weights of one layer, or of its routed experts: `routed` of them, of which a token takes
    so many; None: of a whole layer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.routed: tuple[int, int] | None = None
        self.num_bytes = 0
        self.host = torch.empty(0, dtype=torch.uint8)
        self._mapped: torch.Tensor | None = None
        self._held: list[_Held] = []
        self._memory: torch.Tensor | None = None

    def bring(self, root: object, without: Iterable[object] = ()) -> None:
        """Everything that `root` holds in host memory lies on the device; it keeps its tensors."""
        if self.device.type == HOST.type:
            return
        moved: dict[int, torch.Tensor] = {}
        for tensor in list(tensors_of(root, without=without)):
            storage = tensor.untyped_storage()
            if tensor.device.type != HOST.type or not storage.nbytes():
                continue
            key = storage.data_ptr()
            if key not in moved:
                moved[key] = bytes_of(storage, tensor.device, storage.nbytes()).to(self.device)
            view = torch.empty(0, dtype=tensor.dtype, device=self.device)
            where = tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.data = view.set_(moved[key].untyped_storage(), *where)

    def keep(
        self, root: object, *, without: Iterable[object] = (), shared: Iterable[torch.Tensor] = ()
    ) -> None:
        """Everything that `root` holds on the device goes to host memory, but what it shares with
        others. Nobody may read it until it is pointed at memory."""
        others = {tensor.untyped_storage().data_ptr() for tensor in shared}
        starts: dict[int, int] = {}
        storages: list[torch.UntypedStorage] = []
        for tensor in tensors_of(root, without=without):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if tensor.device != self.device or not storage.nbytes() or address in others:
                continue
            if address not in starts:
                starts[address] = self.num_bytes
                self.num_bytes += room_of(storage.nbytes())
                storages.append(storage)
            self._held.append(
                _Held(
                    tensor=tensor,
                    start=starts[address],
                    offset=tensor.storage_offset(),
                    size=tuple(tensor.size()),
                    stride=tuple(tensor.stride()),
                )
            )
        self.host = torch.empty(self.num_bytes, dtype=torch.uint8)
        huge_pages.advise(self.host.data_ptr(), self.num_bytes)
        if self.device.type == "cuda":  # first pages, then pins, then copies at the link's rate
            huge_pages.populate(self.host.data_ptr(), self.num_bytes)
            self._mapped = _pinned(self, self.host, self.device)
        for storage in storages:
            start = starts[storage.data_ptr()]
            self.host[start : start + storage.nbytes()].copy_(
                bytes_of(storage, self.device, storage.nbytes()), non_blocking=True
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        for held in self._held:
            held.tensor.set_(nothing.untyped_storage(), 0, (0,), (1,))

    def give_up(self, shared: set[int]) -> None:
        """The tensors of these ids stay on the device: other layers read them as well."""
        for held in [one for one in self._held if id(one.tensor) in shared]:
            self._held.remove(held)
            held.point_at(self.host.to(self.device))
            held.tensor.data = held.tensor.clone()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that are pointed."""
        return [held.tensor for held in self._held]

    def point_at(self, memory: torch.Tensor) -> None:
        """From now on the weights are read in `memory`, which holds this part or will."""
        if self._memory is not memory:
            self._memory = memory
            for held in self._held:
                held.point_at(memory)

    def point_at_host(self) -> None:
        """The weights are read where they lie."""
        self.point_at(self.host if self._mapped is None else self._mapped)

    def in_place(self, tokens: int) -> bool:
        """Whether a step of so many tokens reads less in place than a copy would."""
        if self.routed is None:
            return False
        experts, chosen = self.routed
        return 2 * tokens * chosen <= experts


class Copies(Protocol):
    """Copies to the device, beside what it computes; in the order in which they are asked for."""

    def follow(self) -> None:
        """Copies asked for from now on come behind what was launched so far."""
        ...

    def copy(self, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Asks for a copy, by number."""
        ...

    def wait(self, index: int) -> None:
        """What is launched from now on comes behind that copy."""
        ...


class HostCopies:
    """Of a CPU, where each is done when it was asked for."""

    def follow(self) -> None:
        """See Copies."""

    def copy(self, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Copies."""
        if are_launched():
            target.copy_(source)

    def wait(self, index: int) -> None:
        """See Copies."""


class CudaCopies:
    """On a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._done: dict[int, torch.cuda.Event] = {}

    def follow(self) -> None:
        """See Copies."""
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())

    def copy(self, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Copies."""
        with torch.cuda.stream(self._stream):
            if are_launched():
                target.copy_(source, non_blocking=True)
            self._done[index] = self._stream.record_event()

    def wait(self, index: int) -> None:
        """See Copies."""
        torch.cuda.current_stream(self._device).wait_event(self._done.pop(index))


class WeightStream:
    """The parts of one model on their way through the slots.

    Between `begin` and the last part's `done` the slot i % SLOTS holds part i from `use(i)` to
    `done(i)`, unless that is read in place.
    """

    def __init__(self, parts: Sequence[HostPart], device: torch.device) -> None:
        self.parts, self._device = tuple(parts), device
        self._copies: Copies = CudaCopies(device) if device.type == "cuda" else HostCopies()
        size = max(part.num_bytes for part in parts)
        self._slots = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for _ in range(min(SLOTS, len(parts)))
        ]
        self._in_place = False
        for i, part in enumerate(self.parts):
            part.point_at(self._slots[i % SLOTS])

    @property
    def slot_bytes(self) -> int:
        """Of device memory."""
        return sum(slot.nbytes for slot in self._slots)

    def begin(self, tokens: int) -> None:
        """A step of so many tokens begins."""
        self._in_place = all(part.in_place(tokens) for part in self.parts)
        if self._in_place:
            return
        self._copies.follow()
        for index in range(len(self._slots)):
            self._fetch(index)

    def use(self, index: int) -> None:
        """Part `index` is read next."""
        part = self.parts[index]
        if self._in_place:
            part.point_at_host()
            return
        part.point_at(self._slots[index % SLOTS])
        self._copies.wait(index)

    def done(self, index: int) -> None:
        """Nothing of this step reads part `index` any more."""
        following = index + SLOTS
        if not self._in_place and following < len(self.parts):
            self._copies.follow()
            self._fetch(following)

    def _fetch(self, index: int) -> None:
        part = self.parts[index]
        target = self._slots[index % SLOTS][: part.num_bytes]
        self._copies.copy(index, target, part.host)


@dataclass(eq=False)
class Offload:
    """Which layers' weights lie in host memory while one model is built and loaded. `experts`: only
    their routed experts do. `stream` is there once all are loaded."""

    layers: frozenset[int]
    experts: bool
    device: torch.device
    parts: dict[int, HostPart] = field(default_factory=dict)
    stream: WeightStream | None = None

    def part(self, index: int) -> HostPart:
        """The part of layer `index`, which is one of `layers`."""
        return self.parts.setdefault(index, HostPart(self.device))

    def settle(self, layers: Sequence[object], *, without: Iterable[object]) -> None:
        """All parts are in host memory: the slots come, and `layers` run over them from now on."""
        parts = [self.parts[index] for index in sorted(self.parts)]
        if len(parts) != len(self.layers):
            raise StartError(f"{len(parts)} of {len(self.layers)} layers lie in host memory")
        self._keep_shared(layers, tuple(without))
        self.stream = WeightStream(parts, self.device)

    def _keep_shared(self, layers: Sequence[object], without: tuple[object, ...]) -> None:
        """What several layers hold is no part's own."""
        owner = {id(t): index for index, part in self.parts.items() for t in part.tensors}
        shared: dict[int, set[int]] = {}
        for index, layer in enumerate(layers):
            for tensor in tensors_of(layer, without=without):
                of = owner.get(id(tensor), index)
                if of != index:
                    shared.setdefault(of, set()).add(id(tensor))
        for index, ids in shared.items():
            self.parts[index].give_up(ids)


class _DeviceView:
    """Mapped host memory as the device sees it: the same address."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _pinned(owner: HostPart, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Registers host memory with the driver for as long as `owner` lives; a tensor of the device
    over it. torch's own pinned memory comes in powers of two."""
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE_AND_MAPPED))
    if status:
        raise StartError(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory cannot be pinned for weights (CUDA error {status}): "
            "offload fewer layers, or raise the limit on locked memory"
        )
    weakref.finalize(owner, _unpin, runtime.cudaHostUnregister, memory)
    return torch.as_tensor(_DeviceView(memory), device=device)


def _unpin(unregister: Callable[[int], object], memory: torch.Tensor) -> None:
    """The memory lives as long as its registration."""
    unregister(memory.data_ptr())
