"""The formats of tool calls, one row each: how it is read, how it is written, how a checkpoint shows it.

`marks` are texts that only templates of this format contain; rows stand from special to general. A row without marks
is taken by its name only. `models` are values of model_type, for checkpoints whose template does not show the format.
The formats are those of the families' own chat templates.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.front.text.parsing.call_syntax import CallSyntax
from headrace.front.text.parsing.harmony import HarmonyTags
from headrace.front.text.parsing.json_calls import JsonKeys
from headrace.front.text.parsing.named_json import NamedTags
from headrace.front.text.parsing.tagged_json import JsonTags
from headrace.front.text.parsing.writing import CallWriting
from headrace.front.text.parsing.xml_parameters import ParameterTags


class BareTags(msgspec.Struct, frozen=True, kw_only=True):
    """The bare JSON grammar: an optional tag before it, and the keys."""

    prefix: str = ""
    keys: JsonKeys = JsonKeys()


ToolGrammar = JsonTags | BareTags | ParameterTags | NamedTags | CallSyntax | HarmonyTags


class ToolFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One format of tool calls. `ids`: what the template accepts as a call's id (short: nine letters or digits)."""

    name: str
    aliases: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    grammar: ToolGrammar
    writing: CallWriting
    ids: Literal["any", "short"] = "any"


def _tagged(
    begin: str,
    end: str,
    *,
    break_before: str = "\n",
    name: str = "name",
    arguments: str = "arguments",
) -> CallWriting:
    return CallWriting(
        call_begin=begin + break_before + f'{{"{name}": "{{name}}", "{arguments}": ',
        call_end="}" + break_before + end,
        between="\n",
    )


def _listed(
    begin: str, end: str, *, name: str = "name", arguments: str = "arguments"
) -> CallWriting:
    return CallWriting(
        begin=begin + "[",
        call_begin=f'{{"{name}": "{{name}}", "{arguments}": ',
        call_end="}",
        between=", ",
        end="]" + end,
    )


def _function_tags(open: str, close: str) -> tuple[ParameterTags, CallWriting]:
    tags = ParameterTags(
        open=open,
        close=close,
        name_open="<function=",
        name_end=(">",),
        function_close="</function>",
        key_open="<parameter=",
        key_end=">",
        value_close="</parameter>",
        breaks=True,
    )
    writing = CallWriting(
        call_begin=open + "\n<function={name}>\n",
        call_end="</function>\n" + close,
        between="\n",
        arguments="tags",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
    )
    return tags, writing


def _invoke_tags(open: str, close: str) -> tuple[ParameterTags, CallWriting]:
    tags = ParameterTags(
        open=open,
        close=close,
        name_open='<invoke name="',
        name_end=('">',),
        function_close="</invoke>",
        key_open='<parameter name="',
        key_end='">',
        value_close="</parameter>",
    )
    writing = CallWriting(
        begin=open + "\n",
        call_begin='<invoke name="{name}">\n',
        call_end="</invoke>\n",
        end=close,
        arguments="tags",
        parameter='<parameter name="{key}">{value}</parameter>\n',
    )
    return tags, writing


def _dsml(section: str) -> tuple[ParameterTags, CallWriting]:
    begin, end = "<｜DSML｜", "</｜DSML｜"
    tags = ParameterTags(
        open=f"{begin}{section}>",
        close=f"{end}{section}>",
        name_open=begin + 'invoke name="',
        name_end=('">',),
        function_close=end + "invoke>",
        key_open=begin + 'parameter name="',
        key_end='">',
        key_end_text='" string="true">',
        key_end_json='" string="false">',
        value_close=end + "parameter>",
    )
    writing = CallWriting(
        begin=f"{begin}{section}>\n",
        call_begin=begin + 'invoke name="{name}">\n',
        call_end=end + "invoke>\n",
        end=f"{end}{section}>",
        arguments="tags",
        parameter=begin + 'parameter name="{key}" string="false">{value}' + end + "parameter>\n",
        text_parameter=begin
        + 'parameter name="{key}" string="true">{value}'
        + end
        + "parameter>\n",
    )
    return tags, writing


