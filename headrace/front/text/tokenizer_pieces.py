"""SentencePiece files whose pieces have ids of the checkpoint's own, as encoder-decoders are
published without a tokenizer.json (Marian, M2M-100, mBART, SeamlessM4T, Pegasus, T5), and
XLM-RoBERTa's.

Each reader says which id a piece has and which tokens stand around a raw prompt, as transformers'
class of that name does (transformers 5.23, tokenization_marian.py, tokenization_m2m_100.py,
tokenization_mbart.py, tokenization_mbart50.py, tokenization_seamless_m4t.py,
tokenization_pegasus.py, tokenization_t5.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.base.config.hf import read_json
from headrace.base.errors import CheckpointError
from headrace.base.optional import require
from headrace.front.text.threads import refusing_failures
from headrace.front.text.tokenizer import Guard, Tokenizer, TokenizerFacts, neutral
from headrace.front.text.tokenizer_files import piece_class_of, read_facts
from headrace.front.text.tokenizer_sentencepiece import encode_between

M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
    "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms "
    "my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur "
    "uz vi wo xh yi yo zh zu"
)
WMT21 = "en ha is ja cs ru zh de"
MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT "
    "lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
MBART50 = (
    f"{MBART} af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL "
    "ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
"""Languages whose tokens lie behind the pieces, in this order; no file lists them."""
FAIRSEQ = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
_MARIAN_LANGUAGE = re.compile(r">>[^<>]+<<")


@dataclass(frozen=True, kw_only=True)
class PieceIds:
    """`ids`: of the pieces; `special`: of control tokens, `unknown` and others; `before`, `behind`:
    tokens around a raw prompt; `lead`: a text may begin with a piece of this form;
    `between`: two texts of a pair."""

    ids: Mapping[str, int]
    special: Mapping[str, int]
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ("</s>",)
    unknown: str = "<unk>"
    lead: re.Pattern[str] | None = None
    between: tuple[str, ...] = ()


class PieceTokenizer(Tokenizer):
    """A SentencePiece model and the ids of its pieces."""

    drop_first_space = True

    def __init__(self, library: Any, pieces: PieceIds, facts: TokenizerFacts, path: Path) -> None:
        super().__init__(facts)
        self._library, self._ids, self._special = library, pieces.ids, pieces.special
        self._lead = pieces.lead
        missing = {pieces.unknown, *pieces.before, *pieces.behind} - self._special.keys()
        if missing:
            raise CheckpointError(f"tokenizer: {path}: no {', '.join(sorted(missing))}")
        self._unknown = self._special[pieces.unknown]
        self._before, self._behind = (
            [self._special[token] for token in tokens] for tokens in (pieces.before, pieces.behind)
        )
        self._between = [self._special[token] for token in pieces.between]
        self._tokens = {token_id: token for token, token_id in self._ids.items()}
        self._tokens |= {token_id: token for token, token_id in self._special.items()}
        self.special_ids = frozenset(self._special.values())
        self.num_ids = max(self._tokens) + 1
        self.longest_token = max(map(len, self._tokens.values()))

    def token_id(self, token: str) -> int | None:
        return self._special.get(token, self._ids.get(token))

    def vocabulary_token(self, token_id: int) -> str:
        return self._tokens.get(token_id, "")

    def token_bytes(self, token_id: int) -> bytes:
        token = self._tokens.get(token_id, "")
        return (token if token_id in self.special_ids else token.replace("▁", " ")).encode()

    def _encode(self, text: str) -> list[int]:
        return [*self._before, *self._encode_bare(text), *self._behind]

    def _encode_bare(self, text: str) -> list[int]:
        lead = self._lead.match(text) if self._lead is not None else None
        if lead is None or lead[0] not in self._ids:
            return self.encode_guarded(neutral(text))
        return [self._ids[lead[0]], *self.encode_guarded(neutral(text[lead.end() :]))]

    def encode_pair(
        self, first: str, second: str, *, second_tokens: int | None = None
    ) -> tuple[list[int], int]:
        """As the vocabulary's class joins pairs."""
        rest = self._encode_bare(second)[:second_tokens]
        first_ids = [*self._before, *self._encode_bare(first), *self._between]
        return [*first_ids, *rest, *self._behind], 0

    def encode_plain(self, text: str) -> list[int]:
        with refusing_failures(text):
            pieces: list[str] = self._library.encode(text, out_type=str)
        return [self._ids.get(piece, self._unknown) for piece in pieces]

    def encode_guarded(self, text: str) -> list[int]:
        special = [*self._special.values()]
        return encode_between(self.guard.resolve(text), special, self.encode_plain)

    @cached_property
    def guard(self) -> Guard:
        return Guard(self._special)


