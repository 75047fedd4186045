"""PAR-05: which ranks share a layer, which hand on to each other, and what is whose to send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.back.parallel import pipe
from headrace.back.parallel.mesh import Axis, Mesh, pp_ranks, tp_ranks
from headrace.back.parallel.pipe import GroupPipe, WrongStage


def test_stages_are_numbered_one_behind_the_other() -> None:
    assert tp_ranks(2, 3) == ((0, 1), (2, 3), (4, 5))
    assert pp_ranks(2, 3) == ((0, 2, 4), (1, 3, 5))
    assert tp_ranks(1, 2) == ((0,), (1,)) and pp_ranks(1, 2) == ((0, 1),)


@pytest.mark.parametrize(("size", "stages"), [(1, 2), (2, 2), (2, 3)])
def test_a_rank_knows_its_number(size: int, stages: int) -> None:
    for rank in range(size * stages):
        stage, place = divmod(rank, size)
        tp = Axis(size=size, rank=place, group=object())
        mesh = Mesh(tp=tp, pp=Axis(name="pp", size=stages, rank=stage, group=object()))
        assert (mesh.rank, mesh.size) == (rank, size * stages)


@pytest.mark.parametrize(
    ("stage", "wrong"),
    [(0, "receive_into"), (0, "send_back"), (1, "send_back"), (2, "send_on"), (2, "receive_back")],
)
def test_a_stage_refuses_what_is_anothers_to_send(stage: int, wrong: str) -> None:
    ends = GroupPipe(stage=stage, ranks=(0, 1, 2), forth=object(), back=object())
    with pytest.raises(WrongStage, match=rf"{wrong} is not for stage {stage} of 3"):
        getattr(ends, wrong)(None)


def test_it_refuses_without_assertions_too() -> None:
    """REG-067: as `python -O` compiles the file."""
    source = Path(str(pipe.__file__))
    bare: dict[str, Any] = {"__name__": pipe.__name__}
    exec(compile(source.read_text("utf-8"), source, "exec", optimize=1, dont_inherit=True), bare)
    last = bare["GroupPipe"](stage=1, ranks=(0, 1), forth=object(), back=object())
    with pytest.raises(bare["WrongStage"], match="send_on is not for stage 1 of 2"):
        last.send_on(None)
