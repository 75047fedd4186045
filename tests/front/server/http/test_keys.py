"""Keys of a file: what it may hold, and what a change of it does to those that are good."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.base.config.api_keys import MAX_FILE_BYTES, MAX_KEYS, key_digest, read_keys
from headrace.base.config.server_options import ServerOptions
from headrace.base.errors import ConfigError
from headrace.front.server.http.keys import ApiKeys
from headrace.launch.resolve import server_spec


def write(path: Path, text: str) -> None:
    """Replaces the file, as an operator's tool does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst\n\n  second  \nfirst\n")
    return path


def keys_of(file: Path, *, api_keys: tuple[str, ...] = (), admin_key: str | None = None) -> ApiKeys:
    options = ServerOptions(api_key_file=str(file), api_keys=api_keys, admin_key=admin_key)
    return ApiKeys(server_spec(options))


def digests(*keys: str) -> tuple[str, ...]:
    return tuple(key_digest(key) for key in keys)


def test_a_file_holds_a_key_a_line_and_comments(file: Path) -> None:
    assert read_keys(file) == digests("first", "second")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"good\nb\xc3\xa4d\n", "cannot be read"),
        (b"good\nb\tad\n", "line 2 is no key"),
        (b"a" * (MAX_FILE_BYTES + 1), f"more than {MAX_FILE_BYTES} bytes"),
        (b"".join(b"k%d\n" % n for n in range(MAX_KEYS + 1)), f"{MAX_KEYS + 1} keys, at most"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_keys(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no regular file"):
        read_keys(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_an_empty_file_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="no key in it"):
        keys_of(path)


def test_the_admin_key_may_not_stand_in_it(file: Path) -> None:
    with pytest.raises(ConfigError, match="must differ"):
        keys_of(file, admin_key="second")
    keys = keys_of(file, admin_key="admin")
    write(file, "first\nadmin\n")
    keys.look()
    assert keys.digests == digests("first")


def test_keys_come_and_go_with_the_file_beside_those_of_the_options(file: Path) -> None:
    keys = keys_of(file, api_keys=("fixed",))
    assert keys.digests == digests("fixed", "first", "second")
    write(file, "third\n")
    keys.look()
    assert keys.digests == digests("fixed", "third")


def test_an_empty_file_takes_its_keys_away_and_keys_stay_required(file: Path) -> None:
    keys = keys_of(file)
    write(file, "")
    keys.look()
    assert keys.digests == ()
    assert keys.required


def test_a_broken_or_missing_file_leaves_the_keys_until_it_is_mended(file: Path) -> None:
    keys = keys_of(file)
    write(file, "b\tad\n")
    keys.look()
    assert keys.digests == digests("first", "second")
    file.unlink()
    keys.look()
    assert keys.digests == digests("first", "second")
    write(file, "mended\n")
    keys.look()
    assert keys.digests == digests("mended")


def test_other_hosts_may_reach_a_server_whose_keys_are_in_a_file(file: Path) -> None:
    spec = server_spec(ServerOptions(host="0.0.0.0", api_key_file=str(file)))
    assert spec.api_key_file == str(file)
    with pytest.raises(ConfigError, match="--api-key-file"):
        server_spec(ServerOptions(host="0.0.0.0"))
