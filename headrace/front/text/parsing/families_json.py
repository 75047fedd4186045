"""The formats whose arguments are a JSON object: in tags, bare, behind a name, in messages."""

from __future__ import annotations

from headrace.front.text.parsing.blocks import BlockTags
from headrace.front.text.parsing.harmony import HarmonyTags
from headrace.front.text.parsing.json_calls import JsonKeys
from headrace.front.text.parsing.named_json import NamedTags
from headrace.front.text.parsing.rows import BareTags, ToolFamily, row
from headrace.front.text.parsing.tagged_json import JsonTags
from headrace.front.text.parsing.writing import CallWriting

INKLING_BLOCKS = BlockTags(
    start="<|message_model|>",
    thought="<|content_thinking|>",
    text="<|content_text|>",
    call="<|content_invoke_tool_json|>",
    ends=("<|end_message|>", "<|content_model_end_sampling|>"),
    keys=JsonKeys(arguments=("args", "arguments")),
)
# one release writes a role for a call, the next a token of its own
_GIGACHAT = JsonTags(
    open="<|message_sep|>\n\nfunction call<|role_sep|>\n",
    also=("function call<|role_sep|>\n", "<|function_call|>"),
)


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


GPT_OSS = ToolFamily(
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
)

DEEPSEEK_V3 = row(
    "deepseek_v3",
    _deepseek("function", "\n```json\n", "\n```"),
    marks=("<｜tool▁call▁begin｜>", "```json"),
)

DEEPSEEK_V31 = row(
    "deepseek_v31", _deepseek("", "", ""), marks=("<｜tool▁call▁begin｜>",), models=("deepseek_v3",)
)

KIMI_K2 = ToolFamily(
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
)

MISTRAL = ToolFamily(
    name="mistral",
    marks=("[TOOL_CALLS]", "[ARGS]"),
    models=("mistral3", "ministral3", "mistral4"),
    ids="short",
    grammar=NamedTags(
        open="[TOOL_CALLS]", name_end=("[ARGS]",), id_open="[CALL_ID]", bare=True, keys=JsonKeys()
    ),
    writing=CallWriting(call_begin="[TOOL_CALLS]{name}[ARGS]", call_end=""),
)

MISTRAL_V3 = ToolFamily(
    name="mistral_v3",
    marks=("[TOOL_CALLS]",),
    models=("mistral", "mixtral"),
    ids="short",
    grammar=NamedTags(
        open="[TOOL_CALLS]", name_end=("[ARGS]",), id_open="[CALL_ID]", bare=True, keys=JsonKeys()
    ),
    writing=_listed("[TOOL_CALLS]", ""),
)

COHERE_COMMAND = ToolFamily(
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
)

INTERNLM = ToolFamily(
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
)

PHI4_MINI = ToolFamily(
    name="phi4_mini",
    aliases=("phi4_mini_json",),
    marks=("<|tool|>", "<|/tool|>"),
    grammar=JsonTags(open="<|tool_call|>", close="<|/tool_call|>", also=("functools",)),
    writing=_listed("<|tool_call|>", "<|/tool_call|>"),
)

NEMOTRON = ToolFamily(
    name="nemotron",
    aliases=("nemotron_json",),
    marks=("<TOOLCALL>",),
    grammar=JsonTags(open="<TOOLCALL>", close="</TOOLCALL>"),
    writing=_listed("<TOOLCALL>", "</TOOLCALL>"),
)

LONGCAT = ToolFamily(
    name="longcat",
    marks=("<longcat_tool_call>",),
    grammar=JsonTags(open="<longcat_tool_call>", close="</longcat_tool_call>"),
    writing=_tagged("<longcat_tool_call>", "</longcat_tool_call>"),
)

GRANITE = ToolFamily(
    name="granite",
    aliases=("granite3",),
    marks=("<|tool_call|>",),
    models=("granite", "granitemoe"),
    grammar=JsonTags(open="<|tool_call|>", also=("<tool_call>",)),
    writing=_listed("<|tool_call|>", ""),
)

GRANITE_20B_FC = ToolFamily(
    name="granite_20b_fc",
    aliases=("granite-20b-fc",),
    marks=("<function_call>",),
    grammar=JsonTags(open="<function_call>"),
    writing=_tagged("<function_call>", "", break_before=""),
)

JAMBA = ToolFamily(
    name="jamba",
    aliases=("hunyuan", "hunyuan_a13b"),
    marks=("<tool_calls>",),
    models=("jamba", "hunyuan_v1_moe", "hunyuan_v1_dense"),
    grammar=JsonTags(open="<tool_calls>", close="</tool_calls>"),
    writing=_listed("<tool_calls>", "</tool_calls>"),
)

ERNIE45 = ToolFamily(
    name="ernie45",
    marks=("<tool_call>", "<response>"),
    models=("ernie4_5", "ernie4_5_moe"),
    grammar=JsonTags(open="<tool_call>", close="</tool_call>", drop=("<response>", "</response>")),
    writing=_tagged("<tool_call>", "</tool_call>"),
)

HERMES = ToolFamily(
    name="hermes",
    aliases=("qwen", "qwen25", "qwen3", "granite4"),
    marks=("<tool_call>",),
    models=("qwen2", "qwen3", "qwen3_moe", "granitemoehybrid"),
    grammar=JsonTags(open="<tool_call>", close="</tool_call>"),
    writing=_tagged("<tool_call>", "</tool_call>"),
)

LLAMA3_JSON = ToolFamily(
    name="llama3_json",
    aliases=("llama4_json",),
    marks=('"parameters": dictionary of argument name',),
    models=("llama", "mllama"),
    grammar=BareTags(prefix="<|python_tag|>"),
    writing=CallWriting(call_begin='{"name": "{name}", "parameters": ', call_end="}", between="; "),
)

XLAM = ToolFamily(name="xlam", grammar=BareTags(), writing=_listed("", ""))

JSON = ToolFamily(
    name="json",
    aliases=("generic",),
    grammar=BareTags(
        keys=JsonKeys(
            name=("name", "tool_name", "tool", "function"),
            arguments=("arguments", "parameters", "args", "input", "tool_input"),
        )
    ),
    writing=_listed("", ""),
)

INKLING = ToolFamily(
    name="inkling",
    marks=("<|content_invoke_tool_json|>",),
    models=("inkling", "inkling2", "inkling_mm_model"),
    grammar=INKLING_BLOCKS,
    writing=CallWriting(
        call_begin='<|content_invoke_tool_json|>{"name": "{name}", "args": ',
        call_end="}<|end_message|>",
        between="<|message_model|>",
    ),
)

GIGACHAT3 = ToolFamily(
    name="gigachat3",
    marks=("function call<|role_sep|>",),
    grammar=_GIGACHAT,
    writing=_tagged("<|message_sep|>\n\nfunction call<|role_sep|>\n", "", break_before=""),
)

GIGACHAT31 = ToolFamily(
    name="gigachat31",
    aliases=("gigachat3",),
    marks=("<|function_call|>",),
    grammar=_GIGACHAT,
    writing=_tagged("<|function_call|>", "", break_before=""),
)

APERTUS = ToolFamily(
    name="apertus",
    marks=("<|tools_prefix|>",),
    models=("apertus",),
    grammar=JsonTags(open="<|tools_prefix|>", close="<|tools_suffix|>", keys=JsonKeys(named=True)),
    writing=CallWriting(
        begin="<|tools_prefix|>[",
        call_begin='{"{name}": ',
        call_end="}",
        between=", ",
        end="]<|tools_suffix|>",
    ),
)
