"""What models of each family write, and what it means."""

# ruff: noqa: E501 - a golden text reads best in one line

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.front.text.parsing.engine import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
    joined,
)
from headrace.front.text.parsing.families import reasoning_family, tool_family
from headrace.front.text.parsing.parser import OutputParser

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {
        "s": {"type": "string"},
        "a": {"type": "integer"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "any": {},
    },
    "g": {},
}


@dataclass(frozen=True)
class Golden:
    """A text of a family and its meaning."""

    tools: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    inside: bool = False
    think: str = "qwen3"


def parser_of(tools: str, think: str = "qwen3", **more: Any) -> OutputParser:
    def ids() -> Iterator[str]:
        yield from (f"call_{i}" for i in range(10**9))

    made = ids()
    family, reasoning = tool_family(tools), reasoning_family(think)
    return OutputParser(
        reasoning=None if reasoning is None else reasoning.tags,
        tools=None if family is None else family.grammar,
        **{"schemas": SCHEMAS, **more},
        new_id=lambda: next(made),
    )


def parse(parser: OutputParser, pieces: list[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined(parts + parser.finish())


def meaning(parts: list[Part]) -> tuple[str, str, list[tuple[str, str]], int]:
    """Content, reasoning, calls as (name, arguments as text), complete calls."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            assert part.index == len(calls) - 1, "never back to an earlier call"
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    content = "".join(p.text for p in parts if isinstance(p, Content))
    reasoning = "".join(p.text for p in parts if isinstance(p, Reasoning))
    return content, reasoning, calls, sum(isinstance(p, CallEnd) for p in parts)


def _hermes(name: str, arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def _coder(name: str, **arguments: str) -> str:
    listed = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{listed}</function>\n</tool_call>"


HARD = 'a "quote" \\ </tool_call> {[ \n\t é 水'
GOLDEN = [
    Golden("none", "Plain <tool_call> text.\n", content="Plain <tool_call> text.\n"),
    Golden("hermes", " \n Hello  world \n", content=" \n Hello  world \n"),
    Golden("hermes", _hermes("f", {"s": HARD}), calls=[("f", {"s": HARD})]),
    Golden(
        "hermes",
        "<think>\nFirst\n\nthen\n</think>\n\nSure.\n" + _hermes("f", {"a": 1}) + "\n" + _hermes("g", {}),
        content="Sure.", reasoning="First\n\nthen", calls=[("f", {"a": 1}), ("g", {})],
    ),
    Golden("hermes", "so\n</think>\n\nyes", content="yes", reasoning="so", inside=True),
    Golden("hermes", "a <think> b", content="a <think> b"),
    Golden("hermes", "<think>\n\n</think>\n\nyes", content="yes"),
    Golden("hermes", "<think>never closed\n", reasoning="never closed\n"),
    Golden("hermes", "<think>a <think> b</think>c", reasoning="a <think> b", content="c"),
    Golden("hermes", "first</think>then", reasoning="first", content="then", think="deepseek_r1", inside=True),
    Golden("hermes", '<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', calls=[("f", {"a": [1, {}]})]),
    Golden("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', calls=[("f", {"a": 1})]),
    Golden("hermes", '<tool_call>{"name": "f", "arguments": null, "id": 3}', calls=[("f", {})]),
    Golden("hermes", '<tool_call>{"name": "g"}</tool_call> tail ', calls=[("g", {})], content="tail "),
    Golden("hermes", "x <tool_call> no call </tool_call>", content="x <tool_call> no call </tool_call>"),
    Golden("hermes", '<tool_call>{"name": "f"', content='<tool_call>{"name": "f"'),
    Golden("hermes", '<tool_call>{"nome": 1}</tool_call>', content='<tool_call>{"nome": 1}</tool_call>'),
    Golden("jamba", '<tool_calls>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</tool_calls>', calls=[("f", {"a": 1}), ("g", {})]),
    Golden("qwen3_coder", "Go.\n" + _coder("f", s="one\n\ntwo", a="3", b="True", o='{"k": [1]}'),
           content="Go.", calls=[("f", {"s": "one\n\ntwo", "a": 3, "b": True, "o": {"k": [1]}})]),
    Golden("qwen3_coder", _coder("f", s='say "<b>"\\', o="__import__('os').system('id')", any="[1, 2]", new="7"),
           calls=[("f", {"s": 'say "<b>"\\', "o": "__import__('os').system('id')", "any": [1, 2], "new": "7"})]),
    Golden("qwen3_coder", _coder("g") + "\n" + _coder("f", s=""), calls=[("g", {}), ("f", {"s": ""})]),
    Golden("qwen3_coder", "<tool_call>no function</tool_call>", content="<tool_call>no function</tool_call>"),
    Golden("seed_oss", _coder("f", a="3").replace("tool_call", "seed:tool_call"), calls=[("f", {"a": 3})], think="none"),
    Golden("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x y</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
           calls=[("f", {"s": "x y"}), ("g", {})]),
    Golden("glm45", "<think>hm</think>\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
           reasoning="hm", calls=[("f", {"s": "x", "a": 5}), ("g", {})]),
    Golden("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', calls=[("f", {"a": 1}), ("g", {})], think="none"),
    Golden("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', calls=[("f", {"a": 1})], think="none"),
    Golden("llama3_json", '{"name": "Alice", "parameters": 1}', content='{"name": "Alice", "parameters": 1}', think="none"),
    Golden("llama3_json", "Hello {world}", content="Hello {world}", think="none"),
    Golden("deepseek_v32", 'So.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">a\nb</｜DSML｜parameter>\n<｜DSML｜parameter name="new" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
           content="So.", calls=[("f", {"s": "a\nb", "new": [1]}), ("g", {})], think="none"),
    Golden("deepseek_v3", 'Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1, "s": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
           content="Ok.", calls=[("f", {"a": 1, "s": "```"}), ("g", {})]),
    Golden("deepseek_v31", 'hm</think>Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
           content="Ok.", reasoning="hm", calls=[("f", {"a": 1}), ("g", {})], think="deepseek_r1", inside=True),
    Golden("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>none<｜tool▁call▁end｜>', content='<｜tool▁call▁begin｜>f<｜tool▁sep｜>none<｜tool▁call▁end｜>'),
    Golden("deepseek_v31", '<｜tool▁call▁begin｜>' + "x" * 300 + '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}', content='<｜tool▁call▁begin｜>' + "x" * 300, calls=[("g", {})]),
    Golden("kimi_k2", 'Go.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>',
           content="Go.", calls=[("f", {"a": 1}), ("g", {})]),
    Golden("kimi_k2", '<|tool_call_begin|>f<|tool_call_end|>', content='<|tool_call_begin|>f<|tool_call_end|>'),
    Golden("step3", 'x<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f"><steptml:parameter name="a">3</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>', content="x", calls=[("f", {"a": 3})]),
    Golden("mistral", 'Let me.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', content="Let me.", calls=[("f", {"a": 1}), ("g", {})]),
    Golden("mistral", '[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"a": 1}', calls=[("f", {"a": 1})]),
    Golden("mistral", '[TOOL_CALLS]f{"a": 1}', calls=[("f", {"a": 1})]),
    Golden("mistral_v3", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g", "arguments": {}}]', calls=[("f", {"a": 1}), ("g", {})]),
    Golden("mistral", "[THINK]so[/THINK]yes", content="yes", reasoning="so", think="mistral"),
    Golden("gemma4", 'I will.<|tool_call>call:f{a:14,b:true,s:<|"|>x, "y"}<|"|>,o:{k:[1,<|"|>z<|"|>]}}<tool_call|>', content="I will.", calls=[("f", {"a": 14, "b": True, "s": 'x, "y"}', "o": {"k": [1, "z"]}})], think="gemma4"),
    Golden("gemma4", "<|channel>thought\nhm\n<channel|>yes", content="yes", reasoning="hm", think="gemma4"),
    Golden("functiongemma", "<start_function_call>call:f{s:<escape>Tokyo<escape>}<end_function_call><start_function_call>call:g{}<end_function_call>", calls=[("f", {"s": "Tokyo"}), ("g", {})]),
    Golden("cohere_command", '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>', reasoning="hm", calls=[("f", {"a": 1})], think="cohere_command"),
    Golden("cohere_command", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>", reasoning="hm", content="yes", think="cohere_command"),
    Golden("internlm", 'Sure.<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>', content="Sure.", calls=[("f", {"a": 1})]),
    Golden("phi4_mini", 'functools[{"name": "f", "arguments": {"a": 1}}]', calls=[("f", {"a": 1})]),
    Golden("phi4_mini", '<|tool_call|>[{"name": "g", "arguments": {}}]<|/tool_call|>', calls=[("g", {})]),
    Golden("nemotron", '<think>a</think><TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>', reasoning="a", calls=[("f", {"a": 1})], think="nemotron"),
    Golden("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', calls=[("f", {"a": 1})]),
    Golden("granite", "Here is my thought process: a. Here is my response: b", reasoning=" a. ", content=" b", think="granite"),
    Golden("olmo3", 'Now.\n<function_calls>\nf(s="it\'s", a=-2, b=True, o={"k": (1, None)})\ng()\n</function_calls>', content="Now.", calls=[("f", {"s": "it's", "a": -2, "b": True, "o": {"k": [1, None]}}), ("g", {})], think="olmo3"),
    Golden("lfm2", '<|tool_call_start|>[f(s=\'a "b"\\n\\u00e9\'), g()]<|tool_call_end|>tail', content="tail", calls=[("f", {"s": 'a "b"\né'}), ("g", {})]),
    Golden("llama4_pythonic", '[f(a=1, s="x, y)"), g()]', calls=[("f", {"a": 1, "s": "x, y)"}), ("g", {})]),
    Golden("llama4_pythonic", '<|python_start|>[f("pos", 5)]<|python_end|>', calls=[("f", {"s": "pos", "a": 5})]),
    Golden("llama4_pythonic", "[see(a=1)]", content="[see(a=1)]"),
    Golden("llama4_pythonic", "f(a=1)", content="f(a=1)"),
    Golden("llama4_pythonic", "[f(o=os.system('id'), a={1, 2})]", calls=[("f", {"o": "os.system('id')", "a": "{1, 2}"})]),
    Golden("ernie45", "think</think>\n\n<response>\nyes\n</response>\n", content="yes", reasoning="think", think="ernie45", inside=True),
    Golden("hunyuan_a13b", '<think>\na\n</think>\n<answer>\nb\n</answer>', content="b", reasoning="a", think="hunyuan"),
    Golden("none", '<think>\na\n</think>\n<answer>\nb\n</answer>', content="b", reasoning="a", think="hunyuan"),
    Golden("hermes", "a</think>b", content="<think>a</think>b", think="minimax_m2_append_think", inside=True),
    Golden("xlam", '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', calls=[("f", {"a": 1}), ("g", {})]),
    Golden("json", '{"tool": "f", "args": {"a": 1}}', calls=[("f", {"a": 1})]),
    Golden("gpt_oss", "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>Hello <|return|>", reasoning="I think.", content="Hello ", think="gpt_oss"),
    Golden("gpt_oss", '<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
           reasoning="A\nB", content="Look.", calls=[("f", {"a": 1})], think="gpt_oss"),
    Golden("gpt_oss", '<|start|>assistant to=functions.f<|channel|>commentary json<|message|> {"s": "<|end"}', calls=[("f", {"s": "<|end"})], think="gpt_oss"),
    Golden("gpt_oss", ' to=functions.g<|channel|>analysis<|message|><|call|>', calls=[("g", {})], think="gpt_oss"),
    Golden("gpt_oss", '{"plain": 1}', content='{"plain": 1}', think="gpt_oss"),
    Golden("inkling", '<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>Ok.<|end_message|><|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a": 1}}<|end_message|><|content_model_end_sampling|>',
           reasoning="hm", content="Ok.", calls=[("f", {"a": 1})], think="inkling"),
    Golden("inkling", 'f<|content_invoke_tool_json|>{"name": "f", "args": {"s": "<|end_"}}<|end_message|><|message_model|><|content_invoke_tool_json|>{"name": "g", "args": {}}<|end_message|>', calls=[("f", {"s": "<|end_"}), ("g", {})], think="inkling"),
    Golden("inkling", "<|content_thinking|>a<|end_message|><|message_model|><|content_thinking|>b<|end_message|><|message_model|><|content_text|>c<|content_model_end_sampling|>", reasoning="a\nb", content="c", think="inkling"),
    Golden("inkling", "No block at all.", content="No block at all.", think="inkling"),
    Golden("inkling", '{"plain": 1}', content='{"plain": 1}', think="inkling"),
    Golden("inkling", '<|content_invoke_tool_json|>[1]<|end_message|>', content="[1]", think="inkling"),
    Golden("minimax_m3", "<mm:think>hm</mm:think>So.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"f\">]<]minimax[>[<s>a <b>\n]<]minimax[>[</s>]<]minimax[>[<a>3]<]minimax[>[</a>\n]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name=\"g\">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
           reasoning="hm", content="So.", calls=[("f", {"s": "a <b>\n", "a": 3}), ("g", {})], think="minimax_m3"),
    Golden("minimax_m3", "</mm:think>Hi.", content="Hi.", think="minimax_m3"),
    Golden("minimax_m3", "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"f\">]<]minimax[>[<o>]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[<l>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>x]<]minimax[>[</item>]<]minimax[>[</l>]<]minimax[>[<t>1]<]minimax[>[</t>]<]minimax[>[<t>2]<]minimax[>[</t>]<]minimax[>[</o>]<]minimax[>[<any>]<]minimax[>[<item>5]<]minimax[>[</item>]<]minimax[>[</any>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
           calls=[("f", {"o": {"city": "Oslo", "l": [1, "x"], "t": [1, 2]}, "any": [5]})]),
    Golden("minimax_m3", "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"f\">]<]minimax[>[<o>]<]minimax[>[</o>]<]minimax[>[<any>note ]<]minimax[>[<k>1]<]minimax[>[</k>]<]minimax[>[</any>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
           calls=[("f", {"o": {}, "any": {"k": 1, "$text": "note"}})]),
    Golden("kimi_k3", 'hm<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="s" type="string"<|sep|>a "b" 1<|close|>argument<|sep|><|open|>argument key="a" type="number"<|sep|>5<|close|>argument<|sep|><|open|>argument key="new" type="string"<|sep|>7<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
           reasoning="hm", content="Ok.", calls=[("f", {"s": 'a "b" 1', "a": 5, "new": "7"}), ("g", {})], think="kimi_k3", inside=True),
    Golden("kimi_k3", "yes<|close|>response<|sep|><|close|>message<|sep|>", content="yes", think="kimi_k3"),
    Golden("solar_open2", "hm<|think:end|>Let me.<|tool_call:start|>f\n<|tool_arg:start|>s<|tool_arg:value|>a\nb<|tool_arg:end|>\n<|tool_arg:start|>b<|tool_arg:value|>false<|tool_arg:end|>\n<|tool_call:end|>\n<|tool_call:start|>g\n<|tool_call:end|>",
           reasoning="hm", content="Let me.", calls=[("f", {"s": "a\nb", "b": False}), ("g", {})], think="solar_open2", inside=True),
    Golden("minicpm5", '<think>\nhm\n</think>\n\n<function name="f"><param name="s"><![CDATA[1 < 2 </param> & "x"\n]]></param><param name="a">3</param></function><function name="g"></function>',
           reasoning="hm", calls=[("f", {"s": '1 < 2 </param> & "x"\n', "a": 3}), ("g", {})]),
    Golden("minicpm5", '<function name="f"><param name="o"><![CDATA[{"k": [1]}]]></param></function>', calls=[("f", {"o": {"k": [1]}})]),
    Golden("hy_v3", "hm</think>On it.<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n<tool_call>g<tool_sep></tool_call>\n</tool_calls>",
           reasoning="hm", content="On it.", calls=[("f", {"s": "x", "a": 5}), ("g", {})], think="hy_v3", inside=True),
    Golden("hy_v3_opensource", "<think:opensource>hm</think:opensource><tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>a</arg_key:opensource>\n<arg_value:opensource>5</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
           reasoning="hm", calls=[("f", {"a": 5})], think="hy_v3_opensource"),
    Golden("poolside_v1", "hm</think><tool_call>f<arg_key>s</arg_key><arg_value>  def f():\n    pass\n</arg_value><arg_key>a</arg_key><arg_value>5</arg_value></tool_call>", reasoning="hm", calls=[("f", {"s": "  def f():\n    pass\n", "a": 5})], think="poolside_v1", inside=True),
    Golden("gigachat3", 'Wait.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}', content="Wait.", calls=[("f", {"a": 1})]),
    Golden("gigachat31", 'Wait.<|function_call|>{"name": "f", "arguments": {"a": 1}}', content="Wait.", calls=[("f", {"a": 1})]),
    Golden("gigachat3", "a function call is made", content="a function call is made"),
    Golden("apertus", '<|inner_prefix|>hm<|inner_suffix|><|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>', reasoning="hm", calls=[("f", {"a": 1}), ("g", {})], think="apertus"),
    Golden("apertus", '<|inner_prefix|>hm<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|><|inner_suffix|>So.', reasoning="hm", content="So.", calls=[("f", {"a": 1})], think="apertus"),
    Golden("apertus", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>', content='<|tools_prefix|>[{"f": 1}]<|tools_suffix|>'),
    Golden("kimi_k2", 'hm<|tool_calls_section_begin|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>', reasoning="hm", calls=[("g", {})], think="kimi_k2", inside=True),
    Golden("granite-20b-fc", '<function_call>{"name": "f", "arguments": {"a": 1}}', calls=[("f", {"a": 1})]),
]  # fmt: skip
