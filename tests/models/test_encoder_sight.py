"""Encoder-decoders that see, against transformers on tiny random configurations: the pixels of its processors, the
tokens and log-probabilities of its models; requests beside each other, after preemptions, and of an image that is
encoded already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.donut.image_processing_pil_donut import DonutImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.nougat.image_processing_pil_nougat import NougatImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from headrace.back.executor.inline import InlineExecutor
from headrace.base.config.media import MediaSpec
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, SchedulerSpec
from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.encoder_cache import EncoderCacheHook
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processors.families import PROCESSORS, read_media
from tests.front.media.pictures import picture
from tests.models.media import save_media_oracle
from tests.models.oracle import model_spec

START, NUM_TOKENS = 2, 8
IMAGE, BEGIN, END = 90, 91, 92


@dataclass(frozen=True, kw_only=True)
class Case:
    """`prompt`: a text with a mark for each image; `marks`: control tokens around them. `pixels`: what the reference's
    processor makes of pictures."""

    config: Callable[[], Any]
    oracle: Any
    files: dict[str, Any]
    pixels: Callable[[Sequence[Any]], torch.Tensor]
    reads: int = 64
    marks: dict[str, int] = field(default_factory=dict)
    mark: int = IMAGE
    text: tuple[int, ...] = (5, 9, 33, 7)


def _t5gemma2() -> Any:
    sizes: dict[str, Any] = {
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 96},
        **{"query_pre_attn_scalar": 12, "sliding_window": 6, "max_position_embeddings": 64},
        **{"layer_types": ["sliding_attention", "full_attention"]},
        **{"pad_token_id": 1, "bos_token_id": START},
    }
    vision = {
        **{"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
    }
    marks = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END}
    encoder = {"text_config": sizes, "vision_config": vision, "mm_tokens_per_image": 4, **marks}
    return transformers.T5Gemma2Config(
        encoder=encoder,
        decoder=sizes,
        **{"vocab_size": 97, "decoder_start_token_id": START, "eoi_token_index": END},
        image_token_index=IMAGE,
    )


def _florence2() -> Any:
    vision = {
        **{"depths": [1, 2], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1]},
        **{"patch_prenorm": [False, True], "embed_dim": [8, 16], "num_heads": [2, 4]},
        **{"num_groups": [2, 4], "window_size": 3, "projection_dim": 32},
        **{"max_position_embeddings": 8, "max_temporal_embeddings": 4},
    }
    return transformers.Florence2Config(
        text_config=_bart(), vision_config=vision, image_token_id=IMAGE
    )


def _bart() -> dict[str, Any]:
    return {
        **{"model_type": "bart", "vocab_size": 97, "d_model": 32, "encoder_layers": 2},
        **{"decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2},
        **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 64},
        **{"decoder_start_token_id": START, "pad_token_id": 1, "eos_token_id": 96},
    }


FLORENCE = {
    **{"size": {"height": 32, "width": 32}, "do_center_crop": False, "resample": 3},
    **{"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
}


def _trocr(encoder: Any, **more: Any) -> Any:
    sizes = {
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16},
        **{"intermediate_size": 24, "patch_size": 4, "qkv_bias": False},
    }
    says = transformers.TrOCRConfig(**BART_DECODER, **more)
    return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder(**sizes), says, decoder_start_token_id=START, pad_token_id=1
    )


def _donut() -> Any:
    """Windows at the edges of its first stage are filled up."""
    sees = transformers.DonutSwinConfig(
        **{"image_size": [48, 32], "patch_size": 4, "embed_dim": 8, "depths": [2, 2]},
        **{"num_heads": [2, 4], "window_size": 3},
    )
    says = transformers.MBartConfig(**BART_DECODER, scale_embedding=True)
    return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        sees, says, decoder_start_token_id=START, pad_token_id=1
    )


BART_DECODER = {
    **{"vocab_size": 97, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2},
    **{"decoder_ffn_dim": 40, "max_position_embeddings": 64, "is_decoder": True},
    **{"add_cross_attention": True},
}
VIT = {"size": {"height": 16, "width": 16}}
DONUT = {"size": {"height": 48, "width": 32}, "do_align_long_axis": True}
NOUGAT = {
    **{"size": {"height": 48, "width": 32}, "image_mean": [0.485, 0.456, 0.406]},
    **{"image_std": [0.229, 0.224, 0.225]},
}


def _by(processor: Any, settings: dict[str, Any]) -> Callable[[Sequence[Any]], torch.Tensor]:
    return lambda pictures: processor(**settings)(list(pictures), return_tensors="pt")[
        "pixel_values"
    ]


CASES = {
    "trocr": Case(
        config=lambda: _trocr(transformers.ViTConfig, cross_attention_hidden_size=16),
        oracle=transformers.VisionEncoderDecoderModel,
        files=VIT,
        pixels=_by(ViTImageProcessorPil, VIT),
        reads=17,
        text=(),
    ),
    "trocr-small": Case(
        config=lambda: _trocr(
            transformers.DeiTConfig,
            **{"use_learned_position_embeddings": False, "layernorm_embedding": False},
            **{"scale_embedding": True, "activation_function": "relu"},
        ),
        oracle=transformers.VisionEncoderDecoderModel,
        files=VIT,
        pixels=_by(ViTImageProcessorPil, VIT),
        reads=18,
        text=(),
    ),
    "donut": Case(
        config=_donut,
        oracle=transformers.VisionEncoderDecoderModel,
        files=DONUT,
        pixels=_by(DonutImageProcessorPil, DONUT),
        reads=24,
        text=(),
    ),
    "nougat": Case(
        config=_donut,
        oracle=transformers.VisionEncoderDecoderModel,
        files={**NOUGAT, "image_processor_type": "NougatImageProcessor"},
        pixels=_by(NougatImageProcessorPil, NOUGAT),
        reads=24,
        text=(),
    ),
    "florence2": Case(
        config=_florence2,
        oracle=transformers.Florence2ForConditionalGeneration,
        files=FLORENCE,
        pixels=_by(CLIPImageProcessorPil, FLORENCE),
    ),
    "t5gemma2": Case(
        config=_t5gemma2,
        oracle=transformers.T5Gemma2ForConditionalGeneration,
        files={"size": {"height": 16, "width": 16}},
        pixels=_by(Gemma3ImageProcessorPil, VIT),
        marks={"<start_of_image>": BEGIN, "<end_of_image>": END},
        mark=BEGIN,
    ),
}


def _core(
    engine: EngineSpec, rows: dict[str, int] | None = None
) -> tuple[EngineCore, EncoderCacheHook]:
    """`rows`: so many of a pass are encoded beside a step of others."""
    executor = InlineExecutor(engine)
    facts = executor.facts
    rows = rows or facts.media_rows
    hook = EncoderCacheHook(capacity=facts.media_tokens, step_tokens=64, rows=rows)
    return EngineCore(engine, executor, hooks=(hook,)), hook


@dataclass(frozen=True, kw_only=True)
class Seen:
    case: Case
    oracle: Any
    spec: MediaSpec
    engine: EngineSpec

    def ids_of(self, words: str) -> list[int]:
        ids: list[int] = []
        while words:
            mark = next((one for one in self.case.marks if words.startswith(one)), words[0])
            ids.append(self.case.marks.get(mark, 10 + ord(mark[0]) % 70))
            words = words[len(mark) :]
        return ids

    def prompt(self, pictures: Sequence[Any]) -> tuple[list[int], tuple[MediaInput, ...]]:
        """What the encoder reads."""
        processor = PROCESSORS.load(self.spec.processor)(self.spec.settings)
        media = []
        for one in pictures:
            medium = processor.image(one)
            key = hashlib.sha256(b"".join(each.rows.tobytes() for each in medium.inputs)).digest()
            media.append(_prepared(medium, "image", key, 0, self.spec.settings.merge))
        ids = list(self.case.text)
        if self.spec.ahead is None:
            for _ in pictures:
                ids[2:2] = [self.case.mark]
        return expanded(ids, media, self.spec, self.ids_of, field="prompt")

    def expected(self, ids: Sequence[int], pictures: Sequence[Any]) -> tuple[list[int], np.ndarray]:
        """Greedy tokens and their log-probabilities by the reference."""
        given: dict[str, Any] = {} if self.spec.alone else {"input_ids": torch.tensor([ids])}
        if pictures:
            given["pixel_values"] = self.case.pixels(pictures)
        decoded, rows = [START], []
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                out = self.oracle(**given, decoder_input_ids=torch.tensor([decoded]))
                rows.append(out.logits[0, -1].float().log_softmax(-1).numpy())
                decoded.append(int(rows[-1].argmax()))
        return decoded[1:], np.stack(rows)


def _request(
    id: int, ids: Sequence[int], media: tuple[MediaInput, ...], *, tokens: int = NUM_TOKENS
) -> EngineRequest:
    return EngineRequest(
        id=id,
        prompt=np.asarray([START], "<i4").tobytes(),
        encoder=np.asarray(ids, "<i4").tobytes(),
        media=media,
        stop=StopRules(max_tokens=tokens),
        sampling=RowSampling(temperature=0.0, logprobs=-1),
    )


def _answers(core: EngineCore, requests: Sequence[EngineRequest], apart: int = 0) -> dict[int, Any]:
    """By request its tokens and their rows of log-probabilities; and preemptions, under -1. `apart`: steps between
    the requests' arrivals."""
    got: dict[int, Any] = {one.id: ([], []) for one in requests}
    got[-1], waiting, steps = 0, list(requests), 0
    while core.has_work or waiting:
        while waiting and steps >= apart * (len(requests) - len(waiting)):
            core.add(waiting.pop(0))
        batch, steps = core.step(wait=True).tokens, steps + 1
        if batch is None:
            continue
        scores = zip(batch.ids.tolist(), batch.tokens.tolist(), batch.logprobs, strict=True)
        for id, token, score in scores:
            row = np.zeros(int(score.ids.max()) + 1, np.float32)
            row[score.ids] = score.values
            got[id][0].append(token)
            got[id][1].append(row)
        for end in batch.finished:
            assert end.error is None, end.error
            got[-1] += end.num_preemptions
    return got


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model")
    oracle = save_media_oracle(case.oracle, case.config(), folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(case.files))
    spec = read_media(folder, json.loads((folder / "config.json").read_text()))
    assert spec is not None
    model = model_spec(folder, max_model_len=64, encoder_tokens=case.reads)
    engine = EngineSpec(
        model=msgspec.structs.replace(model, image_norm=spec.norm),
        kv=KVSpec(block_tokens=16, prefix_caching=False, num_blocks=200),
        scheduler=SchedulerSpec(max_step_tokens=16, max_running=4),
        device=DeviceSpec(device="cpu", executor="inline", threads=1),
    )
    return Seen(case=case, oracle=oracle, spec=spec, engine=engine)


