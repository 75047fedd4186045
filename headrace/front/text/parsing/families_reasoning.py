"""The formats of reasoning, one row each, from special to general; `marks` and `models` as in
rows.py."""

from __future__ import annotations

import msgspec

from headrace.front.text.parsing.blocks import BlockTags
from headrace.front.text.parsing.families_json import INKLING_BLOCKS
from headrace.front.text.parsing.harmony import HarmonyTags


class ReasoningTags(msgspec.Struct, frozen=True, kw_only=True):
    """A family's tags. `always`: the answer begins inside, unless the prompt has closed the tag
    already. `kept`: the reasoning stays in the content, tags included. `frame`: tags that enclose
    the answer itself. `until`: what ends the reasoning without `close`, and is read as what follows
    it. `answer`: what the answer begins with. `messages`: the whole answer is a row of messages;
    `open` and `close` then begin its reasoning and its final message."""

    open: str
    close: str
    always: bool = False
    kept: bool = False
    frame: tuple[str, ...] = ()
    until: tuple[str, ...] = ()
    answer: str = ""
    messages: HarmonyTags | BlockTags | None = None


class ReasoningFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One format of reasoning."""

    name: str
    aliases: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    only_models: bool = False
    tags: ReasoningTags


_THINK = ReasoningTags(open="<think>", close="</think>")
_ALWAYS_THINK = ReasoningTags(open="<think>", close="</think>", always=True)

REASONING_FAMILIES: tuple[ReasoningFamily, ...] = (
    ReasoningFamily(
        name="gpt_oss",
        aliases=("openai_gptoss", "harmony"),
        marks=("<|channel|>", "<|message|>"),
        models=("gpt_oss",),
        tags=ReasoningTags(
            open="<|channel|>analysis<|message|>",
            close="<|channel|>final<|message|>",
            answer="<|channel|>final<|message|>",
            messages=HarmonyTags(),
        ),
    ),
    ReasoningFamily(
        name="inkling",
        marks=("<|content_thinking|>",),
        models=("inkling", "inkling2", "inkling_mm_model"),
        tags=ReasoningTags(
            open="<|content_thinking|>",
            close="<|content_text|>",
            answer="<|content_text|>",
            messages=INKLING_BLOCKS,
        ),
    ),
    ReasoningFamily(
        name="kimi_k3",
        marks=("<|open|>", "<|sep|>"),
        models=("kimi_k3",),
        tags=ReasoningTags(
            open="<|open|>think<|sep|>",
            close="<|close|>think<|sep|>",
            answer="<|open|>response<|sep|>",
            frame=(
                "<|open|>response<|sep|>",
                "<|close|>response<|sep|>",
                "<|close|>message<|sep|>",
            ),
        ),
    ),
    ReasoningFamily(
        name="minimax_m3",
        marks=("<mm:think>",),
        models=("minimax_m3", "minimax_m3_vl"),
        # a model that may choose and does not think writes the closing tag alone
        tags=ReasoningTags(open="<mm:think>", close="</mm:think>", frame=("</mm:think>",)),
    ),
    ReasoningFamily(
        name="solar_open2",
        marks=("<|think:start|>",),
        models=("solar_open2",),
        tags=ReasoningTags(open="<|think:start|>", close="<|think:end|>"),
    ),
    ReasoningFamily(
        name="apertus",
        marks=("<|inner_prefix|>",),
        models=("apertus",),
        # calls may stand within the thoughts
        tags=ReasoningTags(
            open="<|inner_prefix|>",
            close="<|inner_suffix|>",
            until=("<|tools_prefix|>",),
            frame=("<|inner_suffix|>",),
        ),
    ),
    ReasoningFamily(
        name="hy_v3_opensource",
        aliases=("hy_v3",),
        marks=("<think", ":opensource"),
        tags=ReasoningTags(open="<think:opensource>", close="</think:opensource>"),
    ),
    ReasoningFamily(name="hy_v3", marks=("<think>", "<tool_sep>"), models=("hy_v3",), tags=_THINK),
    ReasoningFamily(
        name="seed_oss",
        marks=("<seed:think>",),
        tags=ReasoningTags(open="<seed:think>", close="</seed:think>"),
    ),
    ReasoningFamily(
        name="mistral",
        marks=("[THINK]", "[/THINK]"),
        models=("ministral3",),
        tags=ReasoningTags(open="[THINK]", close="[/THINK]"),
    ),
    ReasoningFamily(
        name="gemma4",
        marks=("<|channel>",),
        models=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        tags=ReasoningTags(open="<|channel>thought", close="<channel|>"),
    ),
    ReasoningFamily(
        name="cohere_command",
        aliases=("cohere_command3", "cohere_command4"),
        marks=("<|START_THINKING|>",),
        tags=ReasoningTags(
            open="<|START_THINKING|>",
            close="<|END_THINKING|>",
            frame=(
                "<|START_RESPONSE|>",
                "<|END_RESPONSE|>",
                "<|START_TEXT|>",
                "<|END_TEXT|>",
            ),
        ),
    ),
    ReasoningFamily(
        name="kimi",
        aliases=("kimi_vl",),
        marks=("◁think▷",),
        tags=ReasoningTags(open="◁think▷", close="◁/think▷"),
    ),
    ReasoningFamily(
        name="granite",
        marks=("Here is my thought process:", "Here is my response:"),
        tags=ReasoningTags(open="Here is my thought process:", close="Here is my response:"),
    ),
    ReasoningFamily(
        name="hunyuan",
        aliases=("hunyuan_a13b",),
        marks=("<think>", "<answer>"),
        models=("hunyuan_v1_moe", "hunyuan_v1_dense"),
        tags=ReasoningTags(open="<think>", close="</think>", frame=("<answer>", "</answer>")),
    ),
    ReasoningFamily(
        name="ernie45",
        marks=("</think>", "<response>"),
        models=("ernie4_5_moe_vl",),
        tags=ReasoningTags(
            open="<think>", close="</think>", always=True, frame=("<response>", "</response>")
        ),
    ),
    ReasoningFamily(
        name="deepseek_r1",
        aliases=("deepseek_v3", "deepseek_v4"),
        marks=("</think>", "<｜Assistant｜>"),
        tags=_ALWAYS_THINK,
    ),
    ReasoningFamily(
        name="minimax_m2", marks=("</think>", "<minimax:tool_call>"), tags=_ALWAYS_THINK
    ),
    ReasoningFamily(
        name="minimax_m2_append_think",
        tags=ReasoningTags(open="<think>", close="</think>", always=True, kept=True),
    ),
    ReasoningFamily(
        name="step3",
        marks=("</think>", "<steptml:"),
        models=("step3_vl", "step3_text"),
        tags=_ALWAYS_THINK,
    ),
    ReasoningFamily(
        name="glm45",
        aliases=("glm47", "glm"),
        marks=("<think>", "</think>", "<arg_key>"),
        tags=_THINK,
    ),
    ReasoningFamily(
        name="kimi_k2",
        marks=("<think>", "</think>", "<|im_middle|>"),
        # it may call without closing its thoughts
        tags=ReasoningTags(
            open="<think>", close="</think>", until=("<|tool_calls_section_begin|>",)
        ),
    ),
    ReasoningFamily(name="olmo3", marks=("<think>", "<function_calls>"), tags=_THINK),
    ReasoningFamily(
        name="nemotron",
        aliases=("nemotron_v3",),
        marks=("<think>", "<TOOLCALL>"),
        tags=_THINK,
    ),
    ReasoningFamily(
        name="qwen3",
        aliases=("step3p5", "holo2", "mimo", "poolside_v1", "think"),
        marks=("<think>", "</think>"),
        tags=_THINK,
    ),
)
