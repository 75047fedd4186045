"""Kimi-Audio's prompts: its special tokens, which no file of the checkpoint lists, and how messages
stand between them (MoonshotAI, Kimi-Audio: tokenization_kimia.py, prompt_manager.py).

Two tokens stand at each place, one of text and one of sound. But where sound is heard one of the
two is the blank, so that one id and the blank say it all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.config.hf import ConfigReader

BLANK_TOKEN, END_TOKEN = "<|im_kimia_text_blank|>", "<|im_kimia_text_eos|>"
_NAMED: Mapping[int, str] = {
    **{0: "[BOS]", 1: "[EOS]", 2: "<|im_msg_end|>", 3: "<|im_user_msg_start|>"},
    **{4: "<|im_assistant_msg_start|>", 9: "[EOT]", 18: "<|im_media_begin|>"},
    **{20: "<|im_media_end|>", 23: BLANK_TOKEN, 24: END_TOKEN},
    **{27: "<|im_kimia_user_msg_start|>", 28: "<|im_kimia_assistant_msg_start|>"},
    **{32: "<|im_kimia_speech_ct_id|>", 33: "<|im_kimia_speech_ctd_id|>"},
}
_MEDIA_BEGIN = 18
NUM_SPECIAL = 421
TRANSCRIBE = "Please transcribe the following audio:"

CHAT_TEMPLATE = """
{%- macro role_of(message) %}{{ 'assistant' if message.role == 'assistant' else 'user' }}{% endmacro %}
{%- set turn = namespace(role='', heard=false) %}
{%- for message in messages %}
  {%- set role = role_of(message) %}
  {%- if role != turn.role %}{{- '<|im_kimia_' + role + '_msg_start|>' }}{%- endif %}
  {%- set turn.role = role %}
  {%- if message.content is string %}
    {%- set turn.heard = false %}{{- message.content }}
  {%- else %}
    {%- for part in message.content or [] %}
      {%- set turn.heard = part.type == 'audio' %}
      {%- if turn.heard %}{{- '<|im_media_begin|><|im_kimia_text_blank|><|im_media_end|>' }}
      {%- else %}{{- part.text }}{%- endif %}
    {%- endfor %}
  {%- endif %}
  {%- if role == 'assistant' %}{{- '<|im_kimia_text_eos|>' }}{%- endif %}
  {%- if loop.nextitem is undefined or role_of(loop.nextitem) != role %}
    {%- if turn.heard %}{{- '<|im_kimia_speech_ct_id|>' }}{%- endif %}{{- '<|im_msg_end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_kimia_assistant_msg_start|>' }}{%- endif %}
""".strip()


def special_tokens(first: int) -> dict[str, int]:
    """All of them, behind `first` tokens of text."""
    named = dict(_NAMED)
    spare = iter(range(NUM_SPECIAL))
    for place in range(NUM_SPECIAL):
        named.setdefault(place, f"<|reserved_token_{next(spare)}|>")
    return {named[place]: first + place for place in range(NUM_SPECIAL)}


def blank_of(config: ConfigReader) -> int:
    """The id that is said where nothing is."""
    return _special(config, BLANK_TOKEN)


def end_of(raw: Mapping[str, Any], where: str) -> int:
    """The id that ends an answer."""
    return _special(ConfigReader(raw, where), END_TOKEN)


def _special(config: ConfigReader, token: str) -> int:
    begin = config.int("kimia_media_begin", 151_661, ge=_MEDIA_BEGIN)
    return special_tokens(begin - _MEDIA_BEGIN)[token]
