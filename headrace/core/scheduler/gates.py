"""The optional conditions on running a request, together. A gate that raises ends the request, not the loop (P7)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError, InvalidRequest, from_wire, to_wire
from headrace.base.wire.request import EngineRequest
from headrace.core.ports import Ends, Gate

_log = logging.getLogger(__name__)


class Gates:
    """All gates of a core, asked in order."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = tuple(gates)

    def __bool__(self) -> bool:
        return bool(self._gates)

    def admit(self, request: EngineRequest) -> None:
        """Lets every gate see a new request. Raises if one says never (those that had admitted it are told its end)."""
        unknown = sorted(request.gates.keys() - {gate.name for gate in self._gates})
        if unknown:
            raise InvalidRequest(f"this engine has no {unknown[0]!r}", field=f"gates.{unknown[0]}")
        for index, gate in enumerate(self._gates):
            try:
                verdict = gate.admit(request)
                if verdict.answer == "never":
                    raise InvalidRequest(verdict.reason)
            except Exception:
                for admitted in self._gates[:index]:
                    admitted.finish(request.id)
                raise

    def refusal(self, request_id: int) -> tuple[str | None, HeadraceError | None]:
        """Why the request may not run now (None: it may), and the error if it may never."""
        for gate in self._gates:
            try:
                verdict = gate.ready(request_id)
            except Exception as error:
                return f"{gate.name}: failed", _as_ours(error)
            if verdict.answer != "yes":
                never = InvalidRequest(verdict.reason) if verdict.answer == "never" else None
                return f"{gate.name}: {verdict.reason}", never
        return None, None

    def payloads(self, request_ids: list[int]) -> dict[str, bytes]:
        """What the workers need for a step, by gate."""
        found = {gate.name: gate.payload(request_ids) for gate in self._gates}
        return {name: payload for name, payload in found.items() if payload is not None}

    def followers(self, request_ids: list[int]) -> tuple[str, ...]:
        """The gates whose late payload a step with these requests must wait for."""
        return tuple(gate.name for gate in self._gates if gate.follows(request_ids))

    def late(
        self, names: tuple[str, ...], rows: npt.NDArray[np.int32], request_ids: list[int]
    ) -> dict[str, memoryview]:
        """The late payloads of these gates."""
        return {
            gate.name: gate.late(rows, request_ids) for gate in self._gates if gate.name in names
        }

    def forced(self) -> dict[int, list[int]]:
        """See Gate; one gate at most forces."""
        found: dict[int, list[int]] = {}
        for gate in self._gates:
            found |= gate.forced()
        return found

    def landed(self, request_ids: list[int], tokens: list[int]) -> Ends:
        """Tells every gate the new tokens; the requests that end with theirs."""
        ends: Ends = {}
        for gate in self._gates:
            ends |= gate.landed(request_ids, tokens)
        return ends

    @property
    def num_held(self) -> int:
        """Requests that gates keep something for; 0 at rest."""
        return sum(gate.num_held for gate in self._gates)

    def finish(self, request_id: int) -> None:
        """The request has ended; every gate is told, even if one of them fails."""
        for gate in self._gates:
            try:
                gate.finish(request_id)
            except Exception:
                _log.exception("gate %s failed at the end of a request", gate.name)


def _as_ours(error: Exception) -> HeadraceError:
    return error if isinstance(error, HeadraceError) else from_wire(to_wire(error))
