"""What a row of the table of tool formats is: how calls are read, how they are written, how a
checkpoint shows them."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.front.text.parsing.blocks import BlockTags
from headrace.front.text.parsing.call_syntax import CallSyntax
from headrace.front.text.parsing.harmony import HarmonyTags
from headrace.front.text.parsing.json_calls import JsonKeys
from headrace.front.text.parsing.named_json import NamedTags
from headrace.front.text.parsing.nested_tags import NestedTags
from headrace.front.text.parsing.tagged_json import JsonTags
from headrace.front.text.parsing.writing import CallWriting
from headrace.front.text.parsing.xml_parameters import ParameterTags


class BareTags(msgspec.Struct, frozen=True, kw_only=True):
    """The bare JSON grammar: an optional tag before it, and the keys."""

    prefix: str = ""
    keys: JsonKeys = JsonKeys()


ToolGrammar = (
    JsonTags
    | BareTags
    | ParameterTags
    | NestedTags
    | NamedTags
    | CallSyntax
    | HarmonyTags
    | BlockTags
)


class ToolFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One format of tool calls. `ids`: what the template accepts as a call's id (short: nine
    letters or digits).

    `marks` are texts that only templates of this format contain; a row without marks is taken by
    its name only. `models` are values of model_type, for checkpoints whose template does not show
    the format; `only_models`: the marks count for no others, because other formats have them too.
    """

    name: str
    aliases: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    only_models: bool = False
    grammar: ToolGrammar
    writing: CallWriting
    ids: Literal["any", "short"] = "any"


def row(
    name: str,
    read: tuple[ToolGrammar, CallWriting],
    *,
    marks: tuple[str, ...],
    models: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    only_models: bool = False,
) -> ToolFamily:
    """A row of a grammar and a way of writing that were made together."""
    grammar, writing = read
    return ToolFamily(
        name=name,
        aliases=aliases,
        marks=marks,
        models=models,
        only_models=only_models,
        grammar=grammar,
        writing=writing,
    )
