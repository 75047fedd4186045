"""One option, four spellings (API-25)."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.config.options import CommandLine, build, config_page, fields
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError

GROUPS = ("model", "kv", "scheduler", "device", "server")


def parse(*argv: str) -> Options:
    return CommandLine("headrace serve", "", groups=GROUPS).parse(argv)[1]


def test_flat_dotted_json_and_yaml_spellings_agree(tmp_path: Path) -> None:
    nested, flat = tmp_path / "nested.yaml", tmp_path / "flat.yaml"
    nested.write_text(
        "scheduler:\n  policy: fair\n  max_running: 7\nmodel: {max_model_len: 8192}\n"
    )
    flat.write_text("policy: fair\nmax-running: 7\nmax_model_len: 8K\n")
    wanted = build(
        {"scheduler": {"policy": "fair", "max_running": 7}, "model": {"max_model_len": 8192}}
    )
    spellings = [
        ("--policy", "fair", "--max-running", "7", "--max-model-len", "8K"),
        (
            "--scheduler.policy",
            "fair",
            "--scheduler.max_running",
            "7",
            "--model.max_model_len=8192",
        ),
        ("--scheduler", '{"policy": "fair", "max_running": 7}', "--max-model-len", "8192"),
        ("--config", str(nested)),
        ("--config", str(flat)),
    ]
    assert [parse(*s) for s in spellings] == [wanted] * 5


def test_an_option_of_several_parts_is_json_on_the_command_line_and_a_mapping_in_the_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("speculative_config: {method: ngram, num_speculative_tokens: 4}\n")
    text = '{"method": "ngram", "num_speculative_tokens": 4}'
    typed = parse("--speculative-config", text).scheduler.speculative_config
    assert typed is not None and typed.num_speculative_tokens == 4
    assert parse("--config", str(file)).scheduler.speculative_config == typed
    assert parse("--speculative-config", "none").scheduler.speculative_config is None


def test_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nhost: 0.0.0.0\n")
    server = parse("--config", str(file), "--port", "2").server
    assert (server.host, server.port) == ("0.0.0.0", 2)


@pytest.mark.parametrize("short", ["bf16", "bfloat16"])
def test_short_names_of_types_are_understood(short: str) -> None:
    assert parse("--dtype", short).model.dtype == "bfloat16"


@pytest.mark.parametrize("argv", [("--max-model-len", "-1"), ("--max-model-len=-1",)])
def test_the_largest_length_is_minus_one(argv: tuple[str, ...]) -> None:
    assert parse(*argv).model.max_model_len == -1


@pytest.mark.parametrize("size", ["auto", "4GiB"])
def test_a_size_may_be_left_to_be_decided_in_words(size: str) -> None:
    """Also where the default is "auto" already."""
    assert parse("--kv-memory", size).kv.kv_memory == size


def test_booleans_have_a_negative_flag() -> None:
    assert parse("--no-prefix-caching").kv.prefix_caching is False
    assert parse("--prefix-caching").kv.prefix_caching is True


def test_lists_repeat_and_split_at_commas() -> None:
    assert parse("--api-keys", "a,b", "--api-keys", "c").server.api_keys == ("a", "b", "c")


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (("--polcy", "x"), "did you mean --policy?"),
        (("--policy", "x"), "one of: fcfs, priority, fair"),
        (("--max-running", "0"), "--max-running: 0"),
        (("--port", "99999"), "99999"),
        (("--max-model-len", "many"), "--max-model-len: 'many'"),
        (("--max-model-len", "-2"), "--max-model-len: '-2'"),
        (("--max-running", "-1"), "--max-running: -1"),
        (("--scheduler", '{"plicy": 1}'), "did you mean 'policy'?"),
        (("--scheduler", "{"), "not JSON"),
        (("--config", "/nowhere.yaml"), "cannot read"),
        (("--kv-memory", "4potatoes"), "'4potatoes' is no size such as 4GiB"),
        (("--port",), "expected one argument"),
        (("--speculative-config", "ngram"), "--speculative-config: not JSON"),
        (
            ("--speculative-config", '{"method": "ngram", "weights": "x"}'),
            "unknown field `weights`",
        ),
        (
            ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 16}'),
            "Expected `int` <= 15",
        ),
    ],
)
def test_mistakes_name_the_flag_the_value_and_what_is_allowed(
    argv: tuple[str, ...], wanted: str
) -> None:
    with pytest.raises(ConfigError, match="(?s)" + wanted.replace("?", r"\?").replace("{", r"\{")):
        parse(*argv)


def test_unknown_yaml_key_suggests_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max_runing: 3\n")
    with pytest.raises(ConfigError, match="did you mean 'max_running'"):
        parse("--config", str(file))


@pytest.mark.parametrize("word", ["", "all", "scheduler", "--policy", "fair"])
def test_help_finds_groups_flags_and_words(word: str) -> None:
    assert "--policy" in CommandLine("headrace serve", "", groups=GROUPS).help_text(word)


def test_every_option_is_documented_and_on_the_page() -> None:
    page = config_page()
    assert all(f.doc and f"`{f.flag}`" in page for f in fields())


def test_none_is_a_word_where_an_option_is_a_text_and_absence_where_it_may_be_absent() -> None:
    found = parse("--tool-parser", "none", "--file-store", "none", "--admin-key", "none")
    assert (found.server.tool_parser, found.server.file_store) == ("none", "none")
    assert found.server.admin_key is None
    assert parse("--kv-blocks", "none").kv.kv_blocks is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("fp8_per_tensor", "fp8-tensor"), ("fp8_per_block", "fp8-block"), ("fp8_per_channel", "fp8"), ("ptpc_fp8", "fp8"),
     ("int8_per_channel_weight_only", "int8"), ("nvfp4_per_token", "nvfp4"), ("mxfp8", "mxfp8")],
)  # fmt: skip
def test_schemes_have_the_names_of_other_servers_too(theirs: str, ours: str) -> None:
    """QNT-17."""
    text = '{"linear": "mxfp4", "moe": "mxfp4", "ignore": ["lm_head"]}'
    model = parse("--quantization", theirs, "--quantization-config", text).model
    assert model.quantization == ours
    parts = model.quantization_config
    assert parts is not None and (parts.linear, parts.moe, parts.head) == ("mxfp4", "mxfp4", None)
    with pytest.raises(ConfigError, match=r"--quantization-config: .*lineer"):
        parse("--quantization-config", '{"lineer": "fp8"}')
