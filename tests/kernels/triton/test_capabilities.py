"""What each NVIDIA device may be asked for, as one table (PLT-06): by family or from a capability on, never by a list
of known devices; but for instructions that one capability alone has."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.back.kernels.attention import hopper, hopper_decode
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.triton import wrap

TABLE = {
    # capability: (dependent launch, pairs of bfloat16, fp8 codes, small tiles of fixed order, copy engine's prefill)
    (8, 0): (False, False, False, True, False),
    (8, 6): (False, False, False, True, False),
    (8, 9): (False, False, True, True, False),
    (9, 0): (True, True, True, True, True),
    (10, 0): (True, False, True, False, False),
    (10, 3): (True, False, True, False, False),
    (11, 0): (True, False, True, False, False),
    (12, 0): (True, True, True, False, False),
    (12, 1): (True, True, True, False, False),
}
PROBLEM = AttentionProblem(
    device="cuda", dtype=torch.bfloat16, heads=32, kv_heads=8, head_dim=128, block_tokens=16,
    scale=128**-0.5,
)  # fmt: skip


@pytest.mark.skipif(wrap.interpreted(), reason="the interpreter has no device")
@pytest.mark.parametrize("capability", TABLE)
def test_a_capability_allows_what_the_table_says(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """REG-054."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = (
        wrap.has_dependent_launch.__wrapped__(torch.device("cuda")),
        wrap.has_bfloat_pairs.__wrapped__(),
        wrap.unsupported_quantization("fp8", 128) is None,
        wrap.has_known_products.__wrapped__(),
        hopper.unfit(PROBLEM) is None,
    )
    assert found == TABLE[capability]
    assert hopper_decode.unfit(PROBLEM) == hopper.unfit(PROBLEM)
