"""The formats that write calls as in a programming language."""

from __future__ import annotations

from headrace.front.text.parsing.call_syntax import CallSyntax
from headrace.front.text.parsing.rows import ToolFamily
from headrace.front.text.parsing.writing import CallWriting

GEMMA4 = ToolFamily(
    name="gemma4",
    marks=("<|tool_call>",),
    models=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    grammar=CallSyntax(
        open="<|tool_call>",
        close="<tool_call|>",
        lead="call:",
        brackets="{}",
        assign=":",
        quote='<|"|>',
    ),
    writing=CallWriting(
        call_begin="<|tool_call>call:{name}{",
        call_end="}<tool_call|>",
        arguments="bare",
        quote='<|"|>',
    ),
)

FUNCTIONGEMMA = ToolFamily(
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
)

OLMO3 = ToolFamily(
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
)

LFM2 = ToolFamily(
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
)

LLAMA4_PYTHONIC = ToolFamily(
    name="llama4_pythonic",
    aliases=("pythonic",),
    marks=("[func_name1(",),
    models=("llama4", "llama4_text"),
    grammar=CallSyntax(prefix="<|python_start|>", close="<|python_end|>"),
    writing=CallWriting(
        begin="[", call_begin="{name}(", call_end=")", between=", ", end="]", arguments="python"
    ),
)
