"""The formats with a tag per parameter."""

from __future__ import annotations

from headrace.front.text.parsing.nested_tags import NestedTags
from headrace.front.text.parsing.rows import ToolFamily, row
from headrace.front.text.parsing.writing import CallWriting
from headrace.front.text.parsing.xml_parameters import ParameterTags


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
        key_end_json=('" string="false">',),
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


def _hunyuan(suffix: str) -> tuple[ParameterTags, CallWriting]:
    begin, end = "<{}" + suffix + ">", "</{}" + suffix + ">"
    section, call = "tool_calls", "tool_call"
    tags = ParameterTags(
        open=begin.format(call),
        close=end.format(call),
        name_open="",
        name_end=(begin.format("tool_sep"),),
        function_close="",
        key_open=begin.format("arg_key"),
        key_end=end.format("arg_key"),
        value_open=begin.format("arg_value"),
        value_close=end.format("arg_value"),
        drop=(begin.format(section), end.format(section)),
    )
    writing = CallWriting(
        begin=begin.format(section) + "\n",
        call_begin=tags.open + "{name}" + tags.name_end[0] + "\n",
        call_end=tags.close + "\n",
        end=end.format(section),
        arguments="tags",
        parameter=f"{tags.key_open}{{key}}{tags.key_end}\n"
        f"{tags.value_open}{{value}}{tags.value_close}\n",
    )
    return tags, writing


def _kimi_k3() -> tuple[ParameterTags, CallWriting]:
    begin, end, stop = "<|open|>", "<|close|>", "<|sep|>"
    types = ("number", "integer", "boolean", "null", "object", "array")
    sections = ("tools", "response")
    tags = ParameterTags(
        open=begin + 'call tool="',
        close=f"{end}call{stop}",
        name_open="",
        name_end=('"',),
        name_rest=stop,
        function_close="",
        key_open=begin + 'argument key="',
        key_end=f'"{stop}',
        key_end_text=f'" type="string"{stop}',
        key_end_json=tuple(f'" type="{name}"{stop}' for name in types),
        value_close=f"{end}argument{stop}",
        drop=(
            *(f"{begin}{name}{stop}" for name in sections),
            *(f"{end}{name}{stop}" for name in (*sections, "message")),
        ),
    )
    writing = CallWriting(
        begin=f"{begin}tools{stop}",
        call_begin=begin + 'call tool="{name}" index="{n}"' + stop,
        call_end=f"{end}call{stop}",
        end=f"{end}tools{stop}",
        arguments="tags",
        parameter=begin
        + 'argument key="{key}" type="{type}"'
        + stop
        + "{value}"
        + tags.value_close,
    )
    return tags, writing


def _minimax_m3() -> tuple[NestedTags, CallWriting]:
    mark = "]<]minimax[>["
    tags = NestedTags(
        mark=mark,
        section_open=mark + "<tool_call>",
        section_close=mark + "</tool_call>",
        call_open=mark + '<invoke name="',
    )
    writing = CallWriting(
        begin=tags.section_open + "\n",
        call_begin=tags.call_open + '{name}">',
        call_end=mark + "</invoke>\n",
        end=tags.section_close,
        arguments="tags",
        parameter=mark + "<{key}>{value}" + mark + "</{key}>",
    )
    return tags, writing


SEED_OSS = row(
    "seed_oss", _function_tags("<seed:tool_call>", "</seed:tool_call>"), marks=("<seed:tool_call>",)
)

MINIMAX_M2 = row(
    "minimax_m2",
    _invoke_tags("<minimax:tool_call>", "</minimax:tool_call>"),
    marks=("<minimax:tool_call>",),
)

DEEPSEEK_V4 = row(
    "deepseek_v4", _dsml("tool_calls"), marks=("｜DSML｜", "tool_calls>"), models=("deepseek_v4",)
)

DEEPSEEK_V32 = row(
    "deepseek_v32", _dsml("function_calls"), marks=("｜DSML｜",), models=("deepseek_v32",)
)

STEP3 = ToolFamily(
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
)

QWEN3_CODER = row(
    "qwen3_coder",
    _function_tags("<tool_call>", "</tool_call>"),
    aliases=("qwen3_xml", "step3p5", "nemotron_v3", "mimo"),
    marks=("<tool_call>", "<function=", "<parameter="),
    models=("step3p5", "qwen3_5", "qwen3_5_moe", "nemotron_h"),
)

GLM47 = row(
    "glm47",
    _glm(""),
    marks=("<tool_call>", "<arg_key>", "{function-name}<arg_key>"),
    models=("glm4_moe_lite",),
)

GLM45 = row(
    "glm45", _glm("\n"), marks=("<tool_call>", "<arg_key>", "<arg_value>"), models=("glm4_moe",)
)

POOLSIDE_V1 = row(
    "poolside_v1",
    _glm(""),
    marks=("<tool_call>", "<arg_key>"),
    models=("laguna",),
    only_models=True,
)

HY_V3 = row("hy_v3", _hunyuan(""), marks=("<tool_sep>", "<arg_key>"), models=("hy_v3",))

# the open checkpoint has a word of its own in every tag
HY_V3_OPENSOURCE = row(
    "hy_v3_opensource",
    _hunyuan(":opensource"),
    marks=("tool_sep", ":opensource"),
    aliases=("hy_v3",),
)

KIMI_K3 = row("kimi_k3", _kimi_k3(), marks=("<|open|>", "<|sep|>"), models=("kimi_k3",))

MINIMAX_M3 = row(
    "minimax_m3", _minimax_m3(), marks=("]<]minimax[>[",), models=("minimax_m3", "minimax_m3_vl")
)

SOLAR_OPEN2 = ToolFamily(
    name="solar_open2",
    marks=("<|tool_call:start|>",),
    models=("solar_open2",),
    grammar=ParameterTags(
        open="<|tool_call:start|>",
        close="<|tool_call:end|>",
        name_open="",
        name_end=("\n",),
        function_close="",
        key_open="<|tool_arg:start|>",
        key_end="<|tool_arg:value|>",
        value_close="<|tool_arg:end|>",
    ),
    writing=CallWriting(
        call_begin="<|tool_call:start|>{name}\n",
        call_end="<|tool_call:end|>",
        between="\n",
        arguments="tags",
        parameter="<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>\n",
    ),
)

MINICPM5 = ToolFamily(
    name="minicpm5",
    marks=("<function name=", "<param name="),
    grammar=ParameterTags(
        open='<function name="',
        close="</function>",
        name_open="",
        name_end=('">',),
        function_close="",
        key_open='<param name="',
        key_end='">',
        value_close="</param>",
        verbatim=("<![CDATA[", "]]>"),
    ),
    writing=CallWriting(
        call_begin='<function name="{name}">',
        call_end="</function>",
        between="\n",
        arguments="tags",
        parameter='<param name="{key}">{value}</param>',
    ),
)
