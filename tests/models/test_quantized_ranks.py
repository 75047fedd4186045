"""Schemes over two ranks by gloo lose no more than on one; biases of experts are added once (QNT-08)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.back.parallel.mesh import Mesh
from headrace.back.quant.scheme import ONLINE_SCHEMES
from tests.models.oracle import save_oracle
from tests.models.quantized_rank import logits
from tests.models.test_parity import tiny_config
from tests.rank_processes import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_every_scheme_over_two_ranks(name: str, tmp_path: Path) -> None:
    """An error beside the plain model's logits; a rank's scales are finer where it has part of the inputs."""
    oracle = save_oracle(tiny_config(name), tmp_path)
    biases = [one for key, one in oracle.state_dict().items() if key.endswith("proj_bias")]
    assert name != "gpt-oss" or min(float(one.abs().mean()) for one in biases) > 0.01
    schemes = [scheme for scheme in ONLINE_SCHEMES if not scheme.endswith(("-g64", "-g128"))]
    run_ranks("tests.models.quantized_rank", 2, tmp_path / "store", tmp_path, *schemes)
    plain = logits(tmp_path, None, Mesh())
    for scheme in schemes:
        alone = (logits(tmp_path, scheme, Mesh()) - plain).norm()
        first, second = (torch.load(tmp_path / f"{scheme}-{rank}.pt") for rank in range(2))
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
        assert 0 < (first - plain).norm() < 1.6 * alone, scheme
