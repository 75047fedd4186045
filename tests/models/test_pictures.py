"""Families of picture_cases.py, from pictures to logits: the placeholders, the text around them and the pixels are
those of transformers' processors, the answers those of its models; whole, and in chunks that cut images."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.config.media import MediaSpec
from headrace.base.wire.media import MediaInput
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processing import ProcessedMedia, Sampling
from headrace.front.media.processors.families import PROCESSORS, read_media
from tests.front.media.pictures import picture
from tests.models.media import Answer, SeeingEngine, answer_of, compare_answers, save_media_oracle
from tests.models.picture_cases import CASES as FIRST
from tests.models.picture_cases import IMAGE, VIDEO, PictureCase, Theirs
from tests.models.picture_cases_further import CASES as FURTHER
from tests.models.picture_cases_more import CASES as MORE
from tests.models.picture_cases_ratio import CASES as RATIO

CASES = {**FIRST, **MORE, **RATIO, **FURTHER}
BEFORE, BETWEEN, BEHIND = (5, 6, 7), (8, 9), (10, 11, 12)


@dataclass(frozen=True)
class Ready:
    """A prompt with its inputs at their places."""

    ids: list[int]
    media: tuple[MediaInput, ...]


@dataclass(frozen=True, kw_only=True)
class Shown:
    case: PictureCase
    folder: Path
    oracle: Any
    engine: SeeingEngine
    spec: MediaSpec

    def processed(self, pictures: Sequence[Any]) -> list[ProcessedMedia]:
        settings = self.spec.settings
        if 0 < settings.most_cut < len(pictures):
            settings = msgspec.structs.replace(settings, tiles=(1, 1))
        processor = PROCESSORS.load(self.spec.processor)(settings)
        return [processor.image(one) for one in pictures]

    def ids_of(self, words: str, places: Mapping[str, int] | None = None) -> list[int]:
        """Of the text around images: marks, and other characters one by one; `places`: of those that stand for
        placeholders."""
        known = {**self.case.marks, **(places or {})}
        ids: list[int] = []
        while words:
            mark = next((each for each in known if words.startswith(each)), words[0])
            ids.append(known.get(mark, 20 + ord(mark[0]) % 70))
            words = words[len(mark) :]
        return ids

    def prompt(self, media: Sequence[ProcessedMedia], kind: str = "image") -> Ready:
        """By our placeholders, from one mark for each medium."""
        mark = self.spec.image_mark or IMAGE if kind == "image" else VIDEO
        ids = [*BEFORE, mark]
        for _ in media[1:]:
            ids += [*BETWEEN, mark]
        settings = self.spec.settings
        prepared = [_prepared(one, kind, _digest_of(one), 0, settings.merge) for one in media]
        ids, inputs = expanded([*ids, *BEHIND], prepared, self.spec, self.ids_of, field="prompt")
        return Ready(ids, inputs)

    def expected_ids(self, theirs: Theirs, video: int | None = None) -> list[int]:
        """`video`: what stands for a video's tokens, where our prompts have those of images."""
        places = {"I": IMAGE, "V": video or self.spec.video_soft or VIDEO}
        ids = list(BEFORE)
        for index, words in enumerate(theirs.texts):
            ids += BETWEEN if index else ()
            ids += self.ids_of(words, places)
        return [*ids, *BEHIND]


def _digest_of(medium: ProcessedMedia) -> bytes:
    return hashlib.sha256(b"".join(one.rows.tobytes() for one in medium.inputs)).digest()


def given_of(prompt: Ready, theirs: Theirs) -> dict[str, Any]:
    ids = torch.tensor([prompt.ids])
    types = {"mm_token_type_ids": (ids == IMAGE).long()} if theirs.typed else {}
    return {"input_ids": ids, **types, **theirs.given}


def rename(file: Path, case: PictureCase) -> None:
    if not case.renamed:
        return
    stored = {}
    for name, tensor in load_file(file).items():
        for pattern, new in case.renamed:
            name = re.sub(pattern, new, name)
        stored[name] = tensor
    save_file(stored, file)


