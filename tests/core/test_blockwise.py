"""BEY-40: what a model that writes blocks cannot do is refused before any work, by its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.base.errors import Unsupported
from headrace.base.wire.request import RowPooling, RowSampling
from headrace.core.blockwise import check_blockwise
from tests.core.harness import make_request


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("dry_multiplier", 0.8),
        ("bad_words", ((3, 4),)),
        ("logits_processors", ("one",)),
        ("samplers", ("top_k",)),
        ("logprobs", 0),
        ("prompt_logprobs", 1),
        ("capture_layers", (0,)),
    ],
)
def test_a_parameter_that_follows_the_tokens_is_refused(field: str, value: Any) -> None:
    request = make_request(1, sampling=RowSampling(**{field: value}))
    with pytest.raises(Unsupported, match=f"^{field}: this model writes blocks") as refused:
        check_blockwise(request)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("response_format", {"hook_payloads": {"grammar": msgspec.Raw(b"")}}),
        ("prediction", {"prediction": b"\0\0\0\0"}),
        ("pooling", {"pooling": RowPooling()}),
    ],
)
def test_another_kind_of_request_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as refused:
        check_blockwise(msgspec.structs.replace(make_request(1), **changes))
    assert refused.value.field == field


def test_what_a_token_is_sampled_by_alone_is_taken() -> None:
    sampling = RowSampling(
        temperature=0.7,
        **{"top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "xtc_probability": 0.5},
        **{"logit_bias": {3: 1.0}, "allowed_ids": (3, 4), "seed": 5},
        **{"min_tokens": 2, "suppressed_ids": (2,)},
    )
    check_blockwise(make_request(1, sampling=sampling))
