"""Memory of a GPU that another process of this machine has lent: nothing is copied on the way, and
nothing that came over the wire is unpickled.

The lender keeps its tensor until the push has been answered.
"""

from __future__ import annotations

import torch

from headrace.base.errors import InvalidRequest
from headrace.base.wire.weights import SharedMemory


def uuid_of(device: torch.device) -> str:
    """What tells a GPU from all others, in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def lend(buffer: torch.Tensor) -> dict[str, SharedMemory]:
    """The storage of a tensor on a GPU, for `opened` in another process."""
    _, handle, size, offset, counter, counter_offset, event, awaits = (
        buffer.untyped_storage()._share_cuda_()
    )
    memory = SharedMemory(
        handle=handle,
        num_bytes=size,
        offset_bytes=offset,
        counter_handle=counter,
        counter_offset=counter_offset,
        event_handle=event,
        awaits_event=awaits,
    )
    return {uuid_of(buffer.device): memory}


def opened(handles: dict[str, SharedMemory], device: torch.device) -> torch.Tensor:
    """The lent memory on this device, uint8 [bytes]."""
    if device.type != "cuda":
        raise InvalidRequest(
            "handles: they are of GPUs, and this engine runs on a CPU", field="handles"
        )
    memory = handles.get(uuid_of(device))
    if memory is None:
        raise InvalidRequest(
            f"handles: none is of GPU {uuid_of(device)}, but of {', '.join(sorted(handles)) or 'none'}",
            field="handles",
        )
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        memory.handle,
        memory.num_bytes,
        memory.offset_bytes,
        memory.counter_handle,
        memory.counter_offset,
        memory.event_handle,
        memory.awaits_event,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
