"""Files of single tensors that clients send: read without unpickling, or refused (P1, P15)."""

from __future__ import annotations

import base64
import io
import pickle
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from headrace.base.errors import InvalidRequest
from headrace.front.media.tensors import read_array

VALUES = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def saved(value: Any) -> str:
    data = io.BytesIO()
    torch.save(value, data)
    return coded(data.getvalue())


def read(text: Any, most_bytes: int = 1 << 20) -> np.ndarray:
    return read_array(text, "x", most_bytes=most_bytes)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("write", [saved, lambda one: coded(save({"any name": one}))])
def test_numbers_are_those_that_were_saved(write: Callable[[Any], str], kind: torch.dtype) -> None:
    for values in (VALUES, VALUES[None], VALUES.repeat(60, 60)):
        values = values.to(kind)
        assert np.array_equal(read(write(values)).astype(np.float32), values.float().numpy())


def test_a_part_of_a_larger_storage_is_found() -> None:
    for part in (VALUES[2:5], VALUES[None][0], torch.nn.Parameter(VALUES)[1:2]):
        assert np.array_equal(read(saved(part)), part.detach().numpy())


def bomb(data_pkl: bytes, *, compress: int = zipfile.ZIP_STORED) -> str:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compress) as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        archive.writestr("archive/data/0", bytes(4096))
    return coded(data.getvalue())


class Touches:
    """What unpickling it would do."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


WRONG = {
    "sparse": (saved(torch.eye(3).to_sparse()), "something else than one dense tensor"),
    "columns": (saved(VALUES.T), "do not lie by rows"),
    "doubles": (saved(VALUES.double()), "DoubleStorage"),
    "whole numbers": (saved(torch.ones(2, 2, dtype=torch.int64)), "LongStorage"),
    "several": (saved({"a": VALUES}), "opcode"),
    "parameter": (saved(torch.nn.Parameter(VALUES)), "something else"),
    "no dimension": (saved(torch.tensor(1.0)), "1 to 4 dimensions"),
    "code": (bomb(pickle.dumps(Touches(), 2)), "something else"),
    "another protocol": (bomb(pickle.dumps(Touches(), 4)), "protocol 2"),
    "endless": (bomb(b"\x80\x02X\xff\xff\xff\xffa"), "ends too early"),
    "empty": (bomb(b"."), "cannot be read"),
    "a long one": (bomb(bytes(5000)), "more than 4096 bytes"),
    "compressed": (bomb(b".", compress=zipfile.ZIP_DEFLATED), "compressed"),
    "two tensors": (coded(save({"a": VALUES, "b": VALUES + 1})), "2 tensors"),
    "a large header": (coded((1 << 60).to_bytes(8, "little") + b"{}"), "header of"),
    "nothing known": (coded(b"what is this?"), "is no .npy, safetensors or torch file"),
    "no text": (7, "torch file in base64 is needed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_dense_array_is_refused(case: str) -> None:
    text, message = WRONG[case]
    with pytest.raises(InvalidRequest, match=message) as caught:
        read(text)
    assert caught.value.field == "x"


def test_a_long_text_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(InvalidRequest, match="characters; numbers of at most 1024 bytes"):
        read("!" * 100_000, most_bytes=1024)


def test_every_cut_and_every_changed_byte_is_an_error_or_an_array() -> None:
    """Nothing but InvalidRequest leaves it."""
    data = bytearray(base64.b64decode(saved(VALUES)))
    for at in range(0, len(data), 3):
        for changed in (data[:at], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]):
            try:
                read(coded(bytes(changed)))
            except InvalidRequest:
                continue
