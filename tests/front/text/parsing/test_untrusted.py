"""What a model quotes, cuts off or gets wrong, in every format: control tokens spelled out never become structure
(P28), an answer that ends anywhere keeps what was whole, invalid arguments are told at a call's end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from benchmarks.robustness.parsers import MESSAGES, own_calls, own_thought
from headrace.front.client.events import Delta, Ended
from headrace.front.server.conversation.stages import ParsedAnswer, ParsedDelta, ParsedEnded
from headrace.front.text.parsing.engine import (
    MAX_NESTING,
    CallArguments,
    CallBegin,
    CallEnd,
    Part,
    joined,
)
from headrace.front.text.parsing.families import REASONING_FAMILIES, TOOL_FAMILIES
from headrace.front.text.parsing.parser import AnswerFormat
from headrace.front.text.parsing.writing import write_calls
from headrace.front.text.tokenizer import Detokenizer, TokenizerFacts
from headrace.front.text.tokenizer_json import JsonTokenizer
from tests.front.text.parsing.golden import SCHEMAS, meaning, parse, parser_of
from tests.front.text.parsing.test_parser import cut

TOOLS = {row.name: row for row in TOOL_FAMILIES}
THOUGHTS = {row.name: row for row in REASONING_FAMILIES}
TAGGED = [name for name in TOOLS if name not in ("llama3_json", "llama4_pythonic", "xlam", "json")]
SOME = settings(max_examples=40, deadline=None)


def texts_in(value: Any) -> Iterator[str]:
    """The texts of a row's grammar."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_in(one)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from texts_in(getattr(value, name))


def control_words(name: str) -> list[str]:
    """What opens something in a format: its own text as control tokens, as the family's vocabulary has them."""
    rows = [TOOLS[name].grammar] if name in TOOLS else []
    rows += [THOUGHTS[name].tags] if name in THOUGHTS else []
    marked = ("<", "[TOOL", "[ARGS", "[CALL", "[THINK", "[/THINK", "]<]", "◁", "function call<")
    found = {text for row in rows for text in texts_in(row) if text.startswith(marked)}
    found |= {"functools"} if name == "phi4_mini" else set()
    if name in ("gpt_oss", "kimi_k3"):  # their tags are made of tokens and words
        found = {token for text in found for token in re.findall(r"<\|\w+\|>", text)}
    return sorted(word for word in found if len(word) > 1)


def tokenizer_with(words: list[str]) -> JsonTokenizer:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*words, "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["assistant"], trainer)
    return JsonTokenizer(library.to_str(), TokenizerFacts())


def events_of(
    answers: AnswerFormat, tokenizer: JsonTokenizer, ids: list[int], *, size: int, reason: str
) -> tuple[list[Part], ParsedEnded]:
    """The parts of an answer of these tokens, `size` at a time, and its end."""
    parser = answers.parser(prompt_tail="", schemas=SCHEMAS)
    assert parser is not None
    pieces = answers.pieces_of(tokenizer, skip_special_tokens=True)
    detokenizer = Detokenizer(tokenizer, pieces=pieces)
    answer = ParsedAnswer(parser, pieces)
    events: list[Any] = []
    for at in range(0, len(ids), size):
        some = ids[at : at + size]
        events += answer.take(Delta(index=0, text=detokenizer.push(some), token_ids=some))
    events += answer.take(Delta(index=0, text=detokenizer.finish()))
    events += answer.take(Ended(index=0, reason=reason, num_output=len(ids)))
    deltas = [event for event in events if isinstance(event, ParsedDelta)]
    return joined([part for event in deltas for part in event.parts]), events[-1]


