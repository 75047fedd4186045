"""A checkpoint's format is told by its template, else by its model_type, or by a name (API-07, API-10)."""

# ruff: noqa: E501 - a template reads best in one line

from __future__ import annotations

import pytest

from headrace.base.errors import ConfigError
from headrace.front.text.parsing.families import (
    REASONING_FAMILIES,
    TOOL_FAMILIES,
    choose_reasoning,
    choose_tools,
    reasoning_family,
    tool_family,
)
from headrace.front.text.parsing.parser import begins_inside
from headrace.front.text.tokenizer_files import read_facts
from headrace.launch.locate import bundled_model

# What the families' own templates say of calls and of reasoning, in short, with the model_type where it matters.
QWEN = '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
TEMPLATES: list[tuple[str | None, str, str, str]] = [
    ("{{ messages }}", "", "none", "none"),
    (None, "kimi_k3", "none", "none"),
    ("<tool_call> <think> </think>", "", "hermes", "qwen3"),
    (f"within <tool_call></tool_call> XML tags:\n<tool_call>\n{QWEN}", "qwen2", "hermes", "none"),
    (f"<tool_call>\n{QWEN} {{{{ '<think>\n\n</think>\n\n' }}}}", "qwen3", "hermes", "qwen3"),
    ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1", "qwen3_moe", "qwen3_coder", "none"),
    ("<think>\n</think> <tool_call>\n<function=f>\n<parameter=p>\n", "qwen3_5_moe", "qwen3_coder", "qwen3"),
    ("<think></think> {{ tools }}", "step3p5", "qwen3_coder", "qwen3"),
    ("<think></think> {%- if tools %}", "nemotron_h", "qwen3_coder", "qwen3"),
    ("<think></think><tool_call><arg_key><arg_value>", "", "glm45", "glm45"),
    ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value> <think></think>", "glm4_moe", "glm45", "glm45"),
    ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value> <think></think>", "glm4_moe_lite", "glm47", "glm45"),
    ("<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call> <think></think>", "laguna", "poolside_v1", "glm45"),
    ("<tool_calls>\n<tool_call>{{ name }}<tool_sep>\n<arg_key>k</arg_key>\n<arg_value>v</arg_value> <think></think>", "hy_v3", "hy_v3", "hy_v3"),
    ("<tool_calls:opensource><tool_sep:opensource><arg_key:opensource> <think:opensource>", "hy_v3", "hy_v3_opensource", "hy_v3_opensource"),
    ("{% set s = ':opensource' %}{{ '<tool_sep' + s + '>' }}{{ '<think' + s }}", "hy_v3", "hy_v3_opensource", "hy_v3_opensource"),
    ("<｜Assistant｜> split('</think>')", "", "none", "deepseek_r1"),
    ("<｜Assistant｜></think> <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json", "deepseek_v3", "deepseek_v3", "deepseek_r1"),
    ("<｜Assistant｜></think> <｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v3", "deepseek_v31", "deepseek_r1"),
    ('<｜Assistant｜></think> <｜DSML｜function_calls>\n<｜DSML｜invoke name="', "deepseek_v32", "deepseek_v32", "deepseek_r1"),
    ('<｜Assistant｜></think> <｜DSML｜tool_calls>\n<｜DSML｜invoke name="', "deepseek_v4", "deepseek_v4", "deepseek_r1"),
    ("<|im_middle|> <|tool_calls_section_begin|><|tool_call_begin|> <think></think>", "kimi_k2", "kimi_k2", "kimi_k2"),
    ("◁think▷", "kimi_vl", "none", "kimi"),
    ("<|open|>tools<|sep|><|open|>think<|sep|>", "kimi_k3", "kimi_k3", "kimi_k3"),
    ('<minimax:tool_call>\n<invoke name=" </think>', "minimax_m2", "minimax_m2", "minimax_m2"),
    ("{% set ns = ']<]minimax[>[' %}<tool_call> <mm:think> </mm:think>", "minimax_m3_vl", "minimax_m3", "minimax_m3"),
    ("<|message_model|><|content_thinking|> <|content_invoke_tool_json|>", "inkling_mm_model", "inkling", "inkling"),
    ("<|tool_call:start|><|tool_arg:start|> <|think:start|><|think:end|>", "solar_open2", "solar_open2", "solar_open2"),
    ('<function name="get"><param name="city"> <think> </think>', "llama", "minicpm5", "qwen3"),
    ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "deepseek_v3", "gigachat3", "none"),
    ("{{ content }}<|function_call|>", "deepseek_v3", "gigachat31", "none"),
    ("<|tools_prefix|>[ <|inner_prefix|>", "apertus", "apertus", "apertus"),
    ("<|start|>assistant<|channel|>final<|message|>", "gpt_oss", "gpt_oss", "gpt_oss"),
    ("<seed:tool_call>\n<function= <seed:think>", "seed_oss", "seed_oss", "seed_oss"),
    ('<steptml:invoke name=" </think>', "step3_text", "step3", "step3"),
    ("[TOOL_CALLS]{{ name }}[ARGS] [THINK][/THINK]", "mistral3", "mistral", "mistral"),
    ("[TOOL_CALLS] [", "mistral", "mistral_v3", "none"),
    ("<|tool_call>call: <|channel>thought", "gemma4", "gemma4", "gemma4"),
    ("<start_function_call>call:", "gemma3_text", "functiongemma", "none"),
    ("<|START_ACTION|>[ <|START_THINKING|>", "cohere2", "cohere_command", "cohere_command"),
    ("<|action_start|><|plugin|>", "internlm2", "internlm", "none"),
    ("<|tool|>{{ tools }}<|/tool|>", "phi3", "phi4_mini", "none"),
    ("<TOOLCALL>[{ <think></think>", "llama", "nemotron", "nemotron"),
    ("<longcat_tool_call>", "longcat_flash", "longcat", "none"),
    ("<|tool_call|>[ Here is my thought process: Here is my response:", "granite", "granite", "granite"),
    ("<function_call>", "gpt_bigcode", "granite_20b_fc", "none"),
    ("<tool_call> {{ tools }}", "granitemoehybrid", "hermes", "none"),
    ("<function_calls> <think>", "olmo3", "olmo3", "olmo3"),
    ("<|tool_call_start|>[", "lfm2", "lfm2", "none"),
    ("<tool_calls>[ {{ tools }}", "jamba", "jamba", "none"),
    ("<tool_calls>[ <think> <answer>", "hunyuan_v1_moe", "jamba", "hunyuan"),
    ("<tool_call> <response> </think>", "ernie4_5_moe_vl", "ernie45", "ernie45"),
    ("[func_name1(params_name1=params_value1)]", "llama4", "llama4_pythonic", "none"),
    ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}',
     "llama", "llama3_json", "none"),
    ("{%- if tools is defined %}", "llama", "llama3_json", "none"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "model_type", "tools", "reasoning"), TEMPLATES)
