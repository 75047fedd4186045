"""One rank of test_sequence_parallel.py: run as a process, writes what it computed to files.

python -m tests.models.sequence_rank RANK RANKS STORE FOLDER...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.back.models.decoder_layer import DecoderLayer
from headrace.back.parallel.mesh import tensor_parallel_mesh
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec
from tests.models.paged import PagedRun, random_rows

TOKENS = 38
"""Not a multiple of the ranks, so that the last one pads."""


class Sent:
    """Counts what each rank sends: of a sum twice the parts of the others, else once."""

    def __init__(self) -> None:
        self.num_bytes = 0.0
        for name, turns, message in (
            ("all_reduce", 2, 0),
            ("all_to_all_single", 1, 1),
            ("all_gather_into_tensor", 1, 0),
        ):
            setattr(dist, name, self._counted(getattr(dist, name), turns, message))

    def _counted(self, call: Callable[..., Any], turns: int, message: int) -> Callable[..., Any]:
        def counted(*tensors: torch.Tensor, **more: Any) -> Any:
            others = 1 - 1 / dist.get_world_size()
            self.num_bytes += turns * others * tensors[message].nbytes
            return call(*tensors, **more)

        return counted


class Rows:
    """The rows of the residual that layers leave behind."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        forward = DecoderLayer.forward

        def seen(layer: DecoderLayer, *stream: Any, **more: Any) -> Any:
            self.seen.append(stream[0][1].shape[0])
            return forward(layer, *stream, **more)

        DecoderLayer.forward = seen


def main(rank: int, ranks: int, store: str, folders: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    sent, rows = Sent(), Rows()
    for folder in folders:
        spec = model_spec(Path(folder))
        found = {}
        for name, least in (("whole", 0), ("parts", 20), ("short", TOKENS + 1)):
            mesh = replace(tensor_parallel_mesh(), sequence_rows=least)
            model = load_ours(spec, mesh=mesh)
            (tokens,) = random_rows(spec.logits_width, (TOKENS + 3,))
            run = PagedRun(model, [tokens], block_tokens=BLOCK_TOKENS, dtype=torch.float32)
            sent.num_bytes, rows.seen = 0.0, []
            logits = [run.step([(0, TOKENS)], last=True)[0]]
            prompt = {"bytes": sent.num_bytes, "rows": list(rows.seen)}
            logits += [run.step([(0, 1)])[0] for _ in range(3)]
            found[name] = {"logits": torch.cat(logits), **prompt}
        torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    os._exit(0)
