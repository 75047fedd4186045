"""One rank of test_tensor_parallel.py: run as a process, writes its logits to a file.

python -m tests.models.tensor_parallel_rank RANK RANKS STORE [--whole-experts=EXCHANGE] FOLDER...
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.back.parallel.mesh import tensor_parallel_mesh, with_whole_experts
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec
from tests.models.paged import random_rows, teacher_forced

LENGTHS = (19, 11)
WHOLE_EXPERTS = "--whole-experts="


def main(rank: int, ranks: int, store: str, folders: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    whole = folders[0].startswith(WHOLE_EXPERTS)
    exchange = folders[0].removeprefix(WHOLE_EXPERTS)
    for folder in folders[whole:]:
        spec = model_spec(Path(folder))
        mesh = tensor_parallel_mesh()
        model = load_ours(spec, mesh=with_whole_experts(mesh, exchange) if whole else mesh)
        rows = random_rows(spec.logits_width, LENGTHS)
        logits = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
        torch.save(logits, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    # The interpreter's own shutdown sometimes ends a gloo thread that still runs, and with it the process (SIGABRT).
    os._exit(0)