def test_the_template_shows_the_formats(
    template: str | None, model_type: str, tools: str, reasoning: str
) -> None:
    assert choose_tools(template, model_type).name == tools
    assert choose_reasoning(template, model_type).name == reasoning


def test_every_format_with_marks_is_found_by_a_template() -> None:
    shown = {tools for _, _, tools, _ in TEMPLATES}, {thinks for *_, thinks in TEMPLATES}
    for rows, found in zip((TOOL_FAMILIES, REASONING_FAMILIES), shown, strict=True):
        assert {row.name for row in rows if row.marks} <= found


def test_releases_that_share_a_name_are_told_apart_by_the_template() -> None:
    found = tool_family("hy_v3", "<tool_sep:opensource>"), tool_family("hy_v3", "<tool_sep>")
    assert [row.name for row in found if row] == ["hy_v3_opensource", "hy_v3"]
    found = tool_family("gigachat3", "<|function_call|>"), tool_family("gigachat3")
    assert [row.name for row in found if row] == ["gigachat31", "gigachat3"]
    reasoning = reasoning_family("hy_v3", "<think:opensource>"), reasoning_family("hy_v3")
    assert [row.name for row in reasoning if row] == ["hy_v3_opensource", "hy_v3"]
    assert tool_family("glm45", "{function-name}<arg_key><tool_call>") == tool_family("glm45")


CALLS = (
    "deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 cohere_command3 cohere_command4 ernie45 glm45 glm47 granite "
    "granite-20b-fc granite4 hermes poolside_v1 hunyuan_a13b hy_v3 internlm jamba lfm2 kimi_k2 kimi_k3 llama3_json "
    "llama4_json llama4_pythonic longcat mimo minimax_m2 minimax_m3 minicpm5 mistral olmo3 openai phi4_mini_json "
    "pythonic qwen3_coder qwen3_xml seed_oss step3 step3p5 inkling xlam gigachat3 functiongemma gemma4 apertus "
    "solar_open2 nemotron"
)
THOUGHTS = (
    "deepseek_r1 deepseek_v3 deepseek_v4 poolside_v1 cohere_command3 cohere_command4 ernie45 gemma4 glm45 glm47 "
    "openai_gptoss granite holo2 hunyuan_a13b hy_v3 kimi_k2 kimi_k3 mimo minimax_m2 minimax_m2_append_think minimax_m3 "
    "mistral nemotron_v3 olmo3 qwen3 seed_oss step3 step3p5 inkling solar_open2"
)


def test_every_name_that_users_of_other_servers_know_is_a_row() -> None:
    """API-07, API-10, contract section 12."""
    assert all(tool_family(name) is not None for name in CALLS.split())
    assert all(reasoning_family(name) is not None for name in THOUGHTS.split())


def test_the_bundled_model_is_recognised() -> None:
    template = read_facts(bundled_model()).chat_template
    assert (choose_tools(template).name, choose_reasoning(template).name) == ("hermes", "qwen3")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--tool-parser: 'hermess' is not known; .*hermes"):
        tool_family("hermess")
    with pytest.raises(ConfigError, match=r"--reasoning-parser: .*qwen3"):
        reasoning_family("q")
    assert tool_family("none") is None and reasoning_family("none") is None


@pytest.mark.parametrize(
    ("tail", "unfinished", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", None, True),
        ("assistant\n<think>\n\n</think>\n\n", None, False),
        ("assistant\n", None, False),
        ("assistant\n<think>\nso far", "<think>\nso far", True),
        ("<think>a</think>b", "<think>a</think>b", False),
        ("<think>\n", "", False),
    ],
)
def test_the_prompt_decides_whether_the_answer_begins_inside(
    tail: str, unfinished: str | None, inside: bool
) -> None:
    """REG-096, REG-098: only the turn that is being written counts."""
    family = reasoning_family("qwen3")
    assert family is not None
    assert begins_inside(family.tags, tail, unfinished=unfinished) is inside


def test_a_family_that_always_reasons_does_unless_the_prompt_closed_it() -> None:
    family = reasoning_family("deepseek_r1")
    assert family is not None
    assert begins_inside(family.tags, "<｜Assistant｜>")
    assert not begins_inside(family.tags, "<｜Assistant｜></think>")
