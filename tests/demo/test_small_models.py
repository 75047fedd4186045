"""The training's models that see, hear and mix experts are transformers' own; what training shows them is what the
server makes of the same messages; and their attention covers exactly the mask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from demo import documents
from demo.documents import attend, prepare
from demo.hears import export as hearing
from demo.hears.model import HearingShape, Whisper
from demo.hears.phrases import phrase
from demo.hears.train import Ear, loss_of
from demo.hears.windows import Utterance, Window, row_of
from demo.mixture import export as mixing
from demo.mixture.delta import CHUNK
from demo.mixture.model import KimiLinear, MixtureShape
from demo.mixture.train import aligned
from demo.sees import export as seeing
from demo.sees.freeze import frozen_items
from demo.sees.item import Showing, is_held_out
from demo.sees.model import Qwen3VL, SeeingShape, Seen
from demo.sees.rows import CONTROL_ID, SETTINGS, Packed, conversation
from demo.sees.shapes import comparing, counting, in_order, placing, relating
from demo.sees.texts import Fonts, reading, reading_lines
from demo.trainer import Trainer
from headrace.bench.held_out import SEEN, read_items
from headrace.front.media.log_mel import LogMel
from headrace.front.media.preparation import MediaPreparer, MediaRequest
from headrace.front.media.processors.families import read_media
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.tokenizer_files import load_tokenizer

BOUND = 1e-4
MAKERS: dict[str, Callable[[Random], Showing]] = {
    "count": counting,
    "place": placing,
    "compare": comparing,
    "order": in_order,
}


def stirred(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """The model with weights that are not near 0."""
    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.add_(0.04 * torch.randn(parameter.shape, generator=source))
    return model.eval()


def as_batch(packed: Packed) -> Seen:
    """A conversation alone, without padding."""

    def whole(values: Any) -> Tensor:
        return torch.tensor(np.array(values))[None]

    numbers = np.repeat(np.arange(len(packed.pictures)), [len(one) for one in packed.pictures])
    size = len(packed.tokens)
    return Seen(
        patches_BPX=whole(np.concatenate(packed.pictures)),
        places_BP4=whole(np.concatenate(packed.places)),
        picture_BP=whole(numbers),
        tokens_BT=whole(packed.tokens),
        slots_BT=whole(packed.slots),
        positions_BT3=whole(packed.positions),
        targets_BT=torch.zeros(1, size, dtype=torch.long),
        document_BT=torch.zeros(1, size, dtype=torch.long),
    )


def reference_inputs(packed: Packed, seen: Seen) -> dict[str, Tensor]:
    """The same as transformers takes it."""
    pixels = seen.patches_BPX[0].float() / 127.5 - 1
    grids = [[1, int(places[0, 2]), int(places[0, 3])] for places in packed.places]
    ids = seen.tokens_BT
    image, video = (ids == CONTROL_ID[f"<|{kind}_pad|>"] for kind in ("image", "video"))
    inputs = {"input_ids": ids, "mm_token_type_ids": image.long() + 2 * video.long()}
    if video.any():
        grid = torch.tensor([[len(grids), *grids[0][1:]]])
        return inputs | {"pixel_values_videos": pixels, "video_grid_thw": grid}
    return inputs | {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


@pytest.fixture(scope="module")
def seeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sees")
    torch.manual_seed(0)
    seeing.export(stirred(Qwen3VL(SeeingShape())).state_dict(), folder)
    return folder


def test_what_sees_in_training_is_qwen3_vl(seeing_folder: Path) -> None:
    shape = SeeingShape()
    ours = stirred(Qwen3VL(shape))
    config = transformers.Qwen3VLConfig(**seeing.hub_config(shape))
    config._attn_implementation = "eager"
    oracle = transformers.Qwen3VLForConditionalGeneration(config).eval()
    found = oracle.load_state_dict(seeing.hub_weights(ours.state_dict(), shape), strict=False)
    assert found.missing_keys == ["lm_head.weight"] and not found.unexpected_keys
    for make in (comparing, in_order):
        packed = conversation(make(Random(5)))
        seen = as_batch(packed)
        look = attend(prepare(seen.picture_BP, causal=False))
        read = attend(prepare(seen.document_BT, causal=True))
        with torch.inference_mode():
            difference = (
                ours(seen, look, read) - oracle(**reference_inputs(packed, seen)).logits
            ).abs()
        assert difference.max() < BOUND


@pytest.mark.covering(0)
@pytest.mark.parametrize("task", MAKERS)
def test_training_shows_what_the_server_makes_of_the_same_messages(
    seeing_folder: Path, task: str
) -> None:
    """Tokens, patches and grids, of pictures; of clips the frames go through a lossy file there."""
    item = frozen_items(task, 1, 3, no_fonts())[0]
    rng = Random(f"held out {task} 3")
    while True:
        showing = MAKERS[task](rng)
        turn = next((turn for turn in showing.turns if turn.task == task), None)
        if turn is not None:
            break
    packed = conversation(Showing(media=showing.media, turns=(turn,)))
    tokenizer = load_tokenizer(str(seeing_folder))
    spec = read_media(seeing_folder, seeing.hub_config(SeeingShape()))
    assert spec is not None and spec.settings == SETTINGS
    preparer, template = (
        MediaPreparer(spec, tokenizer),
        ChatTemplate(tokenizer.facts.chat_template, tokenizer),
    )
    try:
        prepared = asyncio.run(preparer.prepare(item.messages, MediaRequest()))
        prompt = template.render(prepared.messages, add_generation_prompt=True)
        ids, media = preparer.expand(prompt, prepared.media, field="messages")
    finally:
        preparer.close()
        template.close()
    learnt = packed.learnt.index(True)
    assert ids == packed.tokens[:learnt]
    assert len(media) == len(packed.pictures)
    for one, places in zip(media, packed.places, strict=True):
        assert one.grid == (1, *places[0, 2:])
    if task != "order":
        rows = [np.frombuffer(one.rows, np.uint8).reshape(-1, 3, 1, 64) for one in media]
        shown = [picture.reshape(-1, 3, 2, 64)[:, :, :1] for picture in packed.pictures]
        assert all(np.array_equal(a, b) for a, b in zip(rows, shown, strict=True))


def no_fonts() -> Fonts:
    fonts = Fonts.__new__(Fonts)
    fonts.files = [None]
    return fonts


def test_a_text_is_held_out_by_its_characters() -> None:
    """Of Pillow's own font."""
    rng = Random(2)
    for held_out in (False, True):
        answers = [reading(rng, no_fonts(), held_out=held_out).turns[0].answer for _ in range(30)]
        assert {is_held_out(answer) for answer in answers} == {held_out}


