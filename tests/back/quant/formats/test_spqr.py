"""SpQR's tiles are decoded word by word, in both arrangements of what is added. QNT-17."""

from __future__ import annotations

import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import Stored, open_weight
from tests.back.quant.formats.test_formats import assert_rectangles

CONFIG = {"quant_method": "spqr", "bits": 3, "beta1": 16, "beta2": 16, "shapes": {}}


def spqr_stored(*, interleaved: bool, ordered: bool) -> tuple[Stored, torch.Tensor]:
    """48 x 32 numbers in float16, by Python's integers; four floats are added."""
    random = np.random.default_rng(5)
    outputs, inputs = 48, 32
    weight = np.zeros((outputs, inputs), np.float16)
    words = []
    for top in range(0, outputs, 16):
        for left in range(0, inputs, 16):
            of_tile = (random.random(4) / 4 + 0.1).astype(np.float16)
            second = int.from_bytes(struct.pack("<4e", *of_tile), "little")
            scale_scale, zero_scale, scale_zero, zero_zero = of_tile
            for row in range(16):
                fields = [int(one) for one in random.integers(0, 8, 18)]
                word = sum(field << 3 * i for i, field in enumerate(fields))
                words.append(word | (second >> row // 2 * 8 & 255) << 54)
                scale = scale_scale * (np.float16(fields[0]) - scale_zero)
                zero = zero_scale * (np.float16(fields[1]) - zero_zero)
                for column in range(16):
                    value = scale * (np.float16(fields[2 + column]) - zero)
                    weight[top + row, left + column] = value
    added = {(0, 3): 1.5, (0, 30): -2.0, (17, 0): 4.0, (40, 31): 0.25}
    summed = weight.astype(np.float32)
    for place, value in added.items():
        summed[place] += value
    entries, offsets = [], [0]
    if interleaved:  # of 16 outputs the first floats, then the second ones; zeros fill up
        for top in range(0, outputs, 16):
            rows = [sorted(c for r, c in added if r == top + i) for i in range(16)]
            for turn in range(max(map(len, rows))):
                for i, own in enumerate(rows):
                    here = turn < len(own)
                    value = added[top + i, own[turn]] if here else 0.0
                    entries.append((own[turn] if here else 0, value))
            offsets.append(len(entries))
    else:
        for row in range(outputs):
            entries += [(c, value) for (r, c), value in sorted(added.items()) if r == row]
            offsets.append(len(entries))
    packed = [struct.unpack("<i", struct.pack("<He", c, value))[0] for c, value in entries]
    stored = {
        "module.dense_weights": torch.tensor(words),
        "module.row_offsets": torch.tensor(offsets, dtype=torch.int32),
        "module.col_vals": torch.tensor(packed, dtype=torch.int32),
    }
    result = torch.from_numpy(summed)
    if ordered:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1))
        stored["module.in_perm"] = (order[1::2] << 16 | order[::2]).int()
        result = torch.empty_like(result).index_copy_(1, order, result)
    return stored, result


@pytest.mark.parametrize(("interleaved", "ordered"), [(False, False), (True, False), (True, True)])
def test_tiles_of_spqr(interleaved: bool, ordered: bool, tmp_path: Path) -> None:
    stored, weight = spqr_stored(interleaved=interleaved, ordered=ordered)
    with closing(open_weight(tmp_path, CONFIG, stored)) as source:
        assert source.entries["module.weight"].scheme == ""
        assert_rectangles(source, "module.weight", weight)


def test_what_names_no_place_is_refused(tmp_path: Path) -> None:
    stored, _ = spqr_stored(interleaved=False, ordered=False)
    stored["module.col_vals"][1] = 32
    wrong = pytest.raises(CheckpointError, match=r"module\.col_vals: names input 32 of 32")
    with closing(open_weight(tmp_path, CONFIG, stored)) as source, wrong:
        source.copy("module.weight", (48, 32), (slice(None),) * 2, torch.empty(48, 32))
    stored["module.dense_weights"] = stored["module.dense_weights"][:-16]
    with pytest.raises(CheckpointError, match="80 words and 48 beginnings fit no tiles"):
        open_weight(tmp_path, CONFIG, stored)
