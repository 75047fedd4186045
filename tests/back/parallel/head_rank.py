"""One rank of test_head_ranks.py: run as a process, writes what its output heads choose to a file.

python -m tests.back.parallel.head_rank RANK RANKS FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.back.kernels.linear_top.op import NUM_CANDIDATES
from headrace.back.layers import logits
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.logits import LogitsHead
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.parallel.mesh import Axis, Mesh, tensor_parallel_mesh
from headrace.back.parallel.param import copies
from headrace.back.quant.parts import PartSchemes

VOCABULARY, WIDTH, ROWS = 1003, 64, 6
CASES = [
    (dtype, scheme, tied)
    for dtype in (torch.float32, torch.bfloat16)
    for scheme in (None, "int8")
    for tied in (False, True)
]


def weight_and_hidden(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with equal logits within ranks and across their borders, one with a NaN, one of -Inf."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    hidden = torch.randn(ROWS, WIDTH, generator=generator)
    best = int((weight @ hidden[0]).argmax())
    weight[[3, 250, 251, 500, 501, 502, 751, 1002]] = weight[best].clone()
    hidden[2] = 0.0
    hidden[3, 5] = float("nan")
    return weight.to(dtype), hidden.to(dtype)


def chosen(mesh: Mesh) -> list[tuple[torch.Tensor, ...]]:
    """(argmax ids and values, top ids and values) of every case on this rank."""
    results = []
    for dtype, scheme, tied in CASES:
        weight, hidden = weight_and_hidden(dtype)
        scope = Scope(
            ledger=Ledger(), mesh=mesh, device=torch.device("cpu"), dtype=dtype, block_tokens=16,
            max_positions=8, online=PartSchemes(scheme),
        )  # fmt: skip
        table = TokenEmbedding(scope / "embed", VOCABULARY, WIDTH, tied=True) if tied else None
        head = LogitsHead(scope / "head", VOCABULARY, WIDTH, tied=table)
        for param in scope.ledger.params:
            for copy in copies(param):
                param.target(copy).copy_(weight[copy.source])
            param.filled()
        scope.ledger.finish()
        assert head.argmax is not None and head.top_candidates is not None
        whole = head.logits(hidden)
        assert whole.shape == (ROWS, VOCABULARY)
        results.append((*head.argmax(hidden), *head.top_candidates(hidden), whole))
    return results


def gathered_columns(monitored: list[int]) -> None:
    """Notes the columns of each tensor that a head gathers from now on."""
    gather = logits.all_gather

    def noted(x: torch.Tensor, axis: Axis) -> torch.Tensor:
        monitored.append(x.shape[1])
        return gather(x, axis)

    logits.all_gather = noted


def main(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks
    )
    columns: list[int] = []
    gathered_columns(columns)
    results = chosen(tensor_parallel_mesh())
    assert sorted(set(columns)) == [2, 2 * NUM_CANDIDATES, -(-VOCABULARY // ranks)], columns
    torch.save(results, folder / f"{ranks}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    # The interpreter's own shutdown sometimes ends a gloo thread that still runs (SIGABRT).
    os._exit(0)
