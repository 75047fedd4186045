"""Questions as prompts, and what the model expects next as answers.

A question stands behind the input as a list of options with a letter each, in the model's own chat
template; how likely each letter is as the next token, among themselves, is the answer. A predicate
has the options true and false, a score its levels in order."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import orjson

from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.likelihood import Asked, Expected, Manner, expected
from headrace.front.server.conversation.pipeline import prompt_ids
from headrace.front.server.conversation.pooling import shortened
from headrace.front.server.conversation.request import ChatRequest
from headrace.front.server.conversation.resolved import TranslatedRequest, as_sent, prompt_source
from headrace.front.text.tokenizer import Tokenizer

Json = dict[str, Any]
MAX_TOKENS = 2**22
CLOSING = "Answer with the letter of one option and nothing else."


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its options, each a value and what is known of it. `at`: where it stood in
    the request."""

    at: str
    text: str
    options: list[tuple[str, str | None]]

    def shown(self, letters: Sequence[str]) -> str:
        """The question as the model reads it."""
        lines = [
            f"{letter}) {value}" + (f": {description}" if description else "")
            for letter, (value, description) in zip(letters, self.options, strict=False)
        ]
        return "\n".join([self.text, "", *lines, "", CLOSING])


def words_of(value: Any, field: str) -> str:
    """Instructions or another text of a request: a text, input parts (/v1/decisions), or JSON shown
    as it is."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | dict):
        raise InvalidRequest(f"{field}: a text or JSON is needed", field=field)
    return orjson.dumps(value).decode()


def parts_of(parts: list[Any], field: str) -> str:
    """Input parts of /v1/decisions as a text; another medium is refused."""
    return "\n".join(_part(part, f"{field}[{i}]") for i, part in enumerate(parts))


def _part(part: Any, field: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "input_json" and isinstance(part.get("data"), dict | list):
        return orjson.dumps(part["data"]).decode()
    if kind in ("input_text", "input_json"):
        name = {"input_text": "text", "input_json": "data"}[kind]
        raise InvalidRequest(f"{field}.{name}: this field is required", field=f"{field}.{name}")
    raise InvalidRequest(
        f"{field}.type: {kind!r:.80} is not accepted by this model (only text is)",
        field=f"{field}.type",
    )


async def asked(
    context: RequestContext,
    request: TranslatedRequest,
    questions: Sequence[Question],
    manner: Manner,
) -> list[Expected]:
    """What the model expects behind each question. `told`: the conversation that they are about."""
    context.hold_place()
    letters = list(
        itertools.islice(
            _letters(context.services.tokenizer), max(len(one.options) for one in questions)
        )
    )
    chat = request.typed()
    prompts: list[Asked] = []
    num_tokens = 0
    for one in questions:
        if len(one.options) > len(letters):
            raise InvalidRequest(
                f"{one.at}: {len(one.options)} options given; this model's vocabulary has "
                f"words for {len(letters)}",
                field=one.at,
            )
        ids = await _prompt(context, request, chat, one.shown([text for text, _ in letters]))
        num_tokens += len(ids)
        if num_tokens > MAX_TOKENS:
            raise ContextTooLong(
                f"questions: with the input they have more than {MAX_TOKENS} tokens; ask fewer "
                "at once",
                field="questions",
            )
        tokens = tuple(token for _, token in letters[: len(one.options)])
        prompts.append(Asked(prompt_ids=ids, token_ids=tokens))
    return await expected(context, prompts, manner)


async def _prompt(
    context: RequestContext, request: TranslatedRequest, chat: ChatRequest, question: str
) -> list[int]:
    """The conversation with the question at the end of its last message, if that is the user's, or
    in one of its own: many templates refuse two messages of one role in a row."""
    *before, last = chat.messages
    if last["role"] == "user":
        content = last["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        messages = [
            *before,
            {"role": "user", "content": [*parts, {"type": "text", "text": "\n" + question}]},
        ]
    else:
        messages = [*chat.messages, {"role": "user", "content": question}]
    kwargs = {"enable_thinking": False}
    with as_sent(request):
        asked = msgspec.structs.replace(chat, messages=messages, chat_template_kwargs=kwargs)
        ids = await prompt_ids(context, prompt_source(asked))
    most = context.services.text.max_model_len - 1
    return shortened(ids, None, most=most, field=request.names["messages"])


def _letters(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Short words that are one token each: A .. Z, then whatever the vocabulary has of a .. z, AA
    .. zz."""
    taken: set[int] = set()
    singles = (*string.ascii_uppercase, *string.ascii_lowercase)
    pairs = map("".join, itertools.product(string.ascii_letters, repeat=2))
    for word in itertools.chain(singles, pairs):
        ids = tokenizer.encode_plain(word)
        if len(ids) == 1 and ids[0] not in taken:
            taken.add(ids[0])
            yield word, ids[0]


def confidence(shares: Sequence[float]) -> float:
    """0 where all options are equally likely, 1 where one has everything: (N p - 1) / (N - 1), p
    the greatest of N."""
    return (len(shares) * max(shares) - 1) / (len(shares) - 1)


def usage_of(answers: Sequence[Expected]) -> Json:
    """The usage in the shape of /v1/responses. Nothing is written, so there is no output."""
    num_prompt = sum(one.num_prompt for one in answers)
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": sum(one.num_cached for one in answers),
            "cache_write_tokens": 0,
        },
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt,
    }
