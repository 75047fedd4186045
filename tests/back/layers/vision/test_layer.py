"""Which kernel an encoder's attention gets (PLT-08)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.back.kernels.span_attention.op import OP as SPANS
from headrace.back.runner.warmup_media import grid_of
from tests.back.runner.test_encoder_graphs import encoder_of, rows_of


def test_an_extension_that_is_missing_is_a_reason_and_another_kernel_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REG-119: encoders choose as decoders do."""
    rows: list[torch.Tensor] = []
    for kernels in (SPANS.kernels, ("flash_attn_without_this_device:KERNEL",)):
        monkeypatch.setattr(SPANS, "kernels", kernels)
        monkeypatch.setattr(SPANS, "_choices", {})
        encoder = encoder_of("llava", tmp_path, torch.device("cpu"))
        (form,) = encoder.forms
        grid = grid_of(form, 16)
        pixels = rows_of(form, grid[0] * grid[1] * grid[2], 1)
        rows.append(encoder.encode(form.kind, pixels, [grid]))
    torch.testing.assert_close(*rows)
    (choice,) = SPANS.choices()
    assert choice.kernel is SPANS.reference
    ((name, reason),) = choice.rejected
    assert "flash_attn" in name and "flash_attn_without_this_device" in reason
