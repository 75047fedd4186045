"""llama.cpp's /infill: its documents, and the full answer that they fold to (BEY-42)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from headrace.base.errors import InvalidRequest
from headrace.front.client.events import Delta, Ended, Started
from headrace.front.server.native.infill import (
    InfillRequest,
    InfillStream,
    _completion,
    to_answer,
    to_chunks,
)


async def events(reason: str = "stop", stop: str | None = None) -> Any:
    yield Started(3)
    for text in ("a", "", "b"):
        yield Delta(index=0, text=text, token_ids=[7])
    yield Ended(index=0, reason=reason, stop=stop, num_output=3, num_cached=1)


@pytest.mark.parametrize(
    ("reason", "stop", "kind"),
    [("stop", None, "eos"), ("stop", ";", "word"), ("length", None, "limit")],
)
async def test_documents_fold_to_the_full_answer(reason: str, stop: Any, kind: str) -> None:
    chunks = [c async for c in to_chunks(events(reason, stop), InfillStream(model="m"))]
    *said, last = [orjson.loads(chunk.removeprefix(b"data: ")) for chunk in chunks]
    full = await to_answer(events(reason, stop), InfillStream(model="m"))
    assert "".join(one["content"] for one in said) == full["content"] == "ab"
    assert [one["stop"] for one in said] == [False, False] and last["stop"] and full["stop"]
    assert full["tokens"] == [7, 7, 7] and (last["stop_type"], last["stopping_word"]) == (
        kind,
        stop or "",
    )
    assert (last["tokens_evaluated"], last["tokens_predicted"], last["tokens_cached"]) == (3, 3, 1)


def test_sampling_fields_have_their_own_names_in_errors() -> None:
    request = _completion(InfillRequest(n_predict=-1, repeat_penalty=1.5, seed=-1), most=9)
    assert (request.max_tokens, request.repetition_penalty, request.seed) == (9, 1.5, None)
    with pytest.raises(InvalidRequest, match=r"^repeat_penalty: "):
        _completion(InfillRequest(repeat_penalty=-1.0), most=9)
