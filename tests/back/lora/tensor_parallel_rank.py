"""One rank of test_tensor_parallel.py: run as a process, writes its logits to a file.

python -m tests.back.lora.tensor_parallel_rank RANK RANKS STORE FOLDER...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.back.lora.store import AdapterStore
from headrace.back.parallel.mesh import tensor_parallel_mesh
from tests.back.lora.test_applied import CPU, KINDS, LENGTHS, spec_of
from tests.models.oracle import BLOCK_TOKENS, load_ours
from tests.models.paged import random_rows, teacher_forced

SLOTS = (1, 0, 2)


def kinds_of(folder: str) -> tuple[str, ...]:
    """What there is room for: folders say it by their names."""
    return KINDS if "kinds" in Path(folder).name else ()


def main(rank: int, ranks: int, store: str, folders: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for folder in folders:
        spec = spec_of(Path(folder), kinds=kinds_of(folder))
        model = load_ours(spec, mesh=tensor_parallel_mesh())
        adapters = AdapterStore(model.adapters, CPU)
        for slot, name in enumerate(("one", "two"), start=1):
            adapters.read(name, str(Path(folder) / name))
            adapters.place(name, slot)
        rows = random_rows(spec.logits_width, LENGTHS)
        how = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32, "slots": SLOTS}
        torch.save(teacher_forced(model, rows, **how), Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    os._exit(0)
