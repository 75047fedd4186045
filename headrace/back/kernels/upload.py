"""Between host and device without waiting: the two copies that are allowed on the hot path.

Pageable memory would make the host wait for the stream; pinned memory comes from torch's caching
allocator, which gives a block out again only once the copy that used it is over.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`; on the CPU a writable array is shared, not copied."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host. From a device its values are there once the current stream has come
    to this point: the caller records an event afterwards and reads behind it. On the CPU it is a
    copy too: what a replayed step leaves is overwritten by the next one, which may be launched
    before the result is read."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def host_buffer(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zeros int32 on the host, which a copy to or from the device does not wait for."""
    return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
