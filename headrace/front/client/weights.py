"""New weights for a running engine, asked for by its client: which orders the cores get, and the
pause around them. Tensors in this process's memory go through a file in shared memory.

Knows no torch: of a tensor it asks what torch's and NumPy's have in common with a buffer.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.base.wire.weights import WeightOrder
from headrace.front.client.events import EngineClient

MODES = ("abort", "wait", "keep")
SHARED = Path("/dev/shm")
STORED = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
"""A tensor's type -> what safetensors calls it."""


class TorchTensor(Protocol):
    """What is asked of a torch tensor."""

    dtype: Any
    shape: Any
    nbytes: int

    def detach(self) -> Any: ...

    def data_ptr(self) -> int: ...


async def replace_weights(
    engine: EngineClient, orders: Sequence[WeightOrder], *, version: str = "", mode: str = "wait"
) -> list[dict[str, Any]]:
    """Has every core carry out the orders, in a pause of `mode` unless one is there; the cores'
    last replies. What cannot be done is the first core's error. An engine whose weights are a
    mixture afterwards stays paused."""
    if mode not in MODES:
        raise InvalidRequest(f"mode: {mode!r:.40} given; allowed: {', '.join(MODES)}", field="mode")
    states: list[Any] = await engine.call("is_paused")
    paused = all(state["paused"] for state in states)
    if not paused:
        await engine.call("pause", mode=mode)
    replies: list[Any] = []
    try:
        for order in orders:
            replies = await engine.call("weights", order=as_text(order), version=version)
    finally:
        if not paused:
            await _resume_whole(engine)
    return replies


def as_text(order: WeightOrder) -> str:
    """An order as an argument of the cores' call `weights`."""
    return msgspec.json.encode(order).decode()


async def push_weights(
    engine: EngineClient, source: str | Mapping[str, Any], *, version: str, mode: str
) -> str:
    """Weights from a folder of safetensors, or from tensors by their checkpoint names; the version
    that they got."""
    if isinstance(source, Mapping):
        with in_shared_memory(source) as folder:
            return await push_weights(engine, folder, version=version, mode=mode)
    order = WeightOrder(action="push", way="files", path=str(source), last=True)
    replies = await replace_weights(engine, [order], version=version, mode=mode)
    return str(replies[0]["version"])


async def _resume_whole(engine: EngineClient) -> None:
    """Lets those cores go on whose weights are of one version."""
    states: list[Any] = await engine.call_each("weights_version")
    if not any(isinstance(state, HeadraceError) or state["mixed"] for state in states):
        await engine.call("resume")


@contextmanager
def in_shared_memory(tensors: Mapping[str, Any]) -> Iterator[str]:
    """A folder with the tensors as safetensors, in shared memory where there is any; it is removed
    behind the block."""
    root = SHARED if SHARED.is_dir() and os.access(SHARED, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="headrace-weights-", dir=root))
    try:
        write_safetensors(tensors, folder / "model.safetensors")
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def stored_in_shared_memory(contents: Sequence[bytes]) -> Iterator[str]:
    """The same of contents of safetensors files."""
    with in_shared_memory({}) as name:
        folder = Path(name)
        (folder / "model.safetensors").unlink()
        for number, content in enumerate(contents):
            path = folder / f"model-{number:05d}.safetensors"
            path.touch(mode=0o600)
            path.write_bytes(content)
        yield name


def write_safetensors(tensors: Mapping[str, Any], path: Path) -> None:
    """Writes tensors of torch (of any device) or NumPy; InvalidRequest if one is neither."""
    header: dict[str, Any] = {}
    start = 0
    each = []
    for name, tensor in tensors.items():
        host = _on_host(name, tensor)
        kind = STORED.get(str(host.dtype).removeprefix("torch."))
        if kind is None:
            known = ", ".join(STORED)
            raise InvalidRequest(
                f"weights: {name} is of {host.dtype}; known are {known}", field="weights"
            )
        shape = [int(size) for size in host.shape]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, start + host.nbytes]}
        start += host.nbytes
        each.append(host)
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for host in each:
            if math.prod(host.shape):
                file.write(_bytes_of(host))


def _on_host(name: str, tensor: Any) -> Any:
    try:
        if hasattr(tensor, "data_ptr"):
            return tensor.detach().cpu().contiguous()
        return tensor if tensor.flags["C_CONTIGUOUS"] else tensor.copy(order="C")
    except (AttributeError, TypeError):
        raise InvalidRequest(
            f"weights: {name} is a {type(tensor).__name__}, not a tensor", field="weights"
        ) from None


def _bytes_of(host: Any) -> memoryview:
    if hasattr(host, "data_ptr"):
        whole = (ctypes.c_char * host.nbytes).from_address(host.data_ptr())
        return memoryview(whole).cast("B")
    return memoryview(host).cast("B")
