"""Which of a server's models are loaded: a state machine without processes, sockets or threads.

Requests wait here for their model. A model is loaded when it is first wanted and memory is left for
it; else models that nobody uses make room, those of lowest priority first, among these the one
whose last use is longest ago. One that is in use never loses its core. But where a request has
waited for SWAP_AFTER_S, and all others are busy, models of no higher priority are *closed*: what
runs there ends in peace, what comes waits, and then the memory changes hands. So no model starves,
and none is thrown out before it has served for SWAP_AFTER_S.

Invariant: the needs of all models that are not unloaded, failed or asleep are within the budget, as
far as they were known when each was loaded. `turn` is called after every event and at `due`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from headrace.base.config.units import show_bytes
from headrace.base.errors import HeadraceError, Unavailable
from headrace.base.wire.models import (
    ChangeModel,
    ExplainWait,
    ListModels,
    ModelStatus,
    ReleaseModel,
    ServedModelState,
    WantModel,
)
from headrace.launch.many.pooled import (
    AT_REST,
    LEAVING,
    MAX_WAITING,
    RETRY_S,
    SWAP_AFTER_S,
    PoolActions,
    PooledModel,
    WaitingRequest,
)


class ModelPool:
    """See the module. Times are those of `clock`, which is monotonic."""

    def __init__(
        self,
        models: Sequence[PooledModel],
        actions: PoolActions,
        *,
        budget_bytes: int,
        sleep_bytes: int = 0,
        max_loaded: int | None = None,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models = list(models)
        self._actions = actions
        self._budget_bytes = budget_bytes
        self._sleep_bytes = sleep_bytes
        self._max_loaded = max_loaded or len(self.models)
        self._wait_s = wait_s
        self._clock = clock

    def want(self, client: int, message: WantModel) -> None:
        """A request waits for its model, if there are not too many that do."""
        model = self.models[message.model]
        if len(model.waiting) >= MAX_WAITING:
            why = f"model: {MAX_WAITING} requests wait for {model.name!r} already: "
            error = Unavailable(why + self.reason_of(model), retry_after_s=RETRY_S)
            self._actions.reply(client, message.number, error=error)
            return
        model.waiting.append(
            WaitingRequest(
                client, message.number, self._clock(), ids=message.ids, tenant=message.tenant
            )
        )

    def leave(self, client: int, number: int) -> None:
        """A request that waited is gone. Its number is answered all the same: it may just have been
        granted, and then this finds nothing."""
        for model in self.models:
            gone = [w for w in model.waiting if (w.client, w.number) == (client, number)]
            self._drop(model, gone)
            for waiting in gone:
                self._actions.reply(client, waiting.number, error=Unavailable("nobody waits"))

    def release(self, client: int, message: ReleaseModel) -> None:
        """An API process has no request to this model any more."""
        model = self.models[message.model]
        model.leases[client] -= message.count
        model.leases = +model.leases  # those above 0
        model.used_at = self._clock()
        wanted = message.keep_alive_s
        if wanted is not None:
            model.keep_alive_s = math.inf if wanted < 0 else wanted

    def change(self, client: int, message: ChangeModel) -> None:
        """An administrator wants a model loaded, or unloaded once it is idle."""
        model = self.models[message.model]
        if message.load:
            model.waiting.append(
                WaitingRequest(client, message.number, self._clock(), leases=False)
            )
        elif model.status in (ModelStatus.UNLOADED, ModelStatus.FAILED):
            self._actions.reply(client, message.number)
        else:
            model.unloads.append((client, message.number))

    def list_models(self, client: int, message: ListModels) -> None:
        """Answers with the state of every model."""
        self._actions.reply(client, message.number, result=[*map(self._state, self.models)])

    def explain(self, client: int, message: ExplainWait) -> None:
        """Answers with why the requests of a name wait."""
        now = self._clock()
        waits: list[dict[str, object]] = []
        for model in self.models:
            for position, waiting in enumerate(model.waiting):
                whose = message.tenant in (None, waiting.tenant)
                if whose and message.id in waiting.ids:
                    waits.append(
                        {
                            "label": waiting.ids[0],
                            "external_id": waiting.ids[-1],
                            "state": "waiting for its model",
                            "model": model.name,
                            "reason": self.reason_of(model),
                            "position": position,
                            "since_s": now - waiting.since,
                            "at_most_s": self._wait_s,
                        }
                    )
        self._actions.reply(client, message.number, result=waits)

    def forget(self, client: int) -> None:
        """An API process is gone, and its requests with it."""
        now = self._clock()
        for model in self.models:
            if model.leases.pop(client, 0):
                model.used_at = now
            self._drop(model, [w for w in model.waiting if w.client == client])
            model.unloads = [one for one in model.unloads if one[0] != client]

    def loaded(self, index: int, *, num_bytes: int, load_s: float) -> None:
        """The core of a model is ready (again): it takes so much of the budget."""
        model = self.models[index]
        model.num_bytes, model.load_s = num_bytes, load_s
        model.keep_alive_s = model.default_keep_alive_s
        model.used_at = self._clock()
        self._enter(model, ModelStatus.LOADED)

    def failed(self, index: int, error: HeadraceError) -> None:
        """A model could not be loaded: whoever waits for it learns why."""
        model = self.models[index]
        model.error = error
        self._enter(model, ModelStatus.FAILED)
        self._actions.announce_gone(model)
        self._refuse(model, error)
        self._answer_unloads(model)

    def restarting(self, index: int) -> None:
        """The core of a loaded model has died, and is started again."""
        model = self.models[index]
        self._enter(model, ModelStatus.LOADING)
        self._actions.announce_closed(model)

    def asleep(self, index: int) -> None:
        """A core has given back what a sleeping one does not need."""
        self._enter(self.models[index], ModelStatus.ASLEEP)

    def ended(self, index: int) -> None:
        """A core that was to end, slept or could not wake has ended."""
        model = self.models[index]
        self._enter(model, ModelStatus.UNLOADED)
        self._actions.announce_gone(model)
        self._answer_unloads(model)

    def turn(self) -> None:
        """Does what can be done now."""
        now = self._clock()
        for model in self.models:
            self._end_waits(model, now)
            self._let_go(model, now)
        for model in self._wanted():
            self._answer(model, now)
        for model in self._wanted():
            if model.status not in AT_REST:
                continue
            if not self._fits(model, without=()):
                self._make_room(model, now)
                return  # what comes free is kept for this one
            self._start(model)

    def due(self) -> float:
        """When `turn` is to be called though nothing has happened."""
        now, times = self._clock(), [math.inf]
        for model in self.models:
            if model.status is ModelStatus.LOADED:
                times.append(model.expires_at)
            if model.waiting:
                since = model.waiting[0].since
                times.append(since + self._wait_s)
                if model.status in AT_REST:
                    begins = [since, *(one.since for one in self._active)]
                    swaps = [one + SWAP_AFTER_S for one in begins]
                    times += [one for one in swaps if one > now]
        return min(times)

    def reason_of(self, model: PooledModel) -> str:
        """Why a request to this model waits, in words."""
        spent_s = self._clock() - model.since
        match model.status:
            case ModelStatus.LOADING | ModelStatus.WAKING:
                return f"the model is {model.status.value}, for {spent_s:.1f} s"
            case ModelStatus.SLEEPING | ModelStatus.UNLOADING:
                return f"the model is {model.status.value}, and will be loaded again"
            case ModelStatus.LOADED:
                return "other models wait for the memory of this one, and were first"
        return (
            f"no memory for the model: it needs {show_bytes(model.num_bytes)} of "
            f"{show_bytes(self._budget_bytes)}, and {show_bytes(max(0, self._free_bytes))} are free; "
            f"loaded: {self._loaded_in_words()}"
        )

    def _loaded_in_words(self) -> str:
        words = []
        for one in self.models:
            if one.status not in AT_REST:
                use = "pinned" if one.pinned else "in use" if one.leases else one.status.value
                words.append(f"{one.name} ({show_bytes(one.num_bytes)}, {use})")
        return ", ".join(words) or "none"

    @property
    def _active(self) -> list[PooledModel]:
        return [model for model in self.models if model.status not in AT_REST]

    @property
    def _free_bytes(self) -> int:
        return self._budget_bytes - sum(model.num_bytes for model in self._active)

    def _wanted(self) -> list[PooledModel]:
        """The models that somebody waits for, the most urgent first."""
        wanted = [model for model in self.models if model.waiting]
        return sorted(wanted, key=lambda model: (-model.priority, model.waiting[0].since))

    def _let_go(self, model: PooledModel, now: float) -> None:
        """Evicts a model that is to go and may, or sees to it that it may soon."""
        if model.status is ModelStatus.LOADED:
            is_over = bool(model.unloads) or model.closed or now >= model.expires_at
            if is_over and model.idle:
                self._evict(model, keep=not model.unloads)
            elif model.unloads and not model.closed:
                self._close(model)
        elif model.unloads and model.status in (ModelStatus.ASLEEP, ModelStatus.LOADING):
            self._end(model)

    def _answer(self, model: PooledModel, now: float) -> None:
        """Answers those who wait, where the answer is known."""
        if model.status is ModelStatus.LOADED and not model.closed:
            self._grant(model)
        elif model.status is ModelStatus.FAILED and now < model.since + RETRY_S:
            assert model.error is not None
            self._refuse(model, model.error)

    def _close(self, model: PooledModel) -> None:
        model.closed = True
        self._actions.announce_closed(model)

    def _start(self, model: PooledModel) -> None:
        if model.status is ModelStatus.ASLEEP:
            self._enter(model, ModelStatus.WAKING)
            self._actions.wake(model)
        else:
            self._enter(model, ModelStatus.LOADING)
            self._actions.load(model)

    def _fits(self, model: PooledModel, *, without: Iterable[PooledModel]) -> bool:
        """Whether there is memory for a model once some others are gone."""
        leaving = list(without)
        freed = sum(one.num_bytes for one in leaving)
        num_active = len(self._active) - len(leaving)
        return model.num_bytes <= self._free_bytes + freed and num_active < self._max_loaded

    def _make_room(self, model: PooledModel, now: float) -> None:
        """Lets others go for the sake of this one, the fewest there must be."""
        going = [one for one in self._active if one.status in LEAVING or one.closed]
        if self._fits(model, without=going):
            return
        loaded = [one for one in self._active if one.status is ModelStatus.LOADED]
        free = [one for one in loaded if not (one.pinned or one.closed)]
        victims = self._victims(model, [one for one in free if one.idle and not one.waiting], going)
        if victims is None and now - model.waiting[0].since >= SWAP_AFTER_S:
            old = [one for one in free if self._may_close(one, model, now)]
            victims = self._victims(model, old, going)
        for victim in victims or ():
            if victim.idle:
                self._evict(victim, keep=True)
            else:
                self._close(victim)

    def _may_close(self, one: PooledModel, model: PooledModel, now: float) -> bool:
        unused = one.idle and not one.waiting
        return unused or (one.priority <= model.priority and now - one.since >= SWAP_AFTER_S)

    def _victims(
        self, model: PooledModel, candidates: list[PooledModel], going: list[PooledModel]
    ) -> list[PooledModel] | None:
        """Those of the candidates that make room beside what goes already; None: all do not."""
        victims: list[PooledModel] = []
        for one in sorted(candidates, key=lambda one: (one.priority, not one.idle, one.used_at)):
            if self._fits(model, without=[*going, *victims]):
                break
            victims.append(one)
        if not self._fits(model, without=[*going, *victims]):
            return None
        for one in list(victims):
            rest = [victim for victim in victims if victim is not one]
            if self._fits(model, without=[*going, *rest]):
                victims = rest
        return victims

    def _evict(self, model: PooledModel, *, keep: bool) -> None:
        """Takes the memory of an idle model: it sleeps, where it may and `keep` allows it."""
        assert model.idle and model.status is ModelStatus.LOADED, (model.name, model.status)
        asleep = [one for one in self.models if one.status is ModelStatus.ASLEEP]
        used = sum(one.sleep_bytes or 0 for one in asleep)
        need = model.sleep_bytes
        if keep and need is not None and used + need <= self._sleep_bytes:
            self._enter(model, ModelStatus.SLEEPING)
            self._actions.announce_closed(model)
            self._actions.sleep(model)
        else:
            self._end(model)

    def _end(self, model: PooledModel) -> None:
        self._enter(model, ModelStatus.UNLOADING)
        self._actions.announce_closed(model)
        self._actions.end(model)

    def _enter(self, model: PooledModel, status: ModelStatus) -> None:
        model.status, model.since, model.closed = status, self._clock(), False

    def _grant(self, model: PooledModel) -> None:
        while model.waiting:
            waiting = model.waiting.popleft()
            if waiting.leases:
                model.leases[waiting.client] += 1
            self._actions.reply(waiting.client, waiting.number)
        model.used_at = self._clock()

    def _refuse(self, model: PooledModel, error: HeadraceError) -> None:
        while model.waiting:
            waiting = model.waiting.popleft()
            self._actions.reply(waiting.client, waiting.number, error=error)

    def _end_waits(self, model: PooledModel, now: float) -> None:
        """Refuses those who have waited too long, with the reason."""
        late = [waiting for waiting in model.waiting if now >= waiting.since + self._wait_s]
        for waiting in late:
            why = f"model: {model.name!r} was not there within {self._wait_s:g} s: "
            error = Unavailable(why + self.reason_of(model), retry_after_s=RETRY_S)
            self._actions.reply(waiting.client, waiting.number, error=error)
        self._drop(model, late)

    def _drop(self, model: PooledModel, gone: list[WaitingRequest]) -> None:
        if gone:
            model.waiting = deque(w for w in model.waiting if w not in gone)

    def _answer_unloads(self, model: PooledModel) -> None:
        for client, number in model.unloads:
            self._actions.reply(client, number)
        model.unloads = []

    def _state(self, model: PooledModel) -> ServedModelState:
        offset = time.time() - self._clock()
        loaded = model.status is ModelStatus.LOADED
        expires = model.expires_at if loaded else math.inf
        failed = model.status is ModelStatus.FAILED and model.error is not None
        return ServedModelState(
            name=model.name,
            status=model.status.value,
            why=model.error.message if failed and model.error else "",
            num_bytes=model.num_bytes,
            since=0.0 if math.isinf(model.since) else model.since + offset,
            in_use=not model.idle,
            num_waiting=len(model.waiting),
            pinned=model.pinned,
            priority=model.priority,
            load_s=model.load_s,
            expires_at=None if math.isinf(expires) else expires + offset,
        )
