"""Recording steps while other threads go on (`make test-gpu`)."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from headrace.back.kernels.upload import to_device, to_host
from headrace.back.runner.cuda_graphs import CudaGraphs
from headrace.back.runner.results import StepTensors
from headrace.back.runner.sizes import Bucket

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
BUCKET = Bucket(tokens=1, rows=1, decode=True, updates=2)


def test_a_result_may_be_freed_while_a_step_is_recorded() -> None:
    """The core's thread frees what it has read whenever it wants to: the pinned memory is given out again behind the
    work that filled it, which is not part of the recording (ENG-07, ENG-21)."""
    device = torch.device("cuda", torch.cuda.current_device())
    graphs = CudaGraphs(device, nullcontext)
    x = torch.arange(8.0, device=device)
    told: list[torch.Tensor] = []

    def step(bucket: Bucket) -> StepTensors:
        reader = threading.Thread(target=told.clear)
        reader.start()
        reader.join()
        y = x * 2
        return StepTensors(hidden_TE=y, logits_RV=None, argmax=(y + 1, y + 2))

    with graphs.scope():
        for _ in range(4):
            told += [to_host(x), to_host(x + 1)]
            out = graphs.run(BUCKET, step)
            for count in (1, 8, 100):  # asks all events of pinned memory
                assert torch.equal(
                    to_device(torch.ones(count).numpy(), device).cpu(), torch.ones(count)
                )
        assert graphs.num_graphs == 1
        x += 1
        graphs.run(BUCKET, step)
        assert torch.equal(out.argmax[0], x * 2 + 1)
