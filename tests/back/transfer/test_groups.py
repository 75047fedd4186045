"""Groups that a trainer in another process broadcasts over, by gloo; by NCCL: test_cuda_weights.py."""

from __future__ import annotations

import pytest
import torch

from headrace.back.transfer import groups as groups_module
from headrace.back.transfer.groups import WeightGroups, join
from headrace.back.transfer.orders import WeightOrders
from headrace.base.errors import Conflict, InvalidRequest
from headrace.base.wire.weights import Group, WeightOrder
from tests.back.transfer.trainers import free_port, trainer_of_one_tensor

CPU = torch.device("cpu")


def group_at(port: int, **more: str) -> Group:
    return Group(name="trainer", address="127.0.0.1", port=port, **{"backend": "gloo", **more})


@pytest.mark.slow
def test_a_trainer_that_is_killed_costs_its_group_alone() -> None:
    """What it left unsent is an error that says so, and the next group may have the same name (ENG-19)."""
    groups = WeightGroups(CPU, 0)
    for _ in range(2):
        port = free_port()
        with trainer_of_one_tensor(port) as trainer:
            groups.join(group_at(port))
            received = torch.zeros(5)
            groups.receive("trainer", [received])
            assert received.tolist() == [0, 1, 2, 3, 4]
            trainer.kill()
            with pytest.raises(Conflict, match="its trainer is gone"):
                groups.receive("trainer", [torch.zeros(5)])
        with pytest.raises(InvalidRequest, match="has not been joined"):
            groups.leave("trainer")


@pytest.mark.slow
def test_a_model_that_ends_leaves_its_groups() -> None:
    """Names belong to the process: the next model in it has them again."""
    for _ in range(2):
        orders, port = WeightOrders(None, CPU, 0), free_port()
        with trainer_of_one_tensor(port):
            joined = orders.carry_out(WeightOrder(action="join", group=group_at(port)))
            assert joined.error is None, joined.error
            orders.close()


def test_a_group_says_which_backends_there_are() -> None:
    with pytest.raises(InvalidRequest, match="allowed on cpu: gloo"):
        join(group_at(1, backend="nccl"), 0, CPU)


def test_a_trainer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "JOIN_TIMEOUT_S", 0.2)
    port = free_port()
    with pytest.raises(Conflict, match=f"group 'trainer' at tcp://127.0.0.1:{port}: "):
        join(group_at(port), 1, CPU)
