"""The backend over llguidance: an Earley parser over derivative-based lexing, with bounded work per
token.

Compiling and filling give the interpreter lock back, so that the worker's thread goes on meanwhile.
Every bound of the library is set here: a grammar that would need more per token fails alone instead
of holding everybody up.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from headrace.base.errors import InvalidRequest
from headrace.base.wire.grammar import Lark, Node, Vocabulary
from headrace.core.grammar.backends.lark import to_grammar
from headrace.core.ports import MAX_FORCED, Encode, Matcher

MAX_MESSAGE_CHARS = 300
# About 20 ms to build, 7 ms of lexing and 1 ms of parsing for one mask, and 30 MB of lexer states
# at the very worst.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# Looking for forced text walks through all of it, however long (seconds for `a{1000000}`), and no
# limit of the library ends the walk but the number of lexer expressions there may be. So masks do
# not look for it, and a second matcher, the probe, does: with little room (about 10 ms of walking
# at the first size, 100 ms at the last, taken only by grammars that need it to be built at all).
# Where it gives up, only the probe is lost.
PROBE_FUEL = (20_000, 60_000, 180_000)
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
PROBE_LAG = 64
"""Tokens by which a probe may be behind its matcher."""
_PLACE = re.compile(r"^at \d+\(\d+\): ")  # a place in a grammar that the user never saw
_EXCERPT = re.compile(r"^(\d+ )?\||^\^+$")
PARALLEL_FROM = 8
"""Fewer masks than this are filled on the loop's own thread: waking others would take longer."""


class _Wrapper:
    """The vocabulary as the library wants it. Without `encode`, and where that gives other text (a
    tokenizer that puts a space in front), it tokenizes greedily: the text is right, the tokens are
    not those the model knows best."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        self._encode = encode
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens = vocabulary.pieces
        self.special_token_ids = list(vocabulary.special_ids)
        special = set(vocabulary.special_ids)
        self._ids = {p: i for i, p in enumerate(vocabulary.pieces) if p and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        if self._encode is not None:
            ids = self._encode(data.decode(errors="replace"))
            if b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == data:
                return ids
        return self._greedily(data)

    def _greedily(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            size = min(self._longest, len(data) - at)
            while size > 1 and data[at : at + size] not in self._ids:
                size -= 1
            if (token := self._ids.get(data[at : at + size])) is not None:
                ids.append(token)
            at += size
        return ids


class GuidanceMatcher:
    """One answer's place. `probe`: a matcher of the same grammar that may fail, at the same place
    but for the tokens `unseen`; None: what is forced is not known."""

    def __init__(self, matcher: Any, probe: Any = None, unseen: Sequence[int] = ()) -> None:
        self.matcher = matcher
        self._probe = probe
        self._unseen = list(unseen)

    def accept(self, token: int) -> bool:
        """See Matcher."""
        if self._probe is not None:
            self._unseen.append(token)
            if len(self._unseen) == PROBE_LAG:
                self._catch_up()
        return bool(self.matcher.consume_token(token))

    def forced(self) -> list[int]:
        """See Matcher. The library walks through a forced text to its end each time (10 ms): a
        very long one is taken once and not looked for again."""
        self._catch_up()
        if self._probe is None:
            return []
        tokens: list[int] = self._probe.compute_ff_tokens()
        if len(tokens) > MAX_FORCED:
            self._probe = None
        return tokens[:MAX_FORCED]

    def _catch_up(self) -> None:
        """Brings the probe to this place; one that has failed is given up."""
        if self._probe is None:
            return
        followed = self._probe.consume_tokens(self._unseen) if self._unseen else True
        self._unseen.clear()
        if not followed or self._probe.is_error():
            self._probe = None

    @property
    def complete(self) -> bool:
        """See Matcher."""
        return bool(self.matcher.is_stopped())

    def copy(self) -> GuidanceMatcher:
        """See Matcher."""
        probe = None if self._probe is None else self._probe.deep_copy()
        return GuidanceMatcher(self.matcher.deep_copy(), probe, self._unseen)


class GuidanceBackend:
    """Compiles with llguidance for one vocabulary."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None = None) -> None:
        self._vocabulary = vocabulary
        self._words = -(-vocabulary.width // 32)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Wrapper(vocabulary, encode)),
            n_vocab=vocabulary.width,
            eos_token=list(vocabulary.eos_ids),
        )
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._probe_limits = [
            llguidance.LLParserLimits(**LIMITS | {"initial_lexer_fuel": fuel})
            for fuel in PROBE_FUEL
        ]
        self._executor = llguidance.LLExecutor(min(8, len(os.sched_getaffinity(0))))

    def compile(self, node: Node) -> GuidanceMatcher:
        """See GrammarBackend."""
        grammar = to_grammar(node, self._vocabulary)
        matcher = llguidance.LLMatcher(
            self._tokenizer, _without_forcing(grammar), log_level=0, limits=self._limits
        )
        if matcher.is_error():
            message = _cleaned(matcher.get_error())
            raise InvalidRequest(message if isinstance(node, Lark) else _PLACE.sub("", message))
        return GuidanceMatcher(matcher, self._probe(grammar))

    def _probe(self, grammar: str) -> Any:
        """The probe with the least room in which the grammar can be built; None if there is
        none."""
        for limits in self._probe_limits:
            probe = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
            if not probe.is_error():
                return probe
        return None

    def fill(self, matchers: Sequence[Matcher], masks: npt.NDArray[np.int32]) -> list[str | None]:
        """See GrammarBackend."""
        assert masks.flags.c_contiguous and masks.shape[1] == self._words
        theirs = [self._own(matcher) for matcher in matchers]
        if len(theirs) < PARALLEL_FROM:
            for matcher, mask in zip(theirs, masks, strict=False):
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        else:
            pairs = [(matcher, index) for index, matcher in enumerate(theirs)]
            self._executor.unsafe_compute_mask_ptr(
                pairs, masks.ctypes.data, self._words * 4, len(masks)
            )
        return [_cleaned(matcher.get_error()) if matcher.is_error() else None for matcher in theirs]

    def _own(self, matcher: Matcher) -> Any:
        assert isinstance(matcher, GuidanceMatcher)
        return matcher.matcher


def _without_forcing(grammar: str) -> str:
    """The grammar (Lark, or a JSON document of several) for masks that do not look for forced text:
    by itself the library walks through all of it before each mask. The last directive counts."""
    if not grammar.startswith("{"):
        return grammar + NO_FORCING
    document = json.loads(grammar)
    for part in document["grammars"]:
        part["lark_grammar"] += NO_FORCING
    return json.dumps(document)


def _cleaned(message: str) -> str:
    """The reason on one line, without the parser's state."""
    reason = re.split(r"<state>|<backtrace>", message)[0]
    lines = [line.strip() for line in reason.splitlines()]
    text = " ".join(line for line in lines if line and not _EXCERPT.match(line))
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."
