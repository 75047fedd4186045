"""Files of vectors in place of media: what is read, and what is refused with its field and limit."""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import InvalidRequest
from headrace.front.media.embeds import embedded
from headrace.front.media.parts import MediaPart


def file_of(values: np.ndarray, **more: Any) -> str:
    data = io.BytesIO()
    np.lib.format.write_array(data, values, **more)
    return base64.b64encode(data.getvalue()).decode()


def part(content: Any, kind: str = "image") -> MediaPart:
    return MediaPart(
        kind=kind, field=f"messages[0].content[0].{kind}_embeds", content=content, embeds=True
    )


VECTORS = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


@pytest.mark.parametrize("kind", ["<f2", "<f4"])
def test_vectors_become_an_input_of_a_row_or_of_their_grid(kind: str) -> None:
    values = VECTORS.astype(kind)
    for given, grid in (
        (file_of(values), (1, 2, 12)),
        (file_of(values[None], version=(2, 0)), (1, 2, 12)),
        ({"data": file_of(values), "grid": [1, 4, 6]}, (1, 4, 6)),
        (values, (1, 2, 12)),
    ):
        medium = embedded(part(given), 2)
        (one,) = medium.inputs
        assert one.embedded and one.grid == grid and one.num_tokens == 6 == medium.num_placeholders
        assert np.array_equal(np.frombuffer(one.rows, "<f4").reshape(6, 5), values.astype("<f4"))
    (sound,) = embedded(part(file_of(values), "audio"), 2).inputs
    assert sound.kind == "audio" and sound.grid == (1, 1, 6) and sound.key != one.key


HUGE = base64.b64encode(
    b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 4000), }".ljust(117) + b"\n"
).decode()  # fmt: skip
WRONG = {
    "nothing": (None, "a .npy, safetensors or torch file in base64 is needed"),
    "number": (7, "torch file in base64"),
    "no base64": ("*", "is not base64"),
    "no file": (base64.b64encode(b"PK\3\4 torch").decode(), "cannot be read: File is not a zip file"),
    "cut": (base64.b64encode(b"\x93NUMPY\x01\x00\xff").decode(), "cannot be read"),
    "objects": (file_of(np.array([[{}]], object)), "<f2 or <f4"),
    "integers": (file_of(np.ones((2, 2), np.int64)), "<f2 or <f4"),
    "columns first": (file_of(np.asfortranarray(VECTORS)), "by rows"),
    "one dimension": (file_of(VECTORS[0]), "one vector for each token"),
    "several": (file_of(np.stack([VECTORS] * 2)), "one vector for each token"),
    "none": (file_of(VECTORS[:0]), "one vector for each token"),
    "a claim": (HUGE, "0 bytes behind its header, which says 16000000000000"),
    "not a number": (file_of(np.full((2, 2), np.nan, np.float32)), "numbers that are none"),
    "too large": (file_of(np.full((2, 2), 1e30, np.float32)), "beyond 65504"),
    "grid": ({"data": file_of(VECTORS), "grid": [1, "2", 3]}, "three whole numbers"),
    "a large grid": ({"data": file_of(VECTORS), "grid": [1, 1, 1 << 40]}, "three whole numbers"),
    "no data": ({"grid": [1, 2, 3]}, "image_embeds.data: a .npy, safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    content, message = WRONG[name]
    with pytest.raises(InvalidRequest, match=message) as caught:
        embedded(part(content), 2)
    assert caught.value.message.startswith("messages[0].content[0].image_embeds")


def test_nothing_is_unpickled() -> None:
    data = b"\x93NUMPY\x01\x00\x46\x00{'descr': '|O', 'fortran_order': False, 'shape': (1, 1), }          \n"
    harmless = base64.b64encode(data + pickle.dumps([1])).decode()
    with pytest.raises(InvalidRequest, match=r"cannot be read: Cannot parse header"):
        embedded(part(harmless), 1)
