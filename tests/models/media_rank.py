"""One rank of test_media_parallel.py: run as a process, writes its log-probabilities to a file.

python -m tests.models.media_rank RANK RANKS STORE [--shared] FOLDER...

--shared: the ranks share out images, of which a prompt has up to seven.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from headrace.back.parallel.mesh import tensor_parallel_mesh
from tests.models import test_towers as towers
from tests.models.media import Prompt, image, scored_by_runner

CHUNK, LONG = 7, 256


def prompts_of(name: str) -> list[Prompt]:
    """An image cut by chunks, text, two images; in the shapes of this case's family."""
    case = towers.CASES.get(name)
    if case is None:
        sizes, more = ((1, 4, 4), (1, 2, 6)), {"merge": 2}
    else:
        sizes, more = case.grids, {"merge": case.merge, "breaks": case.breaks}
    first, other = (image(seed, grid, patch=4, **more) for seed, grid in enumerate(sizes))
    seeing = Prompt().text(5, 6, 102).put(first).text(103, 8)
    both = Prompt().text(5, 102).put(other).text(103, 9, 102).put(first).text(103, 7)
    return [seeing, Prompt().text(*range(3, 20)), both]


def many_images_of(name: str) -> list[Prompt]:
    """One, three and seven images of different sizes, where the family has several."""
    case = towers.CASES.get(name)
    if case is None:
        sizes, more = ((1, 4, 4), (1, 2, 6)), {"merge": 2}
    else:
        sizes, more = case.grids, {"merge": case.merge, "breaks": case.breaks}
    prompts = []
    for count in (1, 7):
        prompt = Prompt().text(5, 6)
        for index in range(count):
            grid = sizes[index % len(sizes)]
            prompt.text(102).put(image(10 * count + index, grid, patch=4, **more)).text(103)
        prompts.append(prompt.text(8))
    return prompts


def main(rank: int, ranks: int, store: str, folders: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    shared = "--shared" in folders
    for folder in folders:
        if folder.startswith("--"):
            continue
        prompts = many_images_of if shared else prompts_of
        scores = scored_by_runner(
            Path(folder),
            prompts(Path(folder).name),
            mesh=tensor_parallel_mesh(),
            chunk=LONG if shared else CHUNK,
            shares_encoder=shared,
        )
        torch.save(
            [torch.from_numpy(np.stack(one)) for one in scores], Path(folder) / f"rank{rank}.pt"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    # The interpreter's own shutdown sometimes ends a gloo thread that still runs, and with it the process (SIGABRT).
    os._exit(0)