def test_training_reads_more_lines_and_asks_more_relations_than_the_items_do() -> None:
    rng = Random(3)
    for _ in range(20):
        answer = reading_lines(rng, no_fonts()).turns[0].answer
        assert not is_held_out(answer) and "\n" in answer
    asked = [relating(rng).turns for _ in range(20)]
    assert sum(len(turns) for turns in asked) > 60
    assert {turn.answer for turns in asked for turn in turns if turn.task == "relation"} == {
        "yes",
        "no",
    }


def test_the_shipped_items_have_every_task_and_texts_that_are_held_out() -> None:
    items = read_items(SEEN)
    assert len(items) == 10 and all(len(of_task) == 30 for of_task in items.values())
    texts = [item.expected for task in items if task.startswith("read") for item in items[task]]
    assert all(is_held_out(text) for text in texts)


def test_what_hears_in_training_is_whisper() -> None:
    torch.manual_seed(0)
    shape = HearingShape()
    ours = stirred(Whisper(shape))
    config = transformers.WhisperConfig(**hearing.hub_config(shape))
    oracle = transformers.WhisperForConditionalGeneration(config).eval()
    found = oracle.load_state_dict(hearing.hub_weights(ours.state_dict()), strict=False)
    assert found.missing_keys == ["proj_out.weight"] and not found.unexpected_keys
    wave = (3000 * np.random.default_rng(0).standard_normal(160_000)).astype(np.int16)
    wave[90_000:] = 0
    spectrogram = Ear(shape, torch.device("cpu"))(torch.from_numpy(wave)[None])
    assert np.abs(spectrogram[0].numpy() - LogMel(80, 1000).features(wave)).max() < 1e-5
    tokens = torch.arange(3, 33)[None]
    with torch.inference_mode():
        logits = oracle(input_features=spectrogram, decoder_input_ids=tokens).logits
        assert (ours(spectrogram, tokens)[0] - logits).abs().max() < BOUND