@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=8, deadline=None)
@given(size=st.integers(1, 16), quote=st.sampled_from(["", "You typed: ", "\n"]))
def test_a_call_that_a_user_typed_is_text_when_it_is_quoted(
    name: str, size: int, quote: str
) -> None:
    """The same characters as control tokens are a call, letter by letter they are text, to the character."""
    row = TOOLS[name]
    tokenizer = tokenizer_with(control_words(name))
    think = name if name in MESSAGES else "none"
    answers = AnswerFormat.named(tool_parser=name, reasoning_parser=think).bound(tokenizer)
    call = write_calls(row.writing, [("f", {"a": 1})])
    lead = {"gpt_oss": "<|channel|>final<|message|>", "inkling": "<|content_text|>"}.get(name, "")
    typed = [*tokenizer.encode(lead), *tokenizer.encode_plain(quote + call)]
    parts, _ = events_of(answers, tokenizer, typed, size=size, reason="stop")
    assert meaning(parts) == (quote + call, "", [], 0)
    written, _ = events_of(answers, tokenizer, tokenizer.encode(call), size=size, reason="stop")
    assert [name for name, _ in meaning(written)[2]] == ["f"]


@pytest.mark.parametrize("name", [name for name in THOUGHTS if name != "granite"])
@settings(max_examples=8, deadline=None)
@given(size=st.integers(1, 16))
def test_a_tag_that_a_user_typed_neither_begins_nor_ends_a_thought(name: str, size: int) -> None:
    """Granite's are sentences, no tokens: there the model's words are all there is."""
    tags = THOUGHTS[name].tags
    tokenizer = tokenizer_with(control_words(name))
    answers = AnswerFormat.named(tool_parser=own_calls(name), reasoning_parser=name).bound(
        tokenizer
    )
    begin, end = tags.open, tags.close
    if name == "gpt_oss":
        end = f"<|end|><|start|>assistant{tags.close}"
    if name == "inkling":
        end = f"<|end_message|><|message_model|>{tags.close}"
    ids = [
        *([] if tags.always else tokenizer.encode(begin)),
        *tokenizer.encode_plain(f"he says {end} twice"),
        *tokenizer.encode(end),
        *tokenizer.encode_plain(f"{begin} means that I think"),
    ]
    parts, _ = events_of(answers, tokenizer, ids, size=size, reason="stop")
    content, reasoning, calls, _ = meaning(parts)
    said, thought = f"{begin} means that I think", f"he says {end} twice"
    if tags.kept:
        assert content == f"{begin}{thought}{end}{said}"
    else:
        assert (content, reasoning.strip()) == (said, thought)
    assert not calls


@pytest.mark.parametrize("name", TOOLS)
@SOME
@given(data=st.data())
def test_an_answer_that_is_cut_off_keeps_what_was_whole(name: str, data: st.DataObject) -> None:
    """max_tokens in the middle of a structure: whole calls are whole, the last keeps a beginning of its arguments."""
    row = TOOLS[name]
    calls: list[tuple[str, dict[str, Any]]] = [("f", {"s": "x y", "a": 1}), ("f", {"b": True})]
    text = write_calls(row.writing, calls)
    at = data.draw(st.integers(0, len(text)))
    think = own_thought(name) if name in MESSAGES else "none"
    parts = parse(parser_of(name, think), [text[:at]])
    _, _, found, complete = meaning(parts)
    assert complete <= len(found) <= complete + 1
    for (called, arguments), (wanted, given_) in zip(found[:complete], calls, strict=False):
        assert (called, json.loads(arguments)) == (wanted, given_)
    if len(found) > complete:
        whole = json.dumps(calls[complete][1]).replace(" ", "")
        assert found[-1][0] == calls[complete][0]
        assert whole.startswith(found[-1][1].replace(" ", "").removesuffix('"')[:1])
    assert all(isinstance(part, CallEnd) is False or part.valid for part in parts)