def load_pieces(path: str) -> PieceTokenizer:
    """The tokenizer of the folder with this SentencePiece file."""
    file = Path(path)
    library = require("sentencepiece", extra="tokenizers", purpose="a SentencePiece tokenizer")
    try:
        model = library.SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"tokenizer: {path}: {error}") from error
    named = piece_class_of(file.parent)
    assert named is not None, "the file was chosen by its class"
    beside = file.parent / "tokenizer_config.json"
    reader = _Reader(
        pieces={model.id_to_piece(i): i for i in range(model.get_piece_size())},
        folder=file.parent,
        config=read_json(beside) if beside.is_file() else {},
    )
    return PieceTokenizer(model, READERS[named](reader), read_facts(file.parent), file)


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """`pieces`: the file's own ids; `config`: tokenizer_config.json."""

    pieces: Mapping[str, int]
    folder: Path
    config: Mapping[str, Any]

    def added(self) -> dict[str, int]:
        """Tokens that the files beside add."""
        beside = self.folder / "added_tokens.json"
        added = dict(read_json(beside)) if beside.is_file() else {}
        for token_id, token in (self.config.get("added_tokens_decoder") or {}).items():
            if isinstance(token, dict) and token.get("special") and str(token_id).isdigit():
                added[str(token.get("content"))] = int(token_id)
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in added.values()):
            raise CheckpointError(f"{beside}: ids are needed for all added tokens")
        return added

    def shifted(self, by: int, special: Mapping[str, int]) -> dict[str, int]:
        """The file's pieces `by` ids later, without its control tokens."""
        return {p: i + by for p, i in self.pieces.items() if p not in special}

    def vocabulary(self) -> dict[str, int]:
        """vocab.json."""
        file = self.folder / "vocab.json"
        ids = read_json(file) if file.is_file() else {}
        if not ids or not all(isinstance(token_id, int) for token_id in ids.values()):
            raise CheckpointError(f"{file}: the ids of the pieces are needed there")
        return ids

    def of_vocabulary(self, special: Mapping[str, int], **how: Any) -> PieceIds:
        """By vocab.json."""
        ids = self.vocabulary()
        known = {token: ids[token] for token in FAIRSEQ if token in ids}
        rest = {piece: i for piece, i in ids.items() if piece not in known}
        return PieceIds(ids=rest, special={**known, **special, **self.added()}, **how)

    def language(self, default: str) -> str:
        """The one that prompts are in."""
        return str(self.config.get("src_lang") or default)


def _marian(reader: _Reader) -> PieceIds:
    if (reader.folder / "target_vocab.json").is_file():
        raise CheckpointError(f"{reader.folder}: vocabularies of two languages are not read")
    return reader.of_vocabulary({}, lead=_MARIAN_LANGUAGE)


def _m2m100(reader: _Reader) -> PieceIds:
    codes = WMT21 if reader.config.get("language_codes") == "wmt21" else M2M100
    first = len(reader.vocabulary())
    languages = {f"__{code}__": first + i for i, code in enumerate(codes.split())}
    return reader.of_vocabulary(languages, before=(f"__{reader.language('en')}__",))


def _xlm_roberta(reader: _Reader) -> PieceIds:
    pieces = _fairseq(reader, "", before=("<s>",), behind=("</s>",))
    return replace(pieces, between=("</s>", "</s>"))


def _mbart(reader: _Reader) -> PieceIds:
    return _fairseq(reader, MBART, before=(), behind=("</s>", reader.language("en_XX")))


def _mbart50(reader: _Reader) -> PieceIds:
    return _fairseq(reader, MBART50, before=(reader.language("en_XX"),), behind=("</s>",))


def _fairseq(
    reader: _Reader, codes: str, *, before: tuple[str, ...], behind: tuple[str, ...]
) -> PieceIds:
    """Behind the pieces the languages, and what stands for a gap."""
    first = len(reader.pieces) + 1
    languages = {code: first + i for i, code in enumerate((*codes.split(), "<mask>"))}
    special = {**FAIRSEQ, **languages, **reader.added()}
    return PieceIds(ids=reader.shifted(1, special), special=special, before=before, behind=behind)


def _seamless(reader: _Reader) -> PieceIds:
    special = {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3, **reader.added()}
    language = reader.language("eng").strip("_")
    return PieceIds(ids=reader.shifted(1, special), special=special, before=(f"__{language}__",))


def _pegasus(reader: _Reader) -> PieceIds:
    """Before the pieces, unless the file has them, tokens that only pretraining used."""
    offset = reader.config.get("offset", 103)
    if not isinstance(offset, int) or offset < 0:
        raise CheckpointError(f"{reader.folder}: tokenizer_config.json: offset: a count is needed")
    special = {"<pad>": 0, "</s>": 1, "<unk>": reader.pieces.get("<unk>", 2) + offset}
    if offset:
        special |= {"<mask_1>": 2, "<mask_2>": 3}
        special |= {f"<unk_{i}>": i + 2 for i in range(2, offset)}
    special |= reader.added()
    return PieceIds(ids=reader.shifted(offset, special), special=special)


def _t5(reader: _Reader) -> PieceIds:
    count = reader.config.get("extra_ids", 100)
    if not isinstance(count, int) or count < 0:
        raise CheckpointError(
            f"{reader.folder}: tokenizer_config.json: extra_ids: a count is needed"
        )
    last = len(reader.pieces) + count - 1
    special = {token: reader.pieces[token] for token in ("<pad>", "</s>", "<unk>")}
    special |= {f"<extra_id_{i}>": last - i for i in range(count)}
    special |= reader.added()
    return PieceIds(ids=reader.shifted(0, special), special=special)


READERS: Mapping[str, Callable[[_Reader], PieceIds]] = {
    "MarianTokenizer": _marian,
    "M2M100Tokenizer": _m2m100,
    "MBartTokenizer": _mbart,
    "MBart50Tokenizer": _mbart50,
    "XLMRobertaTokenizer": _xlm_roberta,
    "SeamlessM4TTokenizer": _seamless,
    "PegasusTokenizer": _pegasus,
    "T5Tokenizer": _t5,
}
"""By the name of transformers' class."""
