"""Events of the KV cache for routers (KVT-11): what they say of a scripted run, and how readers get them."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import msgspec
import pytest

from headrace.base.config.resolved import KVSpec
from headrace.core.kv_events import KVEvents
from headrace.launch.kv_events import KVEventServer, event_socket, remove_with
from headrace.launch.topology import RuntimeFolder
from tests.core.harness import Driver, make_request, make_spec, window_groups


@pytest.mark.parametrize("hybrid", [False, True])
def test_events_follow_the_cache(hybrid: bool) -> None:
    """A chain by its names and tokens, once each; evicted blocks are told; all go with a reset."""
    events: list[tuple[object, ...]] = []
    groups = {"groups": window_groups(8)} if hybrid else {}
    hook = KVEvents(events.append, lambda: driver.core)
    driver = Driver(make_spec(num_blocks=13, block_tokens=4), hooks=[hook], **groups)
    prompt = list(range(3, 12))
    for id in (1, 2):
        driver.add(make_request(id, prompt, max_tokens=5))
        driver.run()
    cleared, *stored = events
    assert cleared == ("AllBlocksCleared",)
    assert [event[0] for event in stored] == ["BlockStored"] * 3
    told = [token for event in stored for token in event[3]]
    assert told == [*prompt, *driver.tokens[1]][:12]
    (first,), (second,), (third,) = (event[1] for event in stored)
    assert [event[2] for event in stored] == [None, first, second] and stored[0][4:] == (4, None)
    events.clear()
    driver.add(make_request(3, 40 if not hybrid else 20, max_tokens=1))
    driver.run()
    gone = {name for event in events if event[0] == "BlockRemoved" for name in event[1]}
    assert gone and gone <= {first, second, third}
    driver.call("reset_prefix_cache", running=False)
    assert events[-1] == ("AllBlocksCleared",)
    driver.assert_at_rest()


def test_readers_get_numbered_batches(tmp_path: Path) -> None:
    """In the form of vLLM's batches; a reader that has gone costs nothing."""
    server = KVEventServer(tmp_path / "core-0.kv")
    assert (tmp_path / "core-0.kv").stat().st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as reader:
        reader.connect(str(tmp_path / "core-0.kv"))
        reader.settimeout(60)
        while not server.num_readers:
            time.sleep(0.001)
        server.tell(("BlockRemoved", [b"name"]))
        stream = reader.makefile("rb")
        batch = stream.read(int.from_bytes(stream.read(4), "big"))
        assert int.from_bytes(batch[:8], "big") == 0
        seconds, events, rank = msgspec.msgpack.decode(batch[8:])
        assert seconds > 0 and events == [["BlockRemoved", [b"name"]]] and rank == 0
        stream.close()


def test_the_socket_goes_with_the_server(tmp_path: Path) -> None:
    """Its core is killed and cannot remove it; what is no socket of the server's stays."""
    folder, spec = (
        RuntimeFolder(),
        KVSpec(block_tokens=16, prefix_caching=True, num_blocks=8, events_path=str(tmp_path)),
    )
    for index in range(3):
        remove_with(folder, spec, folder.socket_path(index))
    path = event_socket(spec, folder.socket_path(0))
    assert path == tmp_path / "core-0.kv"
    KVEventServer(path)
    (tmp_path / "core-1.kv").write_text("not ours")
    folder.close()
    assert [left.name for left in tmp_path.iterdir()] == ["core-1.kv"]
    assert (
        event_socket(
            KVSpec(block_tokens=16, prefix_caching=True, num_blocks=8), folder.socket_path(0)
        )
        is None
    )
