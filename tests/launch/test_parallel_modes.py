"""PAR-12, BEY-31: every pair of modes and features has an answer, which a start follows, and the tests
that the page names are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.base.config.resolved import ExpertBalanceSpec, ExpertGroupSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.cli.features_page import features_page
from headrace.launch.feature_pairs import ShownPair
from headrace.launch.parallel_modes import (
    FEATURES,
    MODES,
    REPLICAS,
    SEQUENCE,
    pairs,
)
from headrace.launch.resolve import resolve
from tests.launch.test_resolve import (
    CPU,
    CUDA,
    MODEL,
    MOVING_EXPERTS,
    SHARED_CONTEXT,
    options,
    resolved,
)

TESTS = Path(__file__).parents[1]


def test_every_pair_has_an_answer() -> None:
    """Replicas are whole copies: what goes with them goes without saying."""
    for row in (*MODES, *FEATURES):
        for mode in MODES:
            said = row is mode or mode.name in {*row.beside, REPLICAS, SEQUENCE}
            assert said, (row.name, mode.name)


def test_the_tests_that_show_pairs_are_there() -> None:
    for row, mode, entry in pairs():
        if isinstance(entry, ShownPair):
            name, _, function = entry.test.partition("::")
            assert f"def {function}(" in (TESTS / name).read_text(), (row.name, mode.name)


def test_each_cell_of_the_page_has_its_note() -> None:
    page = features_page()
    numbers = {int(number) for number in re.findall(r"\((\d+)\)", page)}
    assert numbers == {int(number) for number in re.findall(r"(?m)^(\d+)\. ", page)}
    assert page.count("\n| ") == 1 + len(MODES) + len(FEATURES)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"model": {"attention_capture": True}}, "--attention-capture: each stage has but"),
        (
            {"scheduler": {"speculative_config": {"method": "suffix"}}},
            "--speculative-config suffix: stages learn the texts",
        ),
    ],
)
def test_a_pair_that_is_refused_is_named_with_its_reason(
    groups: dict[str, Any], words: str
) -> None:
    asked = groups | {"device": {"pipeline_parallel": 2, "device": "cpu"}}
    with pytest.raises(ConfigError, match=f"--pipeline-parallel does not go with .*{words}"):
        resolved(CPU, **asked)
    assert resolved(CPU, **(groups | {"device": {"device": "cpu"}})) is not None


@pytest.mark.parametrize(
    "device", [{"pipeline_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}]
)
def test_modes_that_gpus_have(device: dict[str, Any]) -> None:
    assert resolved(CUDA, device={**device, "device": "cuda"}).engine.device.device == "cuda"


def test_gpus_share_out_caches_of_latents() -> None:
    """Of heads it is refused: on four GPUs a start ended in a device-side assert."""
    device = {"tensor_parallel": 4, "decode_context_parallel_size": 2, "device": "cuda"}
    machine = msgspec.structs.replace(CUDA, count=4)
    heads, latents = (msgspec.structs.replace(MODEL, cache_heads=(n,)) for n in (2, 1))
    assert resolve(options(device=device), latents, machine).engine.device.context is not None
    with pytest.raises(ConfigError, match="--device cuda with a model whose caches are of several"):
        resolve(options(device=device), heads, machine)


def test_gpus_read_no_counts_between_kernels() -> None:
    """PAR-11: recorded steps cannot."""
    whole = {"tensor_parallel": 2, "enable_expert_parallel": True, "all2all_backend": "ragged"}
    with pytest.raises(ConfigError, match=r"ragged reads on the host .*: padded sends") as caught:
        resolved(CUDA, device={**whole, "device": "cuda"})
    assert caught.value.field == "all2all_backend"
    assert resolved(CPU, device={**whole, "device": "cpu"}).engine.device.expert_parallel


SHARED_EXPERTS = {"data_parallel": 2, "enable_expert_parallel": True, "device": "cpu"}


def test_engine_cores_share_out_experts() -> None:
    """PAR-10: with more workers than one, tokens that are sent, and steps that are called."""
    found = resolved(CPU, device={**SHARED_EXPERTS, "tensor_parallel": 2})
    device = found.engine.device
    assert (found.replicas, found.max_replicas, device.executor) == (2, 2, "processes")
    assert device.expert_group == ExpertGroupSpec(cores=2) and not device.records
    assert device.token_exchange == "allgather_reducescatter"
    elastic = resolved(CPU, device={**SHARED_EXPERTS, "max_replicas": 4})
    assert (elastic.replicas, elastic.max_replicas) == (2, 4)
    assert elastic.engine.device.expert_group == ExpertGroupSpec(cores=2, least=2)
    copies = resolved(CPU, device={"data_parallel": 3, "device": "cpu"})
    assert copies.replicas == 3 and copies.engine.device.expert_group is None


def test_experts_of_all_cores_need_not_fit_on_one_gpu() -> None:
    big = msgspec.structs.replace(MODEL, weight_bytes=int(1.5 * CUDA.free_bytes))
    machine = msgspec.structs.replace(CUDA, count=2)
    copies: dict[str, Any] = {"device": "cuda", "data_parallel": 2}
    with pytest.raises(ConfigError, match="leave no room for the KV cache"):
        resolve(options(device=copies), big, machine)
    shared = options(device={**copies, "enable_expert_parallel": True})
    assert resolve(shared, big, machine).engine.kv.memory_bytes


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            {"device": {"pipeline_parallel": 3}},
            "--pipeline-parallel 3 .* --data-parallel 2 --enable",
        ),
        ({"device": {"replicas": 4}}, "--replicas 4 does not go with --data-parallel 2"),
        ({"device": {"executor": "inline"}}, "--executor inline: with --data-parallel 2"),
        ({"device": {"max_replicas": 1}}, "--max-replicas 1: at least --data-parallel 2"),
        ({"model": {"deterministic": True}}, "allgather_reducescatter does not go with --determin"),
    ],
)
def test_what_cores_that_share_out_experts_cannot(groups: dict[str, Any], words: str) -> None:
    device = {**SHARED_EXPERTS, **groups.get("device", {})}
    with pytest.raises(ConfigError, match=words):
        resolved(CPU, **{**groups, "device": device})


def test_what_sharing_out_the_context_does_not_go_with_is_named() -> None:
    start = "--decode-context-parallel-size does not go with"
    with pytest.raises(ConfigError, match=f"{start} .*--slot-save-path: files would hold a part"):
        resolved(device=SHARED_CONTEXT, kv={"slot_save_path": "/tmp"})
    with pytest.raises(ConfigError, match=f"{start} --pipeline-parallel"):
        resolved(device={**SHARED_CONTEXT, "pipeline_parallel": 2})
    found = resolved(device={**SHARED_CONTEXT, "enable_expert_parallel": True}).engine.device
    assert found.context is not None and found.context.ranks == 2 and found.expert_parallel
    on_gpus = resolved(CUDA, device={**MOVING_EXPERTS, "device": "cuda"}).engine.device
    assert on_gpus.expert_balance == ExpertBalanceSpec(redundant=0, steps=9)
    moving = resolved(device={**MOVING_EXPERTS, "num_redundant_experts": 3}).engine.device
    assert moving.expert_balance == ExpertBalanceSpec(redundant=3, steps=9)
    lengths = [
        resolved(device=device, kv={"kv_blocks": 11}).engine.model.max_model_len
        for device in ({}, SHARED_CONTEXT)
    ]
    assert lengths == [10 * 16, 2 * 10 * 16], "so many times the context fits"


@pytest.mark.parametrize(
    ("ranks", "size", "heads", "words"),
    [
        (2, 2, (2,), "the 2 KV heads of a layer a multiple of 2 times; allowed: 1, or raise"),
        (8, 8, (2,), "allowed: 2, 4, or raise --tensor-parallel to a multiple of 16"),
        (4, 2, (1, 4), "2: the 4 devices of --tensor-parallel do not hold each of the 4 KV heads"),
        (4, 2, (1, 2), None),
        (4, 4, (1,), None),
    ],
)
def test_ranks_share_out_only_what_several_of_them_hold(
    ranks: int, size: int, heads: tuple[int, ...], words: str | None
) -> None:
    """PAR-02: known before a worker is started."""
    device = {"tensor_parallel": ranks, "decode_context_parallel_size": size}
    asked = msgspec.convert({"device": device}, Options)
    model = msgspec.structs.replace(MODEL, cache_heads=heads)
    if words is None:
        spec = resolve(asked, model, CPU).engine.device.context
        assert spec is not None and spec.ranks == size
        return
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        resolve(asked, model, CPU)
    assert caught.value.field == "decode_context_parallel_size"


def test_stages_are_resolved() -> None:
    found = resolved(
        device={"pipeline_parallel": 2, "tensor_parallel": 2, "pipeline_layers": (1, 1)}
    )
    engine = found.engine
    assert engine.device.world_size == 4 and engine.device.executor == "processes"
    assert engine.device.pipeline_layers == (1, 1) and engine.scheduler.stages == 2
    with pytest.raises(ConfigError, match="1,1,1 names 3 stages, --pipeline-parallel 2"):
        resolved(device={"pipeline_parallel": 2, "pipeline_layers": (1, 1, 1)})