def _deepseek(lead: str, before: str, after: str) -> tuple[NamedTags, CallWriting]:
    section, call = (
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    )
    separator = "<｜tool▁sep｜>"
    tags = NamedTags(
        open=call[0],
        lead=lead + separator if lead else "",
        name_end=(before.strip() or separator,),
        fence=after.strip(),
        close=call[1],
        drop=section,
    )
    writing = CallWriting(
        begin=section[0],
        call_begin=call[0]
        + (lead + separator + "{name}" + before if lead else "{name}" + separator),
        call_end=after + call[1],
        between="\n" if lead else "",
        end=section[1],
    )
    return tags, writing


def _glm(end_of_name: str) -> tuple[ParameterTags, CallWriting]:
    tags = ParameterTags(
        open="<tool_call>",
        close="</tool_call>",
        name_open="",
        name_end=("\n",),
        function_close="",
        key_open="<arg_key>",
        key_end="</arg_key>",
        value_open="<arg_value>",
        value_close="</arg_value>",
    )
    writing = CallWriting(
        call_begin="<tool_call>{name}" + end_of_name,
        call_end="</tool_call>",
        between="\n",
        arguments="tags",
        parameter="<arg_key>{key}</arg_key>"
        + end_of_name
        + "<arg_value>{value}</arg_value>"
        + end_of_name,
    )
    return tags, writing