@pytest.fixture(scope="module", params=CASES)
def shown(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shown]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model")
    config, oracle_class = case.build(folder)
    oracle = save_media_oracle(oracle_class, config, folder)
    if case.mended is not None:
        case.mended(oracle)
    rename(folder / "model.safetensors", case)
    (folder / "preprocessor_config.json").write_text(json.dumps(case.files))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(case.video_files))
    added = [{"id": id, "content": mark} for mark, id in case.marks.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    spec = read_media(folder, json.loads((folder / "config.json").read_text()))
    assert spec is not None
    engine = SeeingEngine(folder, longest=case.longest)
    yield Shown(case=case, folder=folder, oracle=oracle, engine=engine, spec=spec)
    engine.close()


def test_pictures_are_seen_as_by_the_reference(shown: Shown) -> None:
    pictures = [picture(*size, seed) for seed, size in enumerate(shown.case.sizes)]
    media = shown.processed(pictures)
    prompt = shown.prompt(media)
    theirs = shown.case.process(pictures, media)
    assert prompt.ids == shown.expected_ids(theirs)
    expected = answer_of(shown.oracle, prompt, given_of(prompt, theirs), 5)
    compare_answers(shown.engine.run(prompt)[0], expected)
    engine = shown.engine.with_steps(shown.folder, max_step_tokens=shown.case.step_tokens[0])
    compare_answers(engine.run(prompt)[0], expected)


def test_clips_are_seen_as_by_the_reference(shown: Shown) -> None:
    if shown.case.clip is None:
        pytest.skip("takes no video")
    count = shown.case.num_frames
    frames = [picture(40, 24, seed) for seed in range(count)]
    processor = PROCESSORS.load(shown.spec.processor)(shown.spec.settings)
    medium = processor.video(iter(frames), range(count), Sampling(count, shown.case.rate))
    prompt = shown.prompt([medium], "video")
    theirs = shown.case.clip(frames, medium)
    assert prompt.ids == shown.expected_ids(theirs)
    ids = torch.tensor([shown.expected_ids(theirs, VIDEO)])
    types = {"mm_token_type_ids": 2 * (ids == VIDEO).long()} if theirs.typed else {}
    given = {"input_ids": ids, **types, **theirs.given}
    with torch.inference_mode():
        logprobs = shown.oracle(**given).logits[0].float().log_softmax(-1)
    *before, last = list(logprobs.numpy())
    expected = Answer(tokens=[int(last.argmax())], prompt_logprobs=before, logprobs=[last])
    engine = shown.engine.with_steps(shown.folder, max_step_tokens=shown.case.step_tokens[0])
    compare_answers(engine.run(prompt, max_tokens=1)[0], expected)


def until_placeholder(tokens: list[int]) -> list[int]:
    """Tokens up to the first placeholder: what one is that was chosen, references see otherwise than we do."""
    first = next((i for i, token in enumerate(tokens) if token in (IMAGE, VIDEO)), len(tokens))
    return tokens[: first + 1]


@pytest.mark.slow
def test_again_beside_text_and_in_other_chunks(shown: Shown) -> None:
    pictures = [picture(*size, seed) for seed, size in enumerate(shown.case.sizes)]
    media = shown.processed(pictures)
    prompt = shown.prompt(media)
    given = given_of(prompt, shown.case.process(pictures, media))
    expected = answer_of(shown.oracle, prompt, given, 12)
    plain, theirs = prompt, expected
    if shown.case.reads:
        plain = Ready(list(range(3, 30)), ())
        theirs = answer_of(shown.oracle, plain, {"input_ids": torch.tensor([plain.ids])}, 12)
    for tokens in (*shown.case.step_tokens[1:], 64):
        engine = SeeingEngine(shown.folder, longest=shown.case.longest, max_step_tokens=tokens)
        answers = engine.run(prompt, plain, max_tokens=12, scored=False)
        wanted = [until_placeholder(one.tokens) for one in (expected, theirs)]
        assert [until_placeholder(one.tokens) for one in answers] == wanted
        (again,) = engine.run(prompt, max_tokens=12, scored=False)
        assert until_placeholder(again.tokens) == wanted[0]
        engine.close()
