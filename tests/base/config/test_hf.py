"""config.json is read by key, with type, bounds and aliases; everything wrong is refused by file, key and value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.config.hf import ConfigReader, parse_json, read_json
from headrace.base.config.refused import refuse_remote_code, remote_code
from headrace.base.errors import CheckpointError


def reader(**raw: Any) -> ConfigReader:
    return ConfigReader(raw, "config.json")


def test_each_kind_is_returned_with_its_type() -> None:
    cfg = reader(a=3, b=2.5, c=True, d="x", e=[1, 2], f=4.0, g=7)
    assert (cfg.int("a"), cfg.float("b"), cfg.bool("c"), cfg.str("d")) == (3, 2.5, True, "x")
    assert cfg.list("e", of=int) == (1, 2)
    assert cfg.int("f") == 4 and isinstance(cfg.int("f"), int)
    assert cfg.float("g") == 7.0 and isinstance(cfg.float("g"), float)


def test_null_and_absent_take_the_default_and_required_ones_are_named() -> None:
    cfg = reader(head_dim=None)
    assert cfg.int("head_dim", None) is None
    assert cfg.int("window", 5) == 5
    assert cfg.list("layers", None, of=str) is None
    assert cfg.section("rope_scaling") is None
    with pytest.raises(CheckpointError, match=r"config\.json: head_dim is missing.*whole number"):
        cfg.int("head_dim")


def test_an_alias_is_taken_only_when_the_key_is_absent() -> None:
    assert reader(n_embd=8).int("hidden_size", aliases=("d_model", "n_embd")) == 8
    assert reader(n_embd=8, hidden_size=9).int("hidden_size", aliases=("n_embd",)) == 9
    with pytest.raises(CheckpointError, match=r"hidden_size \(or n_embd\) is missing"):
        reader().int("hidden_size", aliases=("n_embd",))


@pytest.mark.parametrize(
    "ask",
    [
        lambda cfg: cfg.int("k"),
        lambda cfg: cfg.float("k"),
        lambda cfg: cfg.bool("k"),
        lambda cfg: cfg.list("k", of=int),
        lambda cfg: cfg.section("k"),
        lambda cfg: cfg.choice("k", ("silu", "gelu")),
        lambda cfg: cfg.ids("k"),
    ],
)
def test_a_wrong_type_names_file_key_and_value(ask: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: k is 'os\.system' \(str\); it must"):
        ask(reader(k="os.system"))


def test_numbers_outside_their_bounds_are_refused_with_the_bounds() -> None:
    with pytest.raises(CheckpointError, match=r"k is 0 \(int\).*at least 1"):
        reader(k=0).int("k", ge=1)
    with pytest.raises(CheckpointError, match=r"k is 9 \(int\).*at most 8"):
        reader(k=9).int("k", le=8)
    for bad in (float("nan"), float("inf"), True, "1", 10**400):
        with pytest.raises(CheckpointError, match="finite number"):
            reader(k=bad).float("k")


def test_bool_is_no_number_and_a_fraction_no_whole_number() -> None:
    for bad in (True, 1.5, [1], {"a": 1}):
        with pytest.raises(CheckpointError, match="whole number"):
            reader(k=bad).int("k")


def test_an_unknown_variant_is_refused_with_the_list() -> None:
    with pytest.raises(CheckpointError, match="one of gelu, silu"):
        reader(act="relu9").choice("act", ("silu", "gelu"))
    assert reader().choice("act", ("silu",), "silu") == "silu"


def test_list_checks_length_and_items() -> None:
    with pytest.raises(CheckpointError, match="a list of 3 str"):
        reader(k=["a"]).list("k", of=str, length=3)
    with pytest.raises(CheckpointError, match="a list of int"):
        reader(k=[1, True]).list("k", of=int)
    assert reader(k=[1, 2.5]).list("k", of=float) == (1.0, 2.5)


def test_ids_take_one_many_or_none_below_the_vocabulary() -> None:
    assert reader(e=5).ids("e") == (5,)
    assert reader(e=[5, 6]).ids("e") == (5, 6)
    assert reader().ids("e") == ()
    with pytest.raises(CheckpointError, match="less than 6"):
        reader(e=[5, 6]).ids("e", below=6)


def test_a_section_names_itself_and_unused_keys_are_reported_through_it() -> None:
    cfg = reader(rope_scaling={"type": "yarn", "factor": "x", "odd": 1}, hidden_size=4, extra=1)
    cfg.int("hidden_size")
    section = cfg.section("rope_scaling")
    assert section is not None and section is cfg.section("rope_scaling")
    section.str("type")
    with pytest.raises(CheckpointError, match=r"config\.json: rope_scaling: factor is 'x'"):
        section.float("factor")
    assert cfg.unused() == ("extra", "rope_scaling.odd")


def test_a_section_that_must_be_there_is_named_with_its_other_names() -> None:
    assert reader(sound={"bins": 3}).required_section("audio", aliases=("sound",)).int("bins") == 3
    with pytest.raises(CheckpointError, match=r"audio \(or sound\) is missing.*an object") as wrong:
        reader().required_section("audio", aliases=("sound",))
    assert wrong.value.field == "audio"


def test_read_json_refuses_what_is_too_large_absent_or_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_json(path)
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    with pytest.raises(CheckpointError, match="has 8 bytes; at most 7"):
        read_json(path, limit=7)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="not a file"):
        read_json(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 200_000, b'{"a": 1' + b"0" * 5000 + b"}"],
    ids=["empty", "list", "cut", "not utf-8", "deep", "long number"],
)
def test_bad_json_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: "):
        parse_json(data, "config.json")


def test_a_duplicate_key_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'a' appears twice"):
        parse_json(b'{"x": {"a": 1, "a": 2}}', "config.json")


@given(st.binary(max_size=60))
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_json(data, "f"), dict)
    except CheckpointError as error:
        assert error.message.startswith("f: ")


def test_remote_code_is_found_at_any_depth_and_refused_by_key() -> None:
    """P13."""
    raw = {
        "auto_map": {"AutoModel": "evil.py"},
        "vision_config": {"auto_map": {}},
        "l": [{"auto_map": 1}],
    }
    assert remote_code(raw) == ("auto_map", "l.0.auto_map", "vision_config.auto_map")
    with pytest.raises(CheckpointError, match="code from checkpoints is never run"):
        refuse_remote_code(raw, "config.json")
    refuse_remote_code({"model_type": "llama"}, "config.json")


def test_a_range_is_two_numbers_of_which_an_end_may_be_infinite() -> None:
    infinite = {"__float__": "Infinity"}
    for value, expected in (
        ([0, 0.5], (0.0, 0.5)),
        ([0.0, infinite], (0.0, math.inf)),
        ([-math.inf, 1], (-math.inf, 1.0)),
        (None, (0.0, 9.0)),
    ):
        assert ConfigReader({"limit": value}, "config.json").range("limit", (0.0, 9.0)) == expected
    for wrong in ([1.0, 0.5], [0.0], [0, 1, 2], 3, [0.0, math.nan], ["0", 1], [True, 2]):
        with pytest.raises(CheckpointError, match=r"limit is .* two numbers, the lower first"):
            ConfigReader({"limit": wrong}, "config.json").range("limit", (0.0, 9.0))
