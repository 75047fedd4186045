"""One rank of test_quantized_ranks.py: run as a process, writes its logits of each scheme to a file.

python -m tests.models.quantized_rank RANK RANKS STORE FOLDER SCHEME...
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh, tensor_parallel_mesh
from tests.models.oracle import BLOCK_TOKENS, model_spec
from tests.models.paged import random_rows, teacher_forced

LENGTHS = (19, 11)


def logits(folder: Path, scheme: str | None, mesh: Mesh) -> torch.Tensor:
    """Of all rows, one after the other."""
    spec = replace(model_spec(folder), quantization=scheme)
    model, _ = load_model(spec, mesh=mesh, device=torch.device("cpu"), block_tokens=BLOCK_TOKENS)
    rows = random_rows(spec.logits_width, LENGTHS)
    return torch.cat(teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32))


def main(rank: int, ranks: int, store: str, folder: str, schemes: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for scheme in schemes:
        found = logits(Path(folder), scheme, tensor_parallel_mesh())
        torch.save(found, Path(folder) / f"{scheme}-{rank}.pt")
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], sys.argv[5:])
    os._exit(0)  # as tensor_parallel_rank.py
