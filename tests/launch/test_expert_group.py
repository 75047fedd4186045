"""PAR-10: where engine cores that share out experts meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from headrace.base.config.resolved import DeviceSpec, EngineSpec, ExpertGroupSpec
from headrace.launch.expert_group import MeetingPlaces, in_group
from headrace.launch.topology import RuntimeFolder
from tests.launch.test_resolve import resolved


@pytest.fixture
def places() -> Iterator[MeetingPlaces]:
    with closing(RuntimeFolder()) as folder:
        yield MeetingPlaces(folder)


def test_all_cores_of_a_start_meet_in_one_folder_and_those_of_the_next_in_another(
    places: MeetingPlaces,
) -> None:
    first = [places.words(core)[1] for core in range(3)]
    again = [places.words(core)[1] for core in (1, 0, 2)]
    assert len(set(first)) == 1 and len(set(again)) == 1 and first[0] != again[0]
    assert places.words(2)[2:] == ("--group-core", "2")


def test_a_core_is_told_its_number_and_one_without_a_group_nothing() -> None:
    spec: EngineSpec = resolved().engine
    assert in_group(spec, folder="there", core=1) is spec
    device = DeviceSpec(device="cpu", executor="null", expert_group=ExpertGroupSpec(cores=2))
    told = in_group(msgspec.structs.replace(spec, device=device), folder="there", core=1)
    assert told.device.expert_group == ExpertGroupSpec(cores=2, core=1, folder="there")
