"""The formats of tool calls: the rows of families_json.py, families_tags.py and families_syntax.py,
special ones first.

The order matters: of the rows whose marks a template has, the first is taken. The formats are those
of the families' own chat templates.
"""

from __future__ import annotations

from headrace.front.text.parsing import families_json as json
from headrace.front.text.parsing import families_syntax as syntax
from headrace.front.text.parsing import families_tags as tags
from headrace.front.text.parsing.rows import ToolFamily

TOOL_FAMILIES: tuple[ToolFamily, ...] = (
    json.GPT_OSS,
    json.INKLING,
    tags.SEED_OSS,
    tags.MINIMAX_M3,
    tags.MINIMAX_M2,
    tags.DEEPSEEK_V4,
    tags.DEEPSEEK_V32,
    json.DEEPSEEK_V3,
    json.DEEPSEEK_V31,
    tags.KIMI_K3,
    json.KIMI_K2,
    tags.STEP3,
    tags.SOLAR_OPEN2,
    json.MISTRAL,
    json.MISTRAL_V3,
    syntax.GEMMA4,
    syntax.FUNCTIONGEMMA,
    json.COHERE_COMMAND,
    json.APERTUS,
    json.GIGACHAT3,
    json.GIGACHAT31,
    json.INTERNLM,
    json.PHI4_MINI,
    json.NEMOTRON,
    json.LONGCAT,
    json.GRANITE,
    json.GRANITE_20B_FC,
    syntax.OLMO3,
    syntax.LFM2,
    tags.MINICPM5,
    tags.QWEN3_CODER,
    tags.HY_V3_OPENSOURCE,
    tags.HY_V3,
    tags.POOLSIDE_V1,
    tags.GLM47,
    tags.GLM45,
    json.JAMBA,
    json.ERNIE45,
    json.HERMES,
    syntax.LLAMA4_PYTHONIC,
    json.LLAMA3_JSON,
    json.XLAM,
    json.JSON,
)
