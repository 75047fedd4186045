"""What tests of the core share: specs, requests, and a driver that runs a core on the null executor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.back.executor.null import NullBehaviour, NullExecutor
from headrace.base.config.resolved import (
    DeviceSpec,
    EngineSpec,
    KVSpec,
    ModelSpec,
    SchedulerSpec,
    SpeculationSpec,
)
from headrace.base.wire.control import Call, Reply
from headrace.base.wire.request import (
    EngineRequest,
    Finished,
    RowSampling,
    StopRules,
    TokenLogprobs,
)
from headrace.base.wire.step import KVGroup, StepPlan
from headrace.core.core import EngineCore
from headrace.core.ports import AdmissionHook

WIDTH = 1000
EOS = 2
FULL = (KVGroup(kind="full", caches=(0,)),)


def window_groups(window: int) -> tuple[KVGroup, ...]:
    """A hybrid: one full group, one window group."""
    return (
        KVGroup(kind="full", caches=(0,)),
        KVGroup(kind="window", caches=(1,), span=window),
    )


def make_spec(
    *,
    num_blocks: int = 64,
    block_tokens: int = 4,
    max_model_len: int = 256,
    prefix_caching: bool = True,
    speculation: SpeculationSpec | None = None,
    **scheduler: Any,
) -> EngineSpec:
    """An engine of toy size."""
    model = ModelSpec(
        path="",
        name="null",
        format="dummy",
        family="null",
        dtype="float32",
        max_model_len=max_model_len,
        logits_width=WIDTH,
        eos_ids=(EOS,),
        config={},
    )
    settings: dict[str, Any] = {"max_step_tokens": 64, "max_running": 8, **scheduler}
    return EngineSpec(
        model=model,
        kv=KVSpec(block_tokens=block_tokens, prefix_caching=prefix_caching, num_blocks=num_blocks),
        scheduler=SchedulerSpec(**settings),
        device=DeviceSpec(device="cpu", executor="null"),
        speculation=speculation,
    )


def make_request(
    id: int,
    prompt: Sequence[int] | int = 8,
    *,
    max_tokens: int = 8,
    min_tokens: int = 0,
    stop_ids: tuple[int, ...] = (),
    sampling: RowSampling | None = None,
    **fields: Any,
) -> EngineRequest:
    """A request; a number as prompt means that many tokens that only this id has."""
    if isinstance(prompt, int):
        prompt = [3 + (id * 131 + i * 7) % (WIDTH - 3) for i in range(prompt)]
    return EngineRequest(
        id=id,
        prompt=np.asarray(prompt, "<i4").tobytes(),
        stop=StopRules(max_tokens=max_tokens, min_tokens=min_tokens, stop_ids=stop_ids),
        sampling=sampling or RowSampling(temperature=0.0),
        **fields,
    )


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """A core on a checking null executor; collects what comes out per request, and that each ends exactly once."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        groups: Sequence[KVGroup] = FULL,
        behaviour: NullBehaviour | None = None,
        hooks: Sequence[AdmissionHook] = (),
        clock: Callable[[], float] | None = None,
        check: bool = True,
    ) -> None:
        self.executor = NullExecutor(spec, behaviour=behaviour, groups=groups, check=check)
        self.clock = clock or Clock()
        self.core = EngineCore(spec, self.executor, hooks=hooks, clock=self.clock)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[TokenLogprobs | None]] = defaultdict(list)
        self.prompt_scores: dict[int, list[int]] = defaultdict(list)
        self.cached: list[tuple[int, int]] = []
        self.queued: list[int] = []
        self.finished: dict[int, Finished] = {}
        self.replies: dict[int, Reply] = {}
        self.num_steps = 0
        self._calls = 0

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.core.add(request)

    def add_suited(self, *requests: EngineRequest) -> None:
        """Adds requests, without their priorities where the policy has none."""
        for request in requests:
            priority = request.priority if self.core.spec.policy == "priority" else 0
            self.core.add(msgspec.structs.replace(request, priority=priority))

    def call(self, operation: str, **arguments: Any) -> int:
        """Makes a call and returns its number; the reply appears in `replies`."""
        self._calls += 1
        reply = self.core.call(Call(number=self._calls, operation=operation, arguments=arguments))
        if reply is not None:
            self.replies[reply.number] = reply
        return self._calls

    def ask(self, operation: str, **arguments: Any) -> Any:
        """The result of a call that is answered at once."""
        reply = self.replies[self.call(operation, **arguments)]
        assert reply.error is None, reply.error
        return msgspec.msgpack.decode(reply.result)

    def step(self) -> None:
        self.num_steps += 1
        output = self.core.step(wait=True)
        for reply in output.replies:
            assert reply.number not in self.replies
            self.replies[reply.number] = reply
        if output.tokens is None:
            return
        batch = output.tokens
        self.cached += batch.cached
        self.queued += batch.queued
        for i, (id, token) in enumerate(
            zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True)
        ):
            assert id not in self.finished, f"{id} got a token after its end"
            self.tokens[id].append(token)
            if batch.logprobs:
                self.logprobs[id].append(batch.logprobs[i])
        for id, scores in batch.prompt_logprobs:
            self.prompt_scores[id].extend(range(scores.start, scores.start + len(scores.ids)))
        for finished in batch.finished:
            assert finished.id not in self.finished, f"{finished.id} ended twice"
            self.finished[finished.id] = finished

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until there is nothing to do."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.ask('status')}")

    def assert_at_rest(self) -> None:
        """Nothing is held by anybody."""
        status = self.ask("status")
        assert status["running"] == status["waiting"] == status["refcount_sum"] == 0, status
        assert status["free_blocks"] == status["total_blocks"], status
        assert status["free_rows"] == status["total_rows"], status
        assert status["waiting_tokens"] == status["in_flight_steps"] == 0, status
        assert status["held_by_hooks"] == 0, status

    def reason(self, id: int) -> str:
        """Why a request waits, or what it does."""
        return str(self.ask("explain", ids=[id])[str(id)]["reason"])


DECODE_S, TOKEN_S = 0.004, 0.0001


class TimedDriver(Driver):
    """A core whose steps take the time a device would: so much for the decodes, so much for each prefill token."""

    def __init__(self, *, overlap: bool = False, **scheduler: Any) -> None:
        spec = make_spec(
            num_blocks=600, block_tokens=16, max_model_len=4096, overlap=overlap, **scheduler
        )
        super().__init__(spec, check=False)
        assert isinstance(self.clock, Clock)
        self.steps: list[tuple[int, int]] = []
        submit = self.executor.submit

        def timed(plan: StepPlan) -> Any:
            decodes = int((plan.num_tokens == 1).sum())
            prefill = int(plan.num_tokens.sum()) - decodes
            self.steps.append((decodes, prefill))
            pending = submit(plan)
            self.clock.now += DECODE_S * (decodes > 0) + TOKEN_S * prefill
            return pending

        self.executor.submit = timed
