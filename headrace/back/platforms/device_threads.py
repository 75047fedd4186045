"""Threads that work on a device. Which GPU a thread launches kernels on is the thread's own matter:
a new one launches on the first, and a kernel there that is given memory of another GPU ends with an
illegal access. PyTorch's own operations go where their tensors are; Triton's kernels do not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def use_device(device: torch.device) -> None:
    """From here on the calling thread launches on this device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_pool(count: int, name: str) -> ThreadPoolExecutor:
    """`count` threads called `name` that launch on the GPU that the calling thread launches on."""
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(count, thread_name_prefix=name)
    return ThreadPoolExecutor(
        count,
        thread_name_prefix=name,
        initializer=torch.cuda.set_device,
        initargs=(torch.cuda.current_device(),),
    )
