"""What the admission hooks share that copy blocks of the KV cache to files and back
(kv_transfers.py, kv_store.py): the files of all ranks, the orders to the workers, and a prompt's
names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from headrace.base.wire.request import EngineRequest
from headrace.base.wire.slots import KVOrder
from headrace.core.ports import AdmissionHook, KVWorkers, PendingKV
from headrace.core.reports import EngineView
from headrace.core.request import TOKEN_BYTES, Request


class KVFileHook(AdmissionHook):
    """A hook over the files in a folder. `engine`: the core, which is made with this hook."""

    def __init__(self, folder: str, num_ranks: int, engine: Callable[[], EngineView]) -> None:
        self._folder, self._num_ranks, self._engine = Path(folder), num_ranks, engine

    @property
    def follows_drafts(self) -> bool:
        """See AdmissionHook: it is done before a request runs, and when it has ended."""
        return True

    def payload(self, request_ids: list[int]) -> bytes | None:
        """See AdmissionHook: the workers are told by orders."""
        return None

    def renew(self) -> None:
        """See AdmissionHook: nothing is on its way when workers are replaced."""

    def _files(self, path: Path) -> list[Path]:
        """Those of all ranks."""
        if self._num_ranks == 1:
            return [path]
        return [Path(f"{path}.rank{rank}") for rank in range(self._num_ranks)]

    def _remove_files(self, path: Path) -> None:
        for file in self._files(path):
            with contextlib.suppress(OSError):
                file.unlink()

    def _order(
        self, action: str, path: Path, blocks: tuple[tuple[int, ...], ...], header: bytes = b""
    ) -> PendingKV:
        """Has the workers copy these blocks."""
        order = KVOrder(
            action=action,
            path=str(path),
            blocks=blocks,
            header=header,
            num_ranks=self._num_ranks,
        )
        return cast(KVWorkers, self._engine().executor).move(order)

    def _request(self, wire: EngineRequest) -> Request:
        return prompt_of(self._engine(), wire)


def prompt_of(engine: EngineView, wire: EngineRequest) -> Request:
    """A request of the prompt alone, for its blocks' names, whose chain has begun."""
    request = Request(
        wire,
        arrival=0,
        now=engine.clock(),
        groups=len(engine.kv.groups),
        length_limit=len(wire.prompt) // TOKEN_BYTES,
    )
    engine.kv.match(request)
    return request
