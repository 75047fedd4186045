"""What the processes are told of the machine."""

from __future__ import annotations

import msgspec
import pytest

from headrace.back.platforms.detect import FAKES, device
from headrace.back.platforms.facts import visible_devices
from headrace.base.config.device_options import DeviceOptions
from headrace.base.config.resolved import Resolved
from headrace.base.errors import ConfigError
from headrace.launch import topology
from headrace.launch.topology import core_environment, device_facts, planned_facts
from tests.launch.test_resolve import CUDA, resolved


def on_cuda(*, replicas: int, tensor_parallel: int) -> Resolved:
    count = replicas * tensor_parallel
    device = {"device": "cuda", "replicas": replicas, "tensor_parallel": tensor_parallel}
    return resolved(msgspec.structs.replace(CUDA, count=count), device=device)


def test_replicas_share_the_devices_and_one_core_sees_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = on_cuda(replicas=2, tensor_parallel=2)
    seen = [core_environment(two, index)["CUDA_VISIBLE_DEVICES"] for index in range(2)]
    assert seen == ["0,1", "2,3"]
    assert core_environment(on_cuda(replicas=1, tensor_parallel=2), 0) == {}


def test_replicas_that_may_come_have_devices_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PAR-07: one at start sees its own alone; a plan counts all that there may be."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = {"device": "cuda", "max_replicas": 2}
    planned = planned_facts("h200", msgspec.convert(device, DeviceOptions))
    two = resolved(planned, device=device)
    assert planned.count == 2 and (two.replicas, two.max_replicas) == (1, 2)
    seen = [core_environment(two, index)["CUDA_VISIBLE_DEVICES"] for index in range(2)]
    assert seen == ["0", "1"]
    with pytest.raises(ConfigError, match="--tensor-parallel 1 x --max-replicas 3 needs 3 devices"):
        resolved(planned, device={"device": "cuda", "max_replicas": 3})
    with pytest.raises(ConfigError, match=r"--max-replicas 1: at least --replicas 2 is needed"):
        resolved(device={"replicas": 2, "max_replicas": 1})


def test_the_users_order_of_devices_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,3")
    two = on_cuda(replicas=2, tensor_parallel=1)
    assert core_environment(two, 0)["CUDA_VISIBLE_DEVICES"] == "7"
    assert core_environment(two, 1)["CUDA_VISIBLE_DEVICES"] == "3"


def test_replicas_of_amd_gpus_are_told_alike_under_both_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5")
    second = core_environment(on_cuda(replicas=2, tensor_parallel=1), 1)
    assert second["CUDA_VISIBLE_DEVICES"] == second["HIP_VISIBLE_DEVICES"] == "5"
    assert visible_devices("5", "5") == ("5",)


def test_an_amd_gpu_is_chosen_as_pytorchs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "detect", lambda: (FAKES["mi300x"], device("cpu")))
    assert device_facts("auto").kind == "cuda"
    assert device_facts("auto").total_bytes == FAKES["mi300x"].memory_bytes
    assert device_facts("cpu").kind == "cpu"
