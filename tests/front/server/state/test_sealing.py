"""Seals and signatures: opened only by their maker, for their owner and purpose, untouched."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.front.server.state.sealing import SECRET_BYTES, Sealer, secret_in

SEALER = Sealer(bytes(range(SECRET_BYTES)))
SEALED = SEALER.seal("some thought", owner="o", purpose="p")


@given(st.text(max_size=200), st.text(max_size=20))
def test_a_seal_opens_for_its_owner_and_purpose_alone(text: str, owner: str) -> None:
    sealed = SEALER.seal(text, owner=owner, purpose="a")
    assert SEALER.open(sealed, owner=owner, purpose="a") == text
    assert SEALER.open(sealed, owner=owner + "x", purpose="a") is None
    assert SEALER.open(sealed, owner=owner, purpose="b") is None
    assert Sealer(bytes(SECRET_BYTES)).open(sealed, owner=owner, purpose="a") is None


@given(st.data())
def test_an_altered_seal_does_not_open(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(SEALED) - 1))
    other = chr((ord(SEALED[at]) + data.draw(st.integers(1, 127))) % 128)
    altered = SEALED[:at] + other + SEALED[at + 1 :]
    assert SEALER.open(altered, owner="o", purpose="p") is None


@given(st.text(max_size=300))
def test_what_is_no_seal_is_passed_over(text: str) -> None:
    assert SEALER.open(text, owner="o", purpose="p") is None
    assert SEALER.open("hrs1." + text, owner="o", purpose="p") is None


def test_two_seals_of_one_text_differ_and_two_signatures_do_not() -> None:
    assert SEALER.seal("x", owner="o", purpose="p") != SEALER.seal("x", owner="o", purpose="p")
    signature = SEALER.sign("x", owner="o", purpose="p")
    assert SEALER.signed("x", signature, owner="o", purpose="p")
    assert not SEALER.signed("y", signature, owner="o", purpose="p")
    assert not SEALER.signed("x", signature, owner="q", purpose="p")


def test_processes_that_come_at_the_same_time_share_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with ThreadPoolExecutor(16) as threads:
        found = set(threads.map(lambda _: secret_in(path), range(64)))
    assert len(found) == 1 and len(found.pop()) == SECRET_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]
