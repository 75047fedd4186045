"""The frozen items of `headrace eval`: what the package ships, and files of one's own."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.bench.held_out import HEARD, HELD_OUT, SEEN, AnswerCheck, read_items, write_items


def test_the_shipped_file_is_small_and_has_every_task() -> None:
    assert HELD_OUT.stat().st_size < 200_000
    items = read_items()
    assert len(items) == 21 and all(len(of_task) >= 5 for of_task in items.values())
    assert len(items["arithmetic"]) == 100


def test_the_shipped_items_that_are_seen_and_heard_are_small_and_have_every_task() -> None:
    assert SEEN.stat().st_size < 700_000 and HEARD.stat().st_size < 700_000
    seen, heard = read_items(SEEN), read_items(HEARD)
    assert {len(items) for items in seen.values()} == {30} and len(seen) == 10
    assert {len(items) for items in heard.values()} == {25} and len(heard) == 4
    assert all(item.audio and item.language for items in heard.values() for item in items)
    assert "image_url" in seen["count"][0].messages[0]["content"][0]
    assert seen["count"][0].question.endswith(("?", "."))


def test_a_story_may_use_the_vocabulary_of_the_file() -> None:
    story, other = read_items()["story"][0], read_items()["copy"][0]
    assert story.check is AnswerCheck.STORY and len(story.vocabulary) > 100
    assert not other.vocabulary


def test_written_items_are_read_back_and_the_bytes_are_the_same_each_time(tmp_path: Path) -> None:
    items = [*read_items()["story"][:2], *read_items()["copy"][:2]]
    write_items(tmp_path / "a", items, seed=3)
    write_items(tmp_path / "b", items, seed=3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_items(tmp_path / "a") == {"story": items[:2], "copy": items[2:]}


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", gzip.compress(b""), gzip.compress(b"{}\n{}\n")],
    ids=["empty", "no archive", "nothing in it", "no items"],
)
def test_what_is_no_such_file_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ConfigError, match=r"--items .*x: no file of held-out items"):
        read_items(tmp_path / "x")
