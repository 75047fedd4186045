"""The chat template of Florence-2, whose checkpoints have none: one message, in which tasks may be
named as its processor names them (transformers 5.23, processing_florence2.py).

Places in an image are control tokens (<loc_0> to <loc_999>) that users write: of all others their
text has none.
"""

from __future__ import annotations

import json

from headrace.front.text.tokenizer import BREAK

ALONE = {
    "OCR": "What is the text in the image?",
    "OCR_WITH_REGION": "What is the text in the image, with regions?",
    "CAPTION": "What does the image describe?",
    "DETAILED_CAPTION": "Describe in detail what is shown in the image.",
    "MORE_DETAILED_CAPTION": "Describe with a paragraph what is shown in the image.",
    "OD": "Locate the objects with category name in the image.",
    "DENSE_REGION_CAPTION": "Locate the objects in the image, with their descriptions.",
    "REGION_PROPOSAL": "Locate the region proposals in the image.",
}
"""What tasks are asked as, whose name is all of a message."""
WITH_INPUT = {
    "CAPTION_TO_PHRASE_GROUNDING": ("Locate the phrases in the caption: ", ""),
    "REFERRING_EXPRESSION_SEGMENTATION": ("Locate ", " in the image with mask"),
    "REGION_TO_SEGMENTATION": ("What is the polygon mask of region ", ""),
    "OPEN_VOCABULARY_DETECTION": ("Locate ", " in the image."),
    "REGION_TO_CATEGORY": ("What is the region ", "?"),
    "REGION_TO_DESCRIPTION": ("What does the region ", " describe?"),
    "REGION_TO_OCR": ("What text is in the region ", "?"),
}
"""What stands before and behind the rest of the message."""
_SOURCE = """\
{%- if messages|length != 1 -%}
{{ raise_exception("this model answers one message, without others before it") }}
{%- endif -%}
{%- set content = messages[0].content -%}
{%- if content is not string -%}
{%- set content = content | map(attribute="text") | join("\\n") -%}
{%- endif -%}
{%- set alone, with_input = @ALONE, @WITH_INPUT -%}
{%- set parts = content.split(">", 1) -%}
{%- set name = parts[0] | replace("@BREAK", "") -%}
{%- set name = name[1:] if name.startswith("<") else "" -%}
{%- set rest = (parts[1] if parts|length > 1 else "") | trim -%}
{%- if name in alone -%}
{%- if rest -%}{{ raise_exception("<" ~ name ~ "> stands alone in its message") }}{%- endif -%}
{%- set content = alone[name] -%}
{%- elif name in with_input -%}
{%- set content = with_input[name][0] ~ rest ~ with_input[name][1] -%}
{%- endif -%}
{%- set pieces = content.split("<@BREAKloc_") -%}
{{- bos_token ~ pieces[0] -}}
{%- for piece in pieces[1:] -%}
{%- set halves = piece.split("@BREAK>", 1) -%}
{%- if halves|length == 2 and halves[0].isdigit() -%}
{{- "<loc_" ~ halves[0] ~ ">" ~ halves[1] -}}
{%- else -%}
{{- "<@BREAKloc_" ~ piece -}}
{%- endif -%}
{%- endfor -%}
{{- eos_token -}}
"""
CHAT_TEMPLATE = (
    _SOURCE.replace("@ALONE", json.dumps(ALONE))
    .replace("@WITH_INPUT", json.dumps(WITH_INPUT))
    .replace("@BREAK", BREAK)
)