@pytest.mark.parametrize("tag", ["<tool_call>", "[INST]", "◁think▷", "]<]minimax[>["])
def test_a_tag_that_is_an_added_token_is_kept_out_of_what_users_type(tag: str) -> None:
    """Where a vocabulary does not call it special, its template shows that it is markup."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(["a"], trainer)
    library.add_tokens([AddedToken(tag, special=False)])
    facts = TokenizerFacts(chat_template="{{ '" + tag + "' }}{{ messages }}")
    tokenizer = JsonTokenizer(library.to_str(), facts)
    assert tag in tokenizer.guard.tokens
    (token,) = tokenizer.encode(tag)
    typed = tokenizer.encode_guarded(tokenizer.guard.protect(f"say {tag} twice") + tag)
    assert typed.count(token) == 1 and typed[-1] == token, "the template's own, not the user's"


@pytest.mark.parametrize("reason", ["length", "stop", "abort"])
def test_how_an_answer_ended_is_passed_on(reason: str) -> None:
    tokenizer = tokenizer_with(["<tool_call>", "</tool_call>"])
    answers = AnswerFormat.named(tool_parser="hermes", reasoning_parser="qwen3").bound(tokenizer)
    ids = tokenizer.encode('<tool_call>{"name": "f", "arguments": {"s": "on')
    parts, ended = events_of(answers, tokenizer, ids, size=3, reason=reason)
    assert (ended.reason, ended.called) == (reason, False), "it was cut off"
    assert meaning(parts) == ("", "", [("f", '{"s": "on')], 0)


INVALID: list[tuple[str, str]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": nope}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "not json"}</tool_call>'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1,}'),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{a: 1}<｜tool▁call▁end｜>"),
    ("inkling", '<|content_invoke_tool_json|>{"name": "f", "args": {"a": 01}}<|end_message|>'),
    ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{'a': 1}<|call|>"),
]


@pytest.mark.parametrize(("name", "text"), INVALID)
def test_arguments_that_are_no_object_are_told_at_the_calls_end(name: str, text: str) -> None:
    for size in (1, 7, len(text)):
        parts = parse(parser_of(name, own_thought(name)), cut(text, [size]))
        (end,) = [part for part in parts if isinstance(part, CallEnd)]
        assert not end.valid
        assert sum(isinstance(part, CallArguments) for part in parts) == 1, "passed on as written"


@pytest.mark.parametrize("name", TOOLS)
def test_valid_arguments_are_told_so(name: str) -> None:
    text = write_calls(TOOLS[name].writing, [("f", {"s": "x", "a": 1}), ("g", {})])
    think = own_thought(name) if name in MESSAGES else "none"
    parts = parse(parser_of(name, think), [text])
    assert [part for part in parts if isinstance(part, CallEnd)] == [CallEnd(0), CallEnd(1)]


@pytest.mark.parametrize(
    ("deep", "valid"),
    [
        *(("[" * n + "]" * n, n < MAX_NESTING) for n in (20_000, MAX_NESTING, MAX_NESTING - 1)),
        (f"[{', '.join(['[]'] * MAX_NESTING)}]", True),
    ],
    ids=["far", "one", "just not", "beside each other"],
)
def test_arguments_nested_beyond_what_clients_read_are_not_valid(deep: str, valid: bool) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"o": {deep}}}}}</tool_call>'
    (end,) = [p for p in parse(parser_of("hermes"), [text]) if isinstance(p, CallEnd)]
    assert end.valid == valid


@SOME
@given(
    order=st.lists(st.integers(0, 2), min_size=30, max_size=90),
    size=st.integers(1, 9),
)
def test_choices_beside_each_other_share_no_state(order: list[int], size: int) -> None:
    """n answers of one request, each at another place of its own text, whoever's turn it is."""
    texts = [
        "<think>one</think>" + '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        "Only <tool_call> words.",
        '<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "f", "argu',
    ]
    answers = AnswerFormat.named(tool_parser="hermes", reasoning_parser="qwen3")
    alone = [meaning(parse(parser_of("hermes"), [text])) for text in texts]
    made = [answers.parser(prompt_tail="assistant\n", schemas=SCHEMAS) for _ in texts]
    waiting = [cut(text, [size]) for text in texts]
    parts: list[list[Part]] = [[] for _ in texts]
    for i in [*order, *(i for i in range(3) for _ in range(200))]:
        parser = made[i]
        assert parser is not None
        if waiting[i]:
            parts[i] += parser.push(waiting[i].pop(0))
    ids = []
    for i, parser in enumerate(made):
        assert parser is not None
        parts[i] += parser.finish()
        assert meaning(joined(parts[i])) == alone[i]
        ids += [part.id for part in parts[i] if isinstance(part, CallBegin)]
    assert len(set(ids)) == len(ids) == 2