def test_images_before_an_encoder_are_seen_as_by_the_reference(seen: Seen) -> None:
    pictures = [picture(40, 24, 1), picture(13, 31, 2)]
    shown = [pictures[:1], pictures[1:], pictures[:1]]
    if seen.spec.most.get("image", 2) > 1:
        shown.append(pictures)
    if not seen.spec.alone:
        shown.append([])
    prompts = [seen.prompt(some) for some in shown]
    core, hook = _core(seen.engine)
    got = _answers(core, [_request(i, *one) for i, one in enumerate(prompts)])
    for i, (some, (ids, _)) in enumerate(zip(shown, prompts, strict=True)):
        tokens, rows = seen.expected(ids, some)
        assert np.abs(np.stack(got[i][1]) - rows).max() < 1e-4
        assert got[i][0] == tokens
    assert hook.figures()["media_hits"] >= 1, "the same image twice is encoded once"
    core.executor.close()


@pytest.mark.parametrize("seen", ["florence2"], indirect=True)
def test_preempted_requests_see_their_images_again(seen: Seen) -> None:
    pictures = [picture(40, 24, 1), picture(13, 31, 2)]
    prompts = [seen.prompt([pictures[i % 2]]) for i in range(4)]
    blocks = max(11, 3 * (2 + -(-max(len(ids) for ids, _ in prompts) // 16)))
    kv = msgspec.structs.replace(seen.engine.kv, num_blocks=blocks)
    core, _ = _core(msgspec.structs.replace(seen.engine, kv=kv))
    got = _answers(core, [_request(i, *one, tokens=55) for i, one in enumerate(prompts)])
    assert got[-1] > 0
    for i, (ids, _) in enumerate(prompts):
        assert got[i][0][:NUM_TOKENS] == seen.expected(ids, [pictures[i % 2]])[0]
    core.executor.close()


@pytest.mark.parametrize("seen", ["t5gemma2"], indirect=True)
def test_images_are_encoded_ahead_beside_others(seen: Seen) -> None:
    pictures = [picture(40, 24, 1), picture(13, 31, 2)]
    prompts = [seen.prompt([one]) for one in pictures]
    core, _ = _core(seen.engine, {"image": 8})
    got = _answers(core, [_request(i, *one) for i, one in enumerate(prompts)], apart=2)
    for i, (ids, _) in enumerate(prompts):
        assert got[i][0] == seen.expected(ids, [pictures[i]])[0]
    core.executor.close()


@pytest.mark.parametrize("seen", ["donut"], indirect=True)
def test_a_text_has_no_place_for_the_one_image(seen: Seen) -> None:
    token, processor = seen.spec.image_token, PROCESSORS.load(seen.spec.processor)
    assert token is not None
    medium = _prepared(processor(seen.spec.settings).image(picture(40, 24, 1)), "image", b"", 0, 1)
    ids, (one,) = expanded([7, 9], [medium], seen.spec, seen.ids_of, field="prompt")
    assert ids == [token] * 24 + [7, 9] and (one.offset, one.num_tokens) == (0, 24)
    assert expanded(ids, [medium], seen.spec, seen.ids_of, field="prompt")[0] == ids
    with pytest.raises(InvalidRequest, match="2 placeholders of image"):
        expanded([7, token, 9], [medium], seen.spec, seen.ids_of, field="prompt")
