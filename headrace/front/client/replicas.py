"""Another number of engine cores while a server runs: who is expected to be there, and how cores
come and go.

Cores that are to go take nothing new, and what they have may finish; requests go to the others
meanwhile. The parent process starts and ends them (launch/replicas.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headrace.base.errors import Conflict, DrainTimeout, EngineError, HeadraceError, InvalidRequest
from headrace.front.client.connection import Connection
from headrace.front.client.stream import CoreHandle
from headrace.launch.api_process import failure_at

POLL_S = 0.02
LEAVING = "the engine core is draining"


class Replicas:
    """The cores of an engine: the first `fixed` are always there (None: all). `ask` tells the
    parent process how many are wanted. `start_s`: how long one may take to start. `share_experts`:
    they do, so that none serves while their number changes."""

    def __init__(
        self,
        cores: Sequence[CoreHandle],
        fixed: int | None,
        *,
        start_s: float,
        share_experts: bool = False,
    ) -> None:
        self._cores, self._start_s, self._share_experts = cores, start_s, share_experts
        self._fixed = len(cores) if fixed is None else fixed
        self.ask: Callable[[int], None] = lambda count: None
        self.scaling = False

    @property
    def expected(self) -> list[CoreHandle]:
        """Those that are always there, and those that have come."""
        there = [core for core in self._cores[self._fixed :] if core.connection.hello is not None]
        return [*self._cores[: self._fixed], *there]

    async def scale(self, count: int, *, drain_s: float) -> None:
        """Returns once so many cores are there, and no others. DrainTimeout if those that are to go
        have not finished in `drain_s`, EngineError if one cannot start, Conflict if it would serve
        something else: all is as before then."""
        if not self._fixed <= count <= len(self._cores):
            least = "--data-parallel" if self._share_experts else "--replicas"
            bounds = f"{self._fixed} ({least}) to {len(self._cores)} (--max-replicas)"
            raise InvalidRequest(
                f"new_data_parallel_size: {count} given; {bounds} are allowed",
                field="new_data_parallel_size",
            )
        with self._alone():
            before = len(self.expected)
            if self._share_experts:
                return await self._share_among(count, before, drain_s)
            await self._drain(self._cores[count:], drain_s)
            self.ask(count)
            try:
                await self._appear(count)
                self._check_alike(count)
            except HeadraceError:
                self.ask(before)
                await self._vanish(before)
                raise
            await self._vanish(count)

    async def _share_among(self, count: int, before: int, drain_s: float) -> None:
        """All cores drain; those that come are there, or those that go still are, while the experts
        change places."""
        if count == before:
            return
        cores, stay = self._cores[: max(count, before)], before
        await self._drain(self._cores[:before], drain_s)
        try:
            self.ask(len(cores))
            await self._appear(len(cores))
            self._check_alike(len(cores))
            stay = self._fixed  # those that are there if the others are lost now
            await self._meet(cores, count)
            stay = count
        finally:
            self.ask(stay)
            await self._vanish(stay)
            await _go_on([core.connection for core in self._cores[:stay]])

    async def _meet(self, cores: Sequence[CoreHandle], count: int) -> None:
        """The first so many share out the experts; the others give away what they have."""
        folder = Path(cores[0].connection.path).parent / f"group-{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        calls = [
            core.connection.call("share_experts", cores=count, folder=str(folder)) for core in cores
        ]
        await asyncio.gather(*calls)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self.scaling:
            raise Conflict("the number of engine cores is being changed: try again later")
        self.scaling = True
        try:
            yield
        finally:
            self.scaling = False

    async def _drain(self, cores: Sequence[CoreHandle], drain_s: float) -> None:
        """Those that are there. Nothing new is sent to them from now on, not only once they say
        so."""
        leaving = [core.connection for core in cores if core.connection.hello is not None]
        for connection in leaving:
            assert connection.hello is not None
            connection.hello = msgspec.structs.replace(connection.hello, trouble=LEAVING)
        calls = [connection.call("drain", timeout_s=float("inf")) for connection in leaving]
        try:
            async with asyncio.timeout(drain_s):
                await asyncio.gather(*calls)
        except TimeoutError:
            await _go_on(leaving)
            raise DrainTimeout(
                f"drain_timeout: {drain_s:g} s are over and requests still run; nothing was changed",
                field="drain_timeout",
            ) from None

    async def _appear(self, count: int) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                for core in self._cores[:count]:
                    while core.connection.hello is None:
                        failure = failure_at(core.connection.path)
                        if failure.exists():
                            raise EngineError(f"an engine core cannot start: {failure.read_text()}")
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineError(f"an engine core has not started in {self._start_s:g} s") from None

    def _check_alike(self, count: int) -> None:
        """Conflict where weights or adapters have changed since the start: a core that comes has
        those of the start."""
        first, *others = [core.connection.hello for core in self._cores[:count]]
        for other in others:
            if first is None or other is None:
                continue
            if first.weights_version != other.weights_version:
                raise Conflict("the weights were replaced; an engine core that comes has the old")
            if set(first.adapters) - set(other.adapters):
                raise Conflict("adapters were loaded that an engine core that comes does not have")

    async def _vanish(self, count: int) -> None:
        while any(core.connection.hello is not None for core in self._cores[count:]):
            await asyncio.sleep(POLL_S)


async def _go_on(connections: Sequence[Connection]) -> None:
    """These take requests again. A core that has heard of no drain has nothing to tell of it."""
    calls = [connection.call("undo_drain") for connection in connections]
    await asyncio.gather(*calls, return_exceptions=True)
    for connection in connections:
        if connection.hello is not None and connection.hello.trouble == LEAVING:
            connection.hello = msgspec.structs.replace(connection.hello, trouble="")