def _row(
    name: str,
    read: tuple[ToolGrammar, CallWriting],
    *,
    marks: tuple[str, ...],
    models: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> ToolFamily:
    grammar, writing = read
    return ToolFamily(
        name=name, aliases=aliases, marks=marks, models=models, grammar=grammar, writing=writing
    )


_PYTHON_LIST = CallWriting(
    begin="[", call_begin="{name}(", call_end=")", between=", ", end="]", arguments="python"
)

TOOL_FAMILIES: tuple[ToolFamily, ...] = (
    ToolFamily(
        name="gpt_oss",
        aliases=("openai", "harmony"),
        marks=("<|channel|>", "<|message|>"),
        models=("gpt_oss",),
        grammar=HarmonyTags(),
        writing=CallWriting(
            call_begin="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            call_end="<|call|>",
            between="<|start|>assistant",
        ),
    ),
    _row("seed_oss", _function_tags("<seed:tool_call>", "</seed:tool_call>"), marks=("<seed:tool_call>",)),
    _row("minimax_m2", _invoke_tags("<minimax:tool_call>", "</minimax:tool_call>"), marks=("<minimax:tool_call>",)),
    _row("deepseek_v4", _dsml("tool_calls"), marks=("｜DSML｜", "tool_calls>"), models=("deepseek_v4",)),
    _row("deepseek_v32", _dsml("function_calls"), marks=("｜DSML｜",), models=("deepseek_v32",)),
    _row("deepseek_v3", _deepseek("function", "\n```json\n", "\n```"), marks=("<｜tool▁call▁begin｜>", "```json")),
    _row("deepseek_v31", _deepseek("", "", ""), marks=("<｜tool▁call▁begin｜>",), models=("deepseek_v3",)),
    ToolFamily(
        name="kimi_k2",
        marks=("<|tool_calls_section_begin|>",),
        models=("kimi_k2",),
        grammar=NamedTags(
            open="<|tool_call_begin|>",
            name_end=("<|tool_call_argument_begin|>",),
            counted=True,
            close="<|tool_call_end|>",
            drop=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
        writing=CallWriting(
            begin="<|tool_calls_section_begin|>",
            call_begin="<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>",
            call_end="<|tool_call_end|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    ToolFamily(
        name="step3",
        marks=("<steptml:invoke",),
        models=("step3_vl", "step3_text"),
        grammar=ParameterTags(
            open="<｜tool_call_begin｜>",
            close="<｜tool_call_end｜>",
            name_open='function<｜tool_sep｜><steptml:invoke name="',
            name_end=('">',),
            function_close="</steptml:invoke>",
            key_open='<steptml:parameter name="',
            key_end='">',
            value_close="</steptml:parameter>",
            drop=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        ),
        writing=CallWriting(
            begin="<｜tool_calls_begin｜>",
            call_begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
            call_end="</steptml:invoke><｜tool_call_end｜>",
            between="\n",
            end="<｜tool_calls_end｜>",
            arguments="tags",
            parameter='<steptml:parameter name="{key}">{value}</steptml:parameter>',
        ),
    ),
    ToolFamily(
        name="mistral",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        models=("mistral3", "ministral3", "mistral4"),
        ids="short",
        grammar=NamedTags(
            open="[TOOL_CALLS]", name_end=("[ARGS]",), id_open="[CALL_ID]", bare=True, keys=JsonKeys()
        ),
        writing=CallWriting(call_begin="[TOOL_CALLS]{name}[ARGS]", call_end=""),
    ),
    ToolFamily(
        name="mistral_v3",
        marks=("[TOOL_CALLS]",),
        models=("mistral", "mixtral"),
        ids="short",
        grammar=NamedTags(
            open="[TOOL_CALLS]", name_end=("[ARGS]",), id_open="[CALL_ID]", bare=True, keys=JsonKeys()
        ),
        writing=_listed("[TOOL_CALLS]", ""),
    ),
    ToolFamily(
        name="gemma4",
        marks=("<|tool_call>",),
        models=("gemma4", "gemma4_text"),
        grammar=CallSyntax(
            open="<|tool_call>", close="<tool_call|>", lead="call:", brackets="{}", assign=":", quote='<|"|>'
        ),
        writing=CallWriting(
            call_begin="<|tool_call>call:{name}{", call_end="}<tool_call|>", arguments="bare", quote='<|"|>'
        ),
    ),
    ToolFamily(
        name="functiongemma",
        marks=("<start_function_call>",),
        grammar=CallSyntax(
            open="<start_function_call>",
            close="<end_function_call>",
            lead="call:",
            brackets="{}",
            assign=":",
            quote="<escape>",
        ),
        writing=CallWriting(
            call_begin="<start_function_call>call:{name}{",
            call_end="}<end_function_call>",
            arguments="bare",
            quote="<escape>",
        ),
    ),
    ToolFamily(
        name="cohere_command",
        aliases=("cohere_command3", "cohere_command4"),
        marks=("<|START_ACTION|>",),
        models=("cohere", "cohere2", "cohere2_moe"),
        grammar=JsonTags(
            open="<|START_ACTION|>",
            close="<|END_ACTION|>",
            keys=JsonKeys(name=("tool_name", "name"), arguments=("parameters", "arguments")),
            drop=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        writing=CallWriting(
            begin="<|START_ACTION|>[\n",
            call_begin='{"tool_call_id": "{n}", "tool_name": "{name}", "parameters": ',
            call_end="}",
            between=",\n",
            end="\n]<|END_ACTION|>",
        ),
    ),
    ToolFamily(
        name="internlm",
        aliases=("internlm2",),
        marks=("<|action_start|>",),
        models=("internlm2",),
        grammar=JsonTags(
            open="<|action_start|><|plugin|>",
            close="<|action_end|>",
            keys=JsonKeys(arguments=("parameters", "arguments")),
        ),
        writing=_tagged("<|action_start|><|plugin|>", "<|action_end|>", arguments="parameters"),
    ),
    ToolFamily(
        name="phi4_mini",
        aliases=("phi4_mini_json",),
        marks=("<|tool|>", "<|/tool|>"),
        grammar=JsonTags(open="<|tool_call|>", close="<|/tool_call|>", also=("functools",)),
        writing=_listed("<|tool_call|>", "<|/tool_call|>"),
    ),
    ToolFamily(
        name="nemotron",
        aliases=("nemotron_json",),
        marks=("<TOOLCALL>",),
        grammar=JsonTags(open="<TOOLCALL>", close="</TOOLCALL>"),
        writing=_listed("<TOOLCALL>", "</TOOLCALL>"),
    ),
    ToolFamily(
        name="longcat",
        marks=("<longcat_tool_call>",),
        grammar=JsonTags(open="<longcat_tool_call>", close="</longcat_tool_call>"),
        writing=_tagged("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
    ToolFamily(
        name="granite",
        aliases=("granite3",),
        marks=("<|tool_call|>",),
        models=("granite", "granitemoe"),
        grammar=JsonTags(open="<|tool_call|>", also=("<tool_call>",)),
        writing=_listed("<|tool_call|>", ""),
    ),
    ToolFamily(
        name="granite_20b_fc",
        marks=("<function_call>",),
        grammar=JsonTags(open="<function_call>"),
        writing=_tagged("<function_call>", "", break_before=""),
    ),
    ToolFamily(
        name="olmo3",
        marks=("<function_calls>",),
        models=("olmo3",),
        grammar=CallSyntax(open="<function_calls>", close="</function_calls>"),
        writing=CallWriting(
            begin="<function_calls>\n",
            call_begin="{name}(",
            call_end=")",
            between="\n",
            end="\n</function_calls>",
            arguments="python",
        ),
    ),
    ToolFamily(
        name="lfm2",
        marks=("<|tool_call_start|>",),
        models=("lfm2", "lfm2_moe"),
        grammar=CallSyntax(open="<|tool_call_start|>", close="<|tool_call_end|>"),
        writing=CallWriting(
            begin="<|tool_call_start|>[",
            call_begin="{name}(",
            call_end=")",
            between=", ",
            end="]<|tool_call_end|>",
            arguments="python",
        ),
    ),
    _row(
        "qwen3_coder",
        _function_tags("<tool_call>", "</tool_call>"),
        aliases=("qwen3_xml", "step3p5", "nemotron_v3", "mimo"),
        marks=("<tool_call>", "<function=", "<parameter="),
        models=("step3p5", "qwen3_5", "qwen3_5_moe", "nemotron_h"),
    ),
    _row("glm47", _glm(""), marks=("<tool_call>", "<arg_key>", "{function-name}<arg_key>"), models=("glm4_moe_lite",)),
    _row("glm45", _glm("\n"), marks=("<tool_call>", "<arg_key>", "<arg_value>"), models=("glm4_moe",)),
    ToolFamily(
        name="jamba",
        aliases=("hunyuan", "hunyuan_a13b"),
        marks=("<tool_calls>",),
        models=("jamba", "hunyuan_v1_moe", "hunyuan_v1_dense"),
        grammar=JsonTags(open="<tool_calls>", close="</tool_calls>"),
        writing=_listed("<tool_calls>", "</tool_calls>"),
    ),
    ToolFamily(
        name="ernie45",
        marks=("<tool_call>", "<response>"),
        models=("ernie4_5", "ernie4_5_moe"),
        grammar=JsonTags(
            open="<tool_call>", close="</tool_call>", drop=("<response>", "</response>")
        ),
        writing=_tagged("<tool_call>", "</tool_call>"),
    ),
    ToolFamily(
        name="hermes",
        aliases=("qwen", "qwen25", "qwen3", "granite4"),
        marks=("<tool_call>",),
        models=("qwen2", "qwen3", "qwen3_moe", "granitemoehybrid"),
        grammar=JsonTags(open="<tool_call>", close="</tool_call>"),
        writing=_tagged("<tool_call>", "</tool_call>"),
    ),
    ToolFamily(
        name="llama4_pythonic",
        aliases=("pythonic",),
        marks=("[func_name1(",),
        models=("llama4", "llama4_text"),
        grammar=CallSyntax(prefix="<|python_start|>", close="<|python_end|>"),
        writing=_PYTHON_LIST,
    ),
    ToolFamily(
        name="llama3_json",
        aliases=("llama4_json",),
        marks=('"parameters": dictionary of argument name',),
        models=("llama", "mllama"),
        grammar=BareTags(prefix="<|python_tag|>"),
        writing=CallWriting(
            call_begin='{"name": "{name}", "parameters": ', call_end="}", between="; "
        ),
    ),
    ToolFamily(name="xlam", grammar=BareTags(), writing=_listed("", "")),
    ToolFamily(
        name="json",
        aliases=("generic",),
        grammar=BareTags(
            keys=JsonKeys(
                name=("name", "tool_name", "tool", "function"),
                arguments=("arguments", "parameters", "args", "input", "tool_input"),
            )
        ),
        writing=_listed("", ""),
    ),
)  # fmt: skip