def test_training_goes_on_from_exported_weights_that_lack_its_own_head() -> None:
    model = Whisper(HearingShape())
    with torch.no_grad():
        model.letters.bias.fill_(2.0)
    trainer = Trainer(model, loss_of, rate=1e-3, fall=0.6)
    trainer.load(Path("demo/models/speech/model.safetensors"))
    exported = load_file("demo/models/speech/model.safetensors")
    name = "model.encoder.conv1.weight"
    assert torch.equal(model.state_dict()[name].flatten(), exported[name].float().flatten())
    assert (model.letters.bias == 2.0).all()


def test_what_mixes_experts_in_training_is_kimi_linear(tmp_path: Path) -> None:
    """Two documents of a row are two texts."""
    torch.manual_seed(0)
    ours = stirred(KimiLinear(MixtureShape()))
    for layer in ours.model.layers[1:]:
        layer.block_sparse_moe.gate.e_score_correction_bias.add_(0.1 * torch.randn(8))
    mixing.export(ours.state_dict(), Path("demo/model"), tmp_path)
    weights = {name: value.clone() for name, value in mixing.hub_weights(ours.state_dict()).items()}
    mixing.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    sizes = (3 * CHUNK, 5 * CHUNK)
    tokens = torch.randint(0, 4096, (1, sum(sizes)))
    place = torch.cat([torch.arange(size) for size in sizes])[None]
    document = torch.cat([torch.full((size,), size) for size in sizes])[None]
    with torch.inference_mode():
        logits = ours(tokens, place, attend(prepare(document, causal=True)))
        wanted = [oracle(input_ids=one).logits for one in tokens.split(sizes, dim=1)]
    assert (logits - torch.cat(wanted, dim=1)).abs().max() < BOUND


def test_documents_are_filled_up_to_whole_chunks() -> None:
    ids, learnt = aligned((np.arange(5, dtype=np.uint16), np.ones(5, np.bool_)))
    assert len(ids) == len(learnt) == CHUNK and learnt.sum() == 5


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_those_that_hold_an_unmasked_pair(causal: bool) -> None:
    sizes = [[1, 130, 253, 128], [512], [100, 300, 56, 56]]
    document = torch.stack(
        [torch.cat([torch.full((n,), i) for i, n in enumerate(row, 1)]) for row in sizes]
    )
    mask = prepare(document, causal=causal)
    assert isinstance(mask, Tensor)
    needed = mask[:, 0].view(3, 4, 128, 4, 128).any(dim=4).any(dim=2)
    blocks = documents._blocks(document, causal)
    assert torch.equal(blocks.to_dense()[:, 0].bool(), needed)
    places = torch.arange(512)
    b, q, k = torch.meshgrid(torch.arange(3), places, places, indexing="ij")
    assert torch.equal(blocks.mask_mod(b, torch.tensor(0), q, k), mask[:, 0])


def test_a_window_is_learnt_behind_its_language_and_task() -> None:
    """Of a voice that says noise: what is written, and its times."""
    tokenizer = Tokenizer.from_file("demo/models/speech/tokenizer.json")
    rng = Random(1)
    one = Utterance(phrase=phrase(rng, "de", kind="time"), wave=np.ones(8000, np.float32))
    window = Window(language="de", wave=np.zeros(160_000, np.int16), said=((1.5, one),))
    row = row_of(window, tokenizer, rng, times=True)
    assert row is not None
    targets = row["targets"]
    learnt = tokenizer.decode(targets[targets >= 0].tolist(), skip_special_tokens=False)
    assert learnt == f"<|de|><|1.50|> {one.phrase.written}<|2.00|><|endoftext|>"
    begins = tokenizer.decode(row["tokens"][:3].tolist(), skip_special_tokens=False)
    assert begins == "<|startoftranscript|><|de|><|transcribe|>"
