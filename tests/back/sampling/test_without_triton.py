"""A CPU's sampler neither needs nor imports Triton (REG-122, PLT-10)."""

import subprocess
import sys

CODE = """
import sys
sys.modules["triton"] = None  # importing it raises
import torch
from headrace.back.sampling.sampler import Sampler
sampler = Sampler(max_rows=4, logits_width=100, device=torch.device("cpu"))
assert {d.field for d in sampler.decisions} >= {"kernel.greedy", "kernel.gumbel", "kernel.nucleus"}
logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
picks, _ = sampler.greedy(logits)
assert torch.equal(picks.long(), logits.argmax(-1)), picks
"""


def test_it_is_built_and_picks_where_triton_cannot_be_imported():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
