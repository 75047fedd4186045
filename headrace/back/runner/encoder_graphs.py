"""Encoders of images and sound in CUDA graphs by size.

A pass of an encoder is a few hundred small kernels, and everything but the values of its input
follows from the sizes of what it takes. So a pass of sizes that have come before is recorded, and
from then on is one launch and two copies. What was recorded is run once and compared with what the
plain pass gave, before it is trusted. Passes that are large take so long on the device that the
host's work beside them costs nothing: they are never recorded, which bounds the memory of graphs;
so do their number, the least recently used one goes, and what the device has less for them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.launches import are_launched
from headrace.back.kernels.upload import KeptCopies
from headrace.back.layers.prompt_vectors import PromptVectors
from headrace.back.layers.vision.encoder import Grid, MediaEncoder
from headrace.back.layers.vision.shared_encoder import SharedEncoder
from headrace.back.runner.device_graphs import alias, capture

MOST_ROWS = 4096
"""Patches, frames or positions of a pass that is recorded."""
MOST_GRAPHS = 32
MOST_BYTES = 512 << 20
"""Of the device, for all graphs together."""
MOST_SEEN = 256
"""Sizes that are remembered until they come again."""
AGREEMENT = 0.02
"""How far a recorded pass may lie from a plain one, of the largest value: kernels may be chosen
anew, so that in bfloat16 sums are rounded otherwise."""

log = logging.getLogger(__name__)

Pass = Callable[[torch.Tensor], torch.Tensor]
Key = tuple[Hashable, ...]


class RecordedPass(Protocol):
    """A recorded pass."""

    output: torch.Tensor

    def replay(self) -> None:
        """Runs it over what its input holds now."""
        ...


class PassRecorder(Protocol):
    """How passes are recorded on a device."""

    def record(self, work: Callable[[], torch.Tensor]) -> RecordedPass:
        """Records what `work` launches. RuntimeError where it waits for the device."""
        ...

    def free_bytes(self) -> int:
        """What the device has left."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """`copies`: what the pass reads beside its input and the weights."""

    input: torch.Tensor
    copies: KeptCopies
    graph: RecordedPass

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """What the pass gives; the next one overwrites it."""
        self.input.copy_(x)
        self.graph.replay()
        return self.graph.output


class EncoderGraphs:
    """The graphs of a runner's encoders. All passes are run by the thread, and on the stream, that
    runs the steps; what one gives is read before the next."""

    def __init__(self, recorder: PassRecorder) -> None:
        self._recorder = recorder
        self._graphs: OrderedDict[Key, _Recorded] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._refused: set[Hashable] = set()
        self.num_bytes = 0
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        """That are kept now."""
        return len(self._graphs)

    def run(self, key: Key, rows: int, x: torch.Tensor, work: Pass) -> torch.Tensor:
        """`work` over `x`. `key`: the kind of input, then the sizes that all else follows from;
        `rows`: how large the pass is."""
        if rows > MOST_ROWS or not are_launched():
            return work(x)
        recorded = self._graphs.get(key)
        if recorded is not None:
            self._graphs.move_to_end(key)
            self.num_replays += 1
            return recorded.run(x)
        if key[0] in self._refused or self.num_bytes > MOST_BYTES:
            return work(x)
        if key not in self._seen:
            self._seen[key] = None
            while len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
            return work(x)
        return self._record(key, x, work)

    def _record(self, key: Key, x: torch.Tensor, work: Pass) -> torch.Tensor:
        copies, own = KeptCopies(), x.clone()
        with copies.active(again=False):
            y = work(own)
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        free = self._recorder.free_bytes()
        try:
            with copies.active(again=True):
                graph = self._recorder.record(lambda: work(own))
        except RuntimeError as error:
            self._refuse(key, f"{error}")
            return y
        recorded = _Recorded(input=own, copies=copies, graph=graph)
        self.num_bytes += max(0, free - self._recorder.free_bytes())
        off = (recorded.run(x).float() - y.float()).abs().max()
        if not off <= AGREEMENT * y.float().abs().max():
            self._refuse(key, f"it is off by {off.item():.3g}")
            return y
        self._graphs[key] = recorded
        return y

    def _refuse(self, key: Key, why: str) -> None:
        self._refused.add(key[0])
        log.warning("the encoder of %s is launched kernel by kernel: recorded, %s", key[0], why)


class CudaPassRecorder:
    """PassRecorder of a CUDA device: graphs of one memory pool, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], torch.Tensor]) -> RecordedPass:
        """See PassRecorder. Later graphs may use the memory of the output, which is read before."""
        graph, output = capture(lambda: work().contiguous(), self._stream, self._pool)
        return _CudaReplayed(graph, alias(output))

    def free_bytes(self) -> int:
        """See PassRecorder."""
        return torch.cuda.mem_get_info(self._device)[0]


class _CudaReplayed:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph, self.output = graph, output

    def replay(self) -> None:
        self._graph.replay()


class RecordedEncoder:
    """`MediaEncoder` around one, whose passes are recorded by the grids of their inputs."""

    def __init__(self, encoder: MediaEncoder, graphs: EncoderGraphs) -> None:
        self._encoder, self._graphs = encoder, graphs
        self.forms, self.width = encoder.forms, encoder.width
        self.layers, self.dtype, self.rope = encoder.layers, encoder.dtype, encoder.rope

    @property
    def inner(self) -> MediaEncoder:
        """See WrappedEncoder: a pass with rests is not recorded."""
        return self._encoder

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        return self._graphs.run(
            (kind, *grids),
            rows_NB.shape[0],
            rows_NB,
            lambda rows: self._encoder.encode(kind, rows, grids),
        )


def graphs_on(device: torch.device) -> EncoderGraphs | None:
    """None: the device has no graphs."""
    return EncoderGraphs(CudaPassRecorder(device)) if device.type == "cuda" else None


def recorded_encoder(encoder: MediaEncoder, graphs: EncoderGraphs | None) -> MediaEncoder:
    """The encoder in graphs; of one whose ranks share out the inputs, what each does alone."""
    if graphs is None:
        return encoder
    if isinstance(encoder, SharedEncoder | PromptVectors):
        return encoder.around(lambda own: recorded_encoder(own, graphs))
    return RecordedEncoder(encoder, graphs)
