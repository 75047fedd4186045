"""`bench serve` against a real server: every request ends in one column of the ledger."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.bench.report import PERCENTILES, emit
from headrace.bench.serve import LoadSpec, events, run_load
from headrace.bench.startup import free_port
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_model_folder(tmp_path_factory.mktemp("models") / "tiny")
    with serving(folder, "--api-keys", "right") as served:
        yield served


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("loop", [{"concurrency": 4}, {"rate": 200.0}], ids=["closed", "open"])
def test_every_answer_is_counted_and_timed(
    server: Served, tmp_path: Path, endpoint: str, loop: dict[str, float]
) -> None:
    plot = tmp_path / "latencies.png"
    load = LoadSpec(
        base_url=server.url, api_key="right", endpoint=endpoint, num_requests=12, output_tokens=5, **loop
    )  # fmt: skip
    report = run_load(load, plot=plot)
    assert report["ledger"] == {"sent": 12, "ok": 12, "refused": 0, "failed": 0, "lost": 0}
    assert report["output_tok_s"] * report["wall_s"] == pytest.approx(60)
    assert set(report["ttft_ms"]) == set(PERCENTILES)
    assert plot.read_bytes().startswith(b"\x89PNG")


class Arriving:
    """A body that arrives in pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


@given(cuts=st.lists(st.integers(0, 60)), end=st.sampled_from([b"\n", b"\r\n"]))
async def test_events_are_the_same_however_they_arrive(cuts: list[int], end: bytes) -> None:
    whole = end.join(
        [b": ping", b"", b'data: {"a": "b"}', b"", b"event: x", b"data: [DONE]", b"", b""]
    )
    at = [0, *sorted(cut % len(whole) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in pairwise(at)]
    assert [event async for event in events(Arriving(*pieces))] == [b'{"a": "b"}', b"[DONE]"]


def test_a_place_without_a_server_is_told_plainly(server: Served) -> None:
    """No traceback where nothing listens, nor where the key is not the server's."""
    port = free_port()
    with pytest.raises(ConfigError, match=f"--url: no answer from http://127.0.0.1:{port}: "):
        run_load(LoadSpec(base_url=f"http://127.0.0.1:{port}", num_requests=1))
    with pytest.raises(ConfigError, match="/v1/models answered 401; give --model"):
        run_load(LoadSpec(base_url=server.url, num_requests=1))


def test_what_the_server_refuses_is_refused_and_nothing_else(server: Served) -> None:
    load = LoadSpec(base_url=server.url, api_key="wrong", model="tiny", num_requests=3)
    report = run_load(load)
    assert report["ledger"] == {"sent": 3, "ok": 0, "refused": 3, "failed": 0, "lost": 0}
    assert "key" in report["first_problem"]


def test_a_server_that_is_gone_loses_every_request() -> None:
    report = run_load(LoadSpec(base_url="http://127.0.0.1:9", model="tiny", num_requests=2))
    assert report["ledger"] == {"sent": 2, "ok": 0, "refused": 0, "failed": 0, "lost": 2}


def test_a_result_is_one_json_line_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"req_s": 2.0, "itl_ms": dict.fromkeys(PERCENTILES, 1.5)}
    emit(result, as_json=True, title="x")
    assert json.loads(capsys.readouterr().out) == result
    emit(result, as_json=False, title="x")
    assert "p99" in capsys.readouterr().out
