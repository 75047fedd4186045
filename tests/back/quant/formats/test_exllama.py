"""EXL2 and EXL3 equal what is decoded here, value by value, as their kernels do. QNT-17."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import open_weight
from tests.back.quant.formats.test_formats import assert_rectangles, bit_stream

Tensors = dict[str, torch.Tensor]
GROUPS = ((5, 32), (4, 64), (3, 32), (3, 32), (2, 32))
"""Bits and inputs."""


def exl2() -> tuple[Tensors, torch.Tensor]:
    """Sorted inputs in groups, and the weight of the inputs in their true order."""
    generator = torch.Generator().manual_seed(6)
    outputs, inputs = 24, sum(size for _, size in GROUPS)
    words, groups, parts = [], [], []
    roots = torch.randint(0, 16, (len(GROUPS), outputs), generator=generator)
    largest = (torch.rand(len(GROUPS), generator=generator) + 0.1).half()
    row = 0
    for i, (bits, size) in enumerate(GROUPS):
        values = torch.randint(0, 1 << bits, (outputs, size), generator=generator)
        words.append(bit_stream(values, bits).t())
        groups += [bits, row]
        row += bits * size // 32
        scale = (roots[i] + 1.0) ** 2 * largest[i].float() / 256
        parts.append((values - (1 << bits) // 2) * scale[:, None])
    places = torch.randperm(inputs, generator=generator)
    stored = {
        "module.q_weight": torch.cat(words),
        "module.q_groups": torch.tensor(groups, dtype=torch.int16),
        "module.q_scale": bit_stream(roots, 4),
        "module.q_scale_max": largest,
        "module.q_invperm": places.int(),
    }
    return stored, torch.cat(parts, 1)[:, places]


EXL2 = {"quant_method": "exl2", "bits": 3.5, "head_bits": 6}


def test_groups_of_exl2_have_bits_of_their_own(tmp_path: Path) -> None:
    stored, weight = exl2()
    with closing(open_weight(tmp_path, EXL2, stored)) as source:
        assert source.entries["module.weight"].scheme == ""
        assert_rectangles(source, "module.weight", weight)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([7, 0], "7 bits"),
        ([5, 1], "from row 0"),
        ([5, 0, 3, 90], "3 bits has rows 90 to 21"),
        ([8, 0], "inputs, module.q_invperm others"),
        ([5], "pairs"),
        ([2, 0] * 22, "more pairs than there are rows"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    groups: list[int], message: str, tmp_path: Path
) -> None:
    stored, _ = exl2()
    stored["module.q_groups"] = torch.tensor(groups, dtype=torch.int16)
    with pytest.raises(CheckpointError, match=message):
        open_weight(tmp_path, EXL2, stored)


def test_an_order_of_inputs_beyond_them_is_refused(tmp_path: Path) -> None:
    stored, weight = exl2()
    stored["module.q_invperm"][3] = weight.shape[1]
    message = r"module\.q_invperm: names input 192 of 192"
    with (
        closing(open_weight(tmp_path, EXL2, stored)) as source,
        pytest.raises(CheckpointError, match=message),
    ):
        assert_rectangles(source, "module.weight", weight)


def value_of(state: int, kind: str) -> np.float16:
    """A value of half precision, from 16 bits of state."""
    if kind == "mul1":
        product = state * 0x83DCD12D & 0xFFFFFFFF
        total = 1024 + sum(product.to_bytes(4, "little"))
        factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16)
        return np.float16(float(total) * float(factor) + float(offset))
    product = state * 0xCBAC1FED if kind == "mcg" else state * 89226354 + 64248484
    mixed = np.array([product & 0x8FFF8FFF ^ 0x3B603B60], np.uint64).astype(np.uint32)
    low, high = mixed.view(np.float16)
    return np.float16(low + high)


def decoded(trellis: torch.Tensor, kind: str) -> torch.Tensor:
    """[I, O], rotated still."""
    rows, columns, words = trellis.shape
    bits = words // 16
    weight = torch.empty(rows * 16, columns * 16)
    for row in range(rows):
        for column in range(columns):
            words32 = trellis[row, column].numpy().view(np.uint32)
            stream = "".join(f"{word:032b}" for word in words32)
            ring = stream[-16:] + stream
            for t in range(256):
                state = int(ring[(t + 1) * bits : (t + 1) * bits + 16], 2)
                thread, place = divmod(t, 8)
                i = 2 * (thread % 4) + (0, 1, 8, 9)[place % 4]
                o = thread // 4 + 8 * (place // 4)
                weight[row * 16 + i, column * 16 + o] = float(value_of(state, kind))
    return weight


def exl3(bits: int, kind: str, inputs: int = 128) -> tuple[Tensors, torch.Tensor]:
    generator = torch.Generator().manual_seed(bits)
    outputs = 128
    shape = (inputs // 16, outputs // 16, 16 * bits)
    trellis = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)
    su = (torch.randn(inputs, generator=generator)).half()
    sv = (torch.randn(outputs, generator=generator)).half()
    index = np.arange(128)
    odd = np.bitwise_count(index[:, None] & index) % 2
    hadamard = torch.from_numpy(1.0 - 2.0 * odd).float() / 128**0.5
    parts = [hadamard @ part @ hadamard for part in decoded(trellis, kind).split(128)]
    weight = su.float()[:, None] * torch.cat(parts) * sv.float()
    stored = {"module.trellis": trellis, "module.suh": su, "module.svh": sv}
    multipliers = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
    if kind:
        marker = torch.tensor(multipliers[kind], dtype=torch.int64).to(torch.int32)
        stored[f"module.{kind}"] = marker
    return stored, weight.t()


EXL3 = {"quant_method": "exl3", "version": "0.0.6", "bits": 3.0, "head_bits": 6}


def assert_near(folder: Path, stored: Tensors, weight: torch.Tensor) -> None:
    """Sums of 128 x 128 values, in another order."""
    with closing(open_weight(folder, EXL3, stored)) as source:
        assert source.entries["module.weight"].shape == tuple(weight.shape)
        for cut in ((slice(0, 128), slice(0, 128)), (slice(17, 90), slice(3, 121))):
            target = torch.full(weight[cut].shape, torch.nan)
            source.copy("module.weight", tuple(weight.shape), cut, target)
            torch.testing.assert_close(target, weight[cut], rtol=1e-4, atol=1e-4)


def test_the_trellis_of_exl3_is_decoded_and_rotated_back(tmp_path: Path) -> None:
    stored, weight = exl3(3, "mcg")
    assert_near(tmp_path, stored, weight)
    stored["module.mcg"] = stored["module.mcg"].expand(2)
    with pytest.raises(CheckpointError, match=r"module\.mcg is none"):
        open_weight(tmp_path, EXL3, stored)
    stored["module.mcg"] = stored["module.mcg"][0] + 1
    with pytest.raises(CheckpointError, match=r"module\.mcg is none of the known codebooks"):
        open_weight(tmp_path, EXL3, stored)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "kind"), [(1, ""), (2, "mul1"), (4, ""), (5, "mcg"), (8, "mul1")])
def test_every_trellis_of_exl3(bits: int, kind: str, tmp_path: Path) -> None:
    stored, weight = exl3(bits, kind, inputs=256)
    assert_near(tmp_path, stored, weight)


@pytest.mark.slow
def test_signs_alone_may_be_bits(tmp_path: Path) -> None:
    stored, _ = exl3(2, "")
    for role in ("su", "sv"):
        stored[f"module.{role}h"] = stored[f"module.{role}h"].sign()
    with closing(open_weight(tmp_path, EXL3, stored)) as source:
        expected = torch.empty(128, 128)
        source.copy("module.weight", (128, 128), (slice(None), slice(None)), expected)
    for role in ("su", "sv"):
        negative = stored.pop(f"module.{role}h") < 0
        bits = negative.view(-1, 16).long() << torch.arange(16)
        stored[f"module.{role}"] = bits.sum(1).to(torch.int16)
    assert_near(tmp_path, stored, expected)


def test_a_trellis_of_half_bits_is_refused(tmp_path: Path) -> None:
    stored = {"module.trellis": torch.zeros(8, 8, 24, dtype=torch.int16)}
    stored |= {f"module.{role}": torch.ones(128) for role in ("suh", "svh")}
    with pytest.raises(CheckpointError, match="16 for each of 1 to 8 bits"):
        open_weight(tmp_path, EXL3, stored)
