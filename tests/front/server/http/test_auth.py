"""Which key is presented; what one key may have in flight: requests, tokens, bytes; each API process has its part."""

from __future__ import annotations

import msgspec
import pytest

from headrace.base.config.server_options import ServerOptions
from headrace.base.errors import RateLimited, Unauthorized
from headrace.front.server.http.auth import KeyShares, presented_digest
from headrace.launch.resolve import server_spec


def test_each_api_process_has_its_part_of_a_keys_bounds() -> None:
    options = ServerOptions(
        max_requests_per_key=10, max_tokens_per_key=1000, max_bytes_per_key="1KiB", api_servers=4
    )
    shares = KeyShares.of(server_spec(options))
    with shares.hold("a", "requests", 2), shares.hold("a", "tokens", 250):
        with pytest.raises(RateLimited, match="2 requests in flight, its limit"):
            shares.hold("a").__enter__()
        with pytest.raises(RateLimited, match="250 tokens in flight, its limit"):
            shares.hold("a", "tokens", 1).__enter__()
        with shares.hold("b", "tokens", 250), shares.hold("a", "bytes", 256):
            pass
    with pytest.raises(RateLimited, match="0 bytes in flight and asks for 257; 256 allowed"):
        shares.hold("a", "bytes", 257).__enter__()


def test_a_key_has_at_least_one_place_in_every_process() -> None:
    shares = KeyShares.of(server_spec(ServerOptions(max_requests_per_key=1, api_servers=4)))
    with shares.hold("a"):
        assert shares.total == 1
    assert shares.total == 0


def test_without_bounds_tokens_and_bytes_are_not_bound() -> None:
    shares = KeyShares.of(server_spec(ServerOptions()))
    with shares.hold("a", "tokens", 2**40), shares.hold("a", "bytes", 2**40):
        assert shares.total == 0


def test_a_bound_that_is_none_of_bytes_is_refused_by_its_flag() -> None:
    with pytest.raises(Exception, match="--max-bytes-per-key"):
        server_spec(msgspec.structs.replace(ServerOptions(), max_bytes_per_key="many"))


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
@pytest.mark.parametrize("first", [b"Bearer bad", b"Basic YTpi", b"bad", b""])
def test_a_key_that_is_given_twice_is_none(name: str, first: bytes) -> None:
    """P3: whoever stands before this server may have looked at the other one."""
    twice = [(name.encode(), first), (name.encode(), b"Bearer good")]
    with pytest.raises(Unauthorized, match="more than once; send one key"):
        presented_digest({"type": "http", "headers": twice})
    assert presented_digest({"type": "http", "headers": twice[1:]})
