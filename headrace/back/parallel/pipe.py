"""What the stages of a pipeline send to each other: hidden states to the next one, and from the
last one back to all others what it has sampled.

Sends return at once: a stage goes on with its next step while the one behind it still computes the
step before. Messages of one direction come in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
import torch.distributed as dist


class Pipe(Protocol):
    """One stage's ends of the pipeline."""

    @property
    def stage(self) -> int:
        """Which stage this is."""
        ...

    @property
    def num_stages(self) -> int:
        """How many there are."""
        ...

    def send_on(self, x: torch.Tensor) -> None:
        """To the next stage; nobody may write to `x` any more. Not of the last stage."""
        ...

    def receive_into(self, x: torch.Tensor) -> torch.Tensor:
        """What the stage before has sent, in `x`. Not of the first stage."""
        ...

    def send_back(self, x: torch.Tensor) -> None:
        """To every earlier stage; nobody may write to `x` any more. Of the last stage alone."""
        ...

    def receive_back(self, x: torch.Tensor) -> torch.Tensor:
        """What the last stage has sent, in `x`. Not of the last stage."""
        ...


class WrongStage(RuntimeError):
    """A stage was asked for what is another stage's to do: the ranks would wait for ever."""


class GroupPipe:
    """A pipe over two process groups of the same `ranks`, stage by stage: `forth` and `back`."""

    def __init__(
        self,
        *,
        stage: int,
        ranks: tuple[int, ...],
        forth: dist.ProcessGroup,
        back: dist.ProcessGroup,
    ) -> None:
        self._stage, self._ranks, self._forth, self._back = stage, ranks, forth, back
        self._unsent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        # Of as many steps as are ever in flight: what is older has long arrived.
        self._most_unsent = 2 * len(ranks) * (len(ranks) - 1)

    @property
    def stage(self) -> int:
        """See Pipe."""
        return self._stage

    @property
    def num_stages(self) -> int:
        """See Pipe."""
        return len(self._ranks)

    def send_on(self, x: torch.Tensor) -> None:
        """See Pipe."""
        self._must(self._stage < self.num_stages - 1, "send_on")
        self._send(x, self._stage + 1, self._forth)

    def receive_into(self, x: torch.Tensor) -> torch.Tensor:
        """See Pipe."""
        self._must(self._stage > 0, "receive_into")
        dist.recv(x, src=self._ranks[self._stage - 1], group=self._forth)
        return x

    def send_back(self, x: torch.Tensor) -> None:
        """See Pipe."""
        self._must(self._stage == self.num_stages - 1, "send_back")
        for stage in range(self._stage):
            self._send(x, stage, self._back)

    def receive_back(self, x: torch.Tensor) -> torch.Tensor:
        """See Pipe."""
        self._must(self._stage < self.num_stages - 1, "receive_back")
        dist.recv(x, src=self._ranks[-1], group=self._back)
        return x

    def _must(self, is_ours: bool, what: str) -> None:
        if not is_ours:
            raise WrongStage(f"{what} is not for stage {self._stage} of {self.num_stages}")

    def _send(self, x: torch.Tensor, stage: int, group: dist.ProcessGroup) -> None:
        """The tensor is kept until it has gone."""
        work = dist.isend(x, dst=self._ranks[stage], group=group)
        assert work is not None
        self._unsent.append((work, x))
        while len(self._unsent) > self._most_unsent:
            self._unsent.popleft()[0].wait()
