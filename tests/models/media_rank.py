"""One rank of test_media_parallel.py: run as a process, writes its log-probabilities to a file.

python -m tests.models.media_rank RANK RANKS STORE FOLDER...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from headrace.back.parallel.mesh import tensor_parallel_mesh
from tests.models.media import Prompt, image, scored_by_runner

CHUNK = 7


def prompts() -> list[Prompt]:
    """Of one shape for all families: an image cut by chunks, text, two images."""
    seeing = Prompt().text(5, 6, 102).put(image(1, (1, 4, 4), patch=4, merge=2)).text(103, 8)
    both = Prompt().text(5, 102).put(image(2, (1, 2, 6), patch=4, merge=2)).text(103, 9, 102)
    both.put(image(1, (1, 4, 4), patch=4, merge=2)).text(103, 7)
    return [seeing, Prompt().text(*range(3, 20)), both]


def main(rank: int, ranks: int, store: str, folders: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for folder in folders:
        scores = scored_by_runner(Path(folder), prompts(), mesh=tensor_parallel_mesh(), chunk=CHUNK)
        torch.save(
            [torch.from_numpy(np.stack(one)) for one in scores], Path(folder) / f"rank{rank}.pt"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    # The interpreter's own shutdown sometimes ends a gloo thread that still runs, and with it the process (SIGABRT).
    os._exit(0)
