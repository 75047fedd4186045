"""HIGGS's pairs of rotated inputs are decoded index by index, in every arrangement of FLUTE's kernels.
QNT-17."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import Stored, open_weight

THREES = (0, 3, 6, 9, 12, 1, 4, 7, 10, 13, 2, 5, 8, 11, 14, 15)
INPUTS, ROTATED, GROUP = 128, 128, 64


def packed(index_IO: np.ndarray, bits: int, tile: int) -> np.ndarray:
    """int16 [O bits / 16, I]: what each word has, output by output."""
    inputs, outputs = index_IO.shape
    words = np.zeros((inputs, outputs * bits // 16), np.int64)
    apart = {2: 8, 3: 16, 4: 4}[bits]
    for pair in range(0, inputs, 2):
        for chunk in range(outputs // (apart * tile)):
            for t in range(tile):
                own = [chunk * apart * tile + j * tile + t for j in range(apart)]
                word = chunk * tile + t
                if bits == 3:
                    fields = [int(index_IO[pair + h, own[j]]) for j in THREES for h in (1, 0)]
                    stream = sum(field << 3 * i for i, field in enumerate(fields))
                    for k in range(3):
                        at = word if k == 0 else outputs // 16 + (2 * chunk + k - 1) * tile + t
                        words[pair, at] = stream >> 30 * k & 0xFFFF
                        high = stream >> 90 + 2 * k & 3
                        words[pair + 1, at] = stream >> 30 * k + 16 & 0x3FFF | high << 14
                    continue
                for h in (0, 1):
                    half = own[h * apart // 2 :][: apart // 2]
                    fields = [int(index_IO[pair + second, o]) for o in half for second in (1, 0)]
                    words[pair + h, word] = sum(f << bits * i for i, f in enumerate(fields))
    return words.T.astype(np.uint16).astype(np.int16)


def higgs_stored(bits: int, tile: int, dtype: torch.dtype) -> tuple[Stored, torch.Tensor]:
    random = np.random.default_rng(bits)
    outputs = 2 * tile * {2: 8, 3: 16, 4: 4}[bits]
    index = random.integers(0, 1 << bits, (INPUTS, outputs))
    generator = torch.Generator().manual_seed(bits)
    pairs = torch.randn(1 << bits, 1 << bits, 2, generator=generator).to(dtype)
    scales = (torch.rand(outputs, INPUTS // GROUP, generator=generator) + 0.5).to(dtype)
    rotated = torch.empty(outputs, INPUTS)
    for i in range(0, INPUTS, 2):
        rotated[:, i : i + 2] = pairs.float()[index[i], index[i + 1]]
    rotated *= scales.float().repeat_interleave(GROUP, 1)
    ones = np.bitwise_count(np.arange(ROTATED)[:, None] & np.arange(ROTATED)) % 2
    matrix = torch.from_numpy(1.0 - 2.0 * ones).float() / ROTATED**0.5
    return {
        "module.weight": torch.from_numpy(packed(index, bits, tile)),
        "module.scales": scales,
        "module.tables2": pairs.view(torch.float16),  # whatever its bits mean
        "module.tables": torch.arange(1 << bits).to(dtype),
    }, rotated @ matrix


def higgs_config(bits: int, template: int) -> dict[str, Any]:
    return {
        "quant_method": "higgs", "bits": bits, "p": 2, "group_size": GROUP,
        "hadamard_size": ROTATED, "modules_to_not_convert": ["lm_head"],
        "tune_metadata": {"module": {"num_bits": bits, "template_id": template, "num_sms": 128}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bits", "template", "tile"), [(4, 3, 64), (4, 40, 32), (2, 25, 64), (3, 30, 32)]
)
def test_pairs_of_rotated_inputs(bits: int, template: int, tile: int, tmp_path: Path) -> None:
    dtype = torch.float16 if template % 2 else torch.bfloat16
    stored, weight = higgs_stored(bits, tile, dtype)
    with closing(open_weight(tmp_path, higgs_config(bits, template), stored)) as source:
        shape = tuple(weight.shape)
        for cut in ((slice(None), slice(None)), (slice(100, 270), slice(37, 101))):
            target = torch.full(weight[cut].shape, torch.nan)
            source.copy("module.weight", shape, cut, target)
            torch.testing.assert_close(target, weight[cut], rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_its_kernel_is_refused(tmp_path: Path) -> None:
    stored, _ = higgs_stored(3, 32, torch.float16)
    with pytest.raises(CheckpointError, match=r"template_id is 26.*tiles of 32, of 3 bits"):
        open_weight(tmp_path, higgs_config(3, 26), stored)
    stored["module.weight"] = stored["module.weight"][:-12]
    with pytest.raises(CheckpointError, match="tiles of 512 outputs, or blocks of 128 inputs"):
        open_weight(tmp_path, higgs_config(3, 30), stored)
