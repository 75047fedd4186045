"""Messages between processes: fixed schema, exact round trip, nothing unpickled (P1)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.wire.codec import HEADER, Codec, cut_frames
from headrace.base.wire.request import (
    EngineRequest,
    Finished,
    RowSampling,
    StopRules,
    ToCore,
    ToFront,
    TokenBatch,
)
from headrace.base.wire.step import RowStart, StepPlan

to_core: Codec[ToCore] = Codec(ToCore)
to_front: Codec[ToFront] = Codec(ToFront)


@given(
    ids=st.lists(st.integers(0, 2**63 - 1), max_size=5),
    prompt=st.lists(st.integers(0, 2**31 - 1), max_size=20),
    temperature=st.floats(0, 2),
)
def test_messages_survive_the_round_trip(
    ids: list[int], prompt: list[int], temperature: float
) -> None:
    request = EngineRequest(
        id=7,
        prompt=np.array(prompt, "<i4").tobytes(),
        stop=StopRules(max_tokens=3, stop_ids=(1, 2)),
        sampling=RowSampling(
            temperature=temperature, logit_bias={3: -1.5}, bad_words=((1, 2), (3,))
        ),
    )
    again = to_core.decode(to_core.encode(request))
    assert again == request and again.prompt_ids().tolist() == prompt
    batch = TokenBatch(
        ids=np.array(ids, np.int64),
        tokens=np.zeros(len(ids), np.int32),
        finished=[Finished(id=i, reason="stop") for i in ids],
    )
    back = to_front.decode(to_front.encode(batch))
    assert isinstance(back, TokenBatch)
    assert back.ids.tolist() == ids and back.finished == batch.finished


def test_arrays_keep_dtype_and_shape() -> None:
    empty = np.zeros(0, np.int32)
    row = RowStart(
        row=0,
        request=1,
        tokens=np.arange(3, dtype=np.int32),
        num_prompt=3,
        num_computed=0,
        sampling=RowSampling(),
    )
    plan = StepPlan(
        step=1, ends=empty, starts=[row], block_group=empty, block_row=empty, block_index=empty, block_id=empty,
        rows=empty, num_tokens=empty, num_computed=empty, sample=np.array([True, False]),
    )  # fmt: skip
    codec: Codec[StepPlan] = Codec(StepPlan)
    again = codec.decode(codec.encode(plan))
    assert again.sample.dtype == np.bool_ and again.sample.tolist() == [True, False]
    assert again.starts[0].tokens.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "array",
    [
        ("object", (1,), b"12345678"),
        ("int32", (2,), b"1234"),
        ("int32", (-1,), b""),
        ("float64", (0,), b""),
    ],
)
def test_a_forged_array_is_refused(array: tuple[object, ...]) -> None:
    forged = {"type": "tokens", "ids": array, "tokens": ("int32", (0,), b"")}
    with pytest.raises((ValueError, msgspec.DecodeError)):
        to_front.decode(msgspec.msgpack.encode(forged))


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_raise_a_decode_error(data: bytes) -> None:
    try:
        to_core.decode(data)
    except (msgspec.DecodeError, ValueError):
        return


def test_a_frame_is_length_and_body() -> None:
    frame = to_core.frame(
        EngineRequest(id=1, prompt=b"", stop=StopRules(max_tokens=1), sampling=RowSampling())
    )
    assert HEADER.unpack(frame[:4])[0] == len(frame) - 4


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 30)))
def test_frames_are_the_same_however_the_stream_is_split(
    bodies: list[bytes], sizes: list[int]
) -> None:
    stream = b"".join(HEADER.pack(len(body)) + body for body in bodies)
    buffer, found, at = bytearray(), [], 0
    for size in [*sizes, len(stream)]:
        buffer += stream[at : at + size]
        at += size
        found += cut_frames(buffer, max_bytes=40)
    assert found == bodies and not buffer


def test_a_frame_beyond_the_bound_is_refused_before_it_has_arrived() -> None:
    with pytest.raises(ValueError, match="41 bytes; 40 allowed"):
        cut_frames(bytearray(HEADER.pack(41)), max_bytes=40)
