"""Families that see as their authors publish them: Intern-S1 and Step3-VL by transformers' classes of the same layers,
Phi-3-vision by CLIP's and Phi-3's with the head between them written out (MUL-03)."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from headrace.back.attention.plan import EncodedTokens
from headrace.back.models.families import architecture_of
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.errors import CheckpointError, InvalidRequest
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.families import PROCESSORS, read_media
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.front.media.pictures import picture
from tests.models.media import SeeingEngine, answer_of, compare_answers, save_media_oracle
from tests.models.oracle import model_spec, randomize
from tests.models.picture_cases import CASES as PICTURES
from tests.models.picture_cases import IMAGE, as_picture
from tests.models.picture_cases_more import CASES as MORE
from tests.models.sight import read_spec, said
from tests.models.test_encoders import batch_of
from tests.models.test_pictures import Ready, Shown, _digest_of, given_of
from tests.models.test_towers import CASES, CLIP, TEXT, TOWER, Seen, save_case, two_images

SIDE, PATCH = 16, 4
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def test_names_lead_to_their_families() -> None:
    names = {
        "T5WithLMHeadModel": "t5",
        "InternS1ForConditionalGeneration": "internvl",
        "StepVLForConditionalGeneration": "step3p7",
        "Phi3VForCausalLM": "phi3_v",
        "DeepseekOCR2ForCausalLM": "deepseek_ocr2",
    }
    assert {name: architecture_of({"architectures": [name]}).family for name in names} == names


def renamed(folder: Path, *patterns: tuple[str, str], **keys: Any) -> None:
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = {}
    for name, tensor in load_file(file).items():
        for pattern, new in patterns:
            name = re.sub(pattern, new, name)
        tensors[name] = tensor
    save_file(tensors, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))


@pytest.mark.slow
def test_intern_s1_sees_as_internvl_does(tmp_path: Path) -> None:
    case = CASES["internvl"]
    oracle = save_case(case, tmp_path)
    renamed(
        tmp_path,
        (r"^language_model\.lm_head", "lm_head"),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
        architectures=["InternS1ForConditionalGeneration"],
        model_type="interns1",
    )
    spec = read_media(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert spec is not None and spec.processor == "tiled"
    engine = SeeingEngine(tmp_path)
    seen = Seen(case=case, folder=tmp_path, oracle=oracle, engine=engine)
    prompt = two_images(seen)
    compare_answers(engine.run(prompt)[0], seen.expected(prompt))
    engine.close()


@pytest.mark.slow
def test_step3_vl_sees_as_step_3_7_does_around_qwen_3(tmp_path: Path) -> None:
    """Its decoder is transformers' Qwen 3, into which the tower's rows go; tower and pictures are Step 3.7's."""
    case = PICTURES["step3p7"]
    config, oracle_class = case.build(tmp_path)
    whole = save_media_oracle(oracle_class, config, tmp_path)
    text = transformers.Qwen3Config(**{**TEXT, "hidden_size": config.text_config.hidden_size})
    text._attn_implementation = "eager"
    decoder = transformers.Qwen3ForCausalLM(text).eval()
    randomize(decoder, seed=3)
    file = tmp_path / "model.safetensors"
    stored = {
        name: tensor
        for name, tensor in load_file(file).items()
        if name.startswith(("vision_model", "vit_large_projector"))
    }
    assert stored
    save_file(stored | {n: t.contiguous() for n, t in decoder.state_dict().items()}, file)
    keys = json.loads((tmp_path / "config.json").read_text())
    keys |= {"architectures": ["StepVLForConditionalGeneration"], "model_type": "step_robotics"}
    keys["text_config"] = json.loads(text.to_json_string()) | {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(case.files))
    added = [{"id": id, "content": mark} for mark, id in case.marks.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    spec = read_media(tmp_path, keys)
    assert spec is not None
    engine = SeeingEngine(tmp_path)
    shown = Shown(case=case, folder=tmp_path, oracle=whole, engine=engine, spec=spec)
    pictures = [picture(*size, seed) for seed, size in enumerate(case.sizes)]
    media = shown.processed(pictures)
    prompt = shown.prompt(media)
    theirs = case.process(pictures, media)
    assert prompt.ids == shown.expected_ids(theirs)
    ids = torch.tensor([prompt.ids])
    given = given_of(prompt, theirs)
    with torch.inference_mode():
        features = whole.model.get_image_features(
            **{key: one for key, one in given.items() if key != "input_ids"}
        )
        rows = features if isinstance(features, torch.Tensor) else features.pooler_output
        rows = torch.cat(list(rows)) if isinstance(rows, (list, tuple)) else rows
    compare_answers(engine.run(prompt, max_tokens=3)[0], said(decoder, ids, rows.flatten(0, -2), 3))
    engine.close()


@pytest.mark.slow
def test_deepseek_ocr_2_is_read_as_its_authors_publish_it(tmp_path: Path) -> None:
    """The tensors have the names that transformers stores; SAM's last width stands wrongly in the config."""
    case = MORE["deepseek-ocr2"]
    config, oracle_class = case.build(tmp_path)
    oracle = save_media_oracle(oracle_class, config, tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())
    text, vision = keys.pop("text_config"), keys.pop("vision_config")
    sam, encoder = vision["sam_config"], vision["encoder_config"]
    sam |= {"width": sam.pop("hidden_size"), "layers": sam.pop("num_hidden_layers")}
    sam |= {"heads": sam.pop("num_attention_heads"), "downsample_channels": [12, 1024]}
    encoder["dim"] = encoder.pop("hidden_size")
    del keys["image_token_id"], text["mlp_layer_types"], text["model_type"]
    keys |= {
        **{"architectures": ["DeepseekOCR2ForCausalLM"], "model_type": "deepseek_vl_v2"},
        "language_config": {**text, "use_mla": False, "first_k_dense_replace": 1},
        "vision_config": {
            **{"image_size": 1024, "mlp_ratio": 3.7362, "model_name": "deepencoderv2"},
            "width": {"sam_vit_b": sam, "qwen2-0-5b": encoder},
        },
        "projector_config": {"input_dim": 32, "n_embed": 48, "projector_type": "linear"},
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "processor_config.json").write_text(json.dumps({**case.files, **HALVES}))
    added = [{"id": IMAGE, "content": "<image>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    spec = read_spec(tmp_path)
    assert spec.written == {"image": "<image>"}
    engine = SeeingEngine(tmp_path, longest=case.longest)
    shown = Shown(case=case, folder=tmp_path, oracle=oracle, engine=engine, spec=spec)
    media = shown.processed([picture(*case.sizes[0], 0)])
    prompt = shown.prompt(media)
    theirs = case.process([picture(*case.sizes[0], 0)], media)
    assert prompt.ids == shown.expected_ids(theirs)
    expected = answer_of(oracle, prompt, given_of(prompt, theirs), 3)
    compare_answers(engine.run(prompt, max_tokens=3)[0], expected)
    engine.close()


class Phi3Vision:
    """The parts of the reference, and their tensors by published names."""

    def __init__(self) -> None:
        clip = transformers.CLIPVisionConfig(**TOWER, hidden_act="quick_gelu")
        text = transformers.Phi3Config(**TEXT, tie_word_embeddings=False)
        for config in (clip, text):
            config._attn_implementation = "eager"
        torch.manual_seed(5)
        self.tower = transformers.CLIPVisionModel(clip).eval()
        self.decoder = transformers.Phi3ForCausalLM(text).eval()
        width = 4 * TOWER["hidden_size"]
        self.between = torch.nn.Sequential(
            torch.nn.Linear(width, TEXT["hidden_size"]),
            torch.nn.GELU(),
            torch.nn.Linear(TEXT["hidden_size"], TEXT["hidden_size"]),
        )
        for part in (self.tower, self.decoder, self.between):
            randomize(part, seed=7)
        self.ends = [torch.randn(width) for _ in range(2)]

    def save(self, folder: Path) -> None:
        at = "model.vision_embed_tokens."
        tensors = dict(self.decoder.state_dict())
        for name, one in self.tower.state_dict().items():
            inside = name.removeprefix("vision_model.")
            tensors[f"{at}img_processor.vision_model.{inside}"] = one
        for name, one in self.between.state_dict().items():
            tensors[f"{at}img_projection.{name}"] = one
        tensors[f"{at}sub_GN"] = self.ends[0].view(1, 1, 1, -1)
        tensors[f"{at}glb_GN"] = self.ends[1].view(1, 1, -1)
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        config = json.loads(self.decoder.config.to_json_string())
        config |= {
            **{"architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v"},
            **{"vision_config": TOWER, "img_processor": {"image_dim_out": TOWER["hidden_size"]}},
            "embd_layer": {"use_hd_transform": True, "with_learnable_separator": True},
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "preprocessor_config.json").write_text('{"num_crops": 6}')
        added = [{"id": IMAGE, "content": "<|image|>"}]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))

    def rows(self, medium: ProcessedMedia) -> torch.Tensor:
        """What stands for a picture: its tiles row by row of the whole, a separator, the whole small."""
        mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in CLIP)
        parts = []
        for one in medium.inputs:
            tiles = [
                as_picture(rows, (1, *one.grid[1:]), merge=2)
                for rows in np.split(one.rows, one.grid[0])
            ]
            pixels = (torch.from_numpy(np.stack(tiles)).float() / 255 - mean) / std
            with torch.inference_mode():
                states = self.tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
            assert one.cut is not None
            columns, half = one.cut.columns, SIDE // PATCH // 2
            down = len(tiles) // columns
            x = states.view(down, columns, half, 2, half, 2, -1).permute(0, 2, 1, 4, 3, 5, 6)
            x = x.reshape(down * half, columns * half, -1)
            x = torch.cat((x, self.ends[0].expand(len(x), 1, -1)), dim=1).flatten(0, 1)
            parts += [x, self.ends[1][None]] if not parts else [x]
        with torch.inference_mode():
            return self.between(torch.cat(parts))


def test_phi_3_vision_sees_as_its_parts_do(tmp_path: Path) -> None:
    reference = Phi3Vision()
    reference.save(tmp_path)
    spec = read_media(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert spec is not None and spec.written == {"image": "<|image|>"}
    processor = PROCESSORS.load(spec.processor)(spec.settings)
    media = [processor.image(picture(*size, 1)) for size in ((40, 24), (9, 20))]
    prepared = [_prepared(one, "image", _digest_of(one), 0, 2) for one in media]
    ids, spans = expanded([3, IMAGE, 7, IMAGE, 9], prepared, spec, lambda _: [], field="prompt")
    rows = torch.cat([reference.rows(one) for one in media])
    wanted = said(reference.decoder, torch.tensor([ids]), rows, 3)
    engine = SeeingEngine(tmp_path)
    compare_answers(engine.run(Ready(ids, spans), max_tokens=3)[0], wanted)
    engine.close()


def test_phi_3_vision_enlarges_a_picture_to_the_tiles_it_may_have(tmp_path: Path) -> None:
    """Six at most: 40 x 24 becomes 48 x 28 on a ground of 48 x 32; a picture of no height is refused."""
    Phi3Vision().save(tmp_path)
    spec = read_media(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert spec is not None
    processor = PROCESSORS.load(spec.processor)(spec.settings)
    tiles, whole = processor.image(picture(40, 24, 1)).inputs
    ground = Image.new("RGB", (48, 32), (255, 255, 255))
    ground.paste(picture(40, 24, 1).resize((48, 28), Image.Resampling.BILINEAR), (0, 2))
    values = torch.from_numpy(np.array(ground)).permute(2, 0, 1)
    wanted = values.unflatten(1, (2, SIDE)).unflatten(3, (3, SIDE)).permute(1, 3, 0, 2, 4)
    for rows, one in zip(np.split(tiles.rows, 6), wanted.flatten(0, 1), strict=True):
        assert np.array_equal(as_picture(rows, (1, 4, 4), merge=2), one.numpy())
    small = F.interpolate(values[None].float(), size=(SIDE, SIDE), mode="bicubic")[0]
    got = as_picture(whole.rows, (1, 4, 4), merge=2).astype(np.float32)
    assert np.abs(got - small.clamp(0, 255).numpy()).max() <= 1
    assert (tiles.num_tokens, whole.num_tokens) == (4 * 7 + 1, 2 * 3)
    upright = processor.image(picture(24, 40, 1)).inputs[0]
    assert upright.cut is not None and (upright.cut.columns, upright.grid[0]) == (2, 6)
    assert math.prod(upright.grid) == len(upright.rows)
    with pytest.raises(InvalidRequest, match="shorter side"):
        processor.image(picture(200, 1, 1))


def write_nemotron(folder: Path) -> tuple[Any, Any, torch.nn.Sequential]:
    """SigLIP's tower, a Llama and what stands between them, under the published names."""
    tower = transformers.SiglipVisionConfig(**TOWER, vision_use_head=False)
    text = transformers.LlamaConfig(**TEXT)
    for config in (tower, text):
        config._attn_implementation = "eager"
    torch.manual_seed(5)
    sees, reads = transformers.SiglipVisionModel(tower).eval(), transformers.LlamaModel(text).eval()
    inner = 4 * TOWER["hidden_size"]
    between = torch.nn.Sequential(
        torch.nn.LayerNorm(inner),
        torch.nn.Linear(inner, TEXT["hidden_size"]),
        torch.nn.GELU(),
        torch.nn.Linear(TEXT["hidden_size"], TEXT["hidden_size"]),
    )
    tensors: dict[str, torch.Tensor] = {}
    for part, at in ((sees, "vision_model."), (reads, "language_model."), (between, "mlp1.")):
        randomize(part, seed=7)
        tensors |= {at + name: one.contiguous() for name, one in part.state_dict().items()}
    nested = {
        re.sub(r"^vision_model\.(?!vision_model)", "vision_model.vision_model.", name): one
        for name, one in tensors.items()
    }
    save_file(nested, folder / "model.safetensors")
    config = {
        **{"architectures": ["LlamaNemotronVLModel"], "model_type": "llama_nemotron_vl"},
        "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
        "llm_config": json.loads(text.to_json_string())
        | {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"},
        **{"downsample_ratio": 0.5, "force_image_size": SIDE, "img_context_token_id": IMAGE},
        **{"pooling": "avg", "ps_version": "v2", "select_layer": -1, "use_thumbnail": True},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sees, reads, between


def test_nemotrons_embedder_of_pages_reads_tiles_among_words(tmp_path: Path) -> None:
    sees, reads, between = write_nemotron(tmp_path)
    facts = read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
    assert facts.encodes and facts.pooling.how == "mean" and facts.media is not None
    processor = PROCESSORS.load(facts.media.processor)(facts.media.settings)
    medium = processor.image(picture(40, 16, 1))
    assert [one.grid for one in medium.inputs] == [(1, 4, 4)] * 4  # three tiles, and the whole
    spec = msgspec.structs.replace(model_spec(tmp_path), head="none")
    model, _ = load_model(spec, mesh=Mesh(), device=torch.device("cpu"), block_tokens=16)
    ids = [3, *[IMAGE] * 16, 7, 9]
    places = torch.arange(1, 17)
    pixels = torch.from_numpy(
        np.stack([as_picture(one.rows, one.grid, merge=2) for one in medium.inputs])
    )
    with torch.inference_mode():
        states = sees((pixels.float() / 255 - 0.5) / 0.5).last_hidden_state
        x = states.view(4, 2, 2, 2, 2, -1).transpose(2, 3).reshape(16, -1)
        words = reads.embed_tokens(torch.tensor([ids]))
        words[0, places] = between(x)
        mask = torch.zeros(1, 1, len(ids), len(ids))
        wanted = reads(inputs_embeds=words, attention_mask=mask).last_hidden_state[0]
        rows = torch.from_numpy(np.concatenate([one.rows for one in medium.inputs]))
        seen = model.media.encode("image", rows, [one.grid for one in medium.inputs])
        encoded = EncodedTokens(rows_ME=seen, at_M=places)
        got = model.forward(replace(batch_of([ids]), encoded=encoded))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def as_judge(folder: Path) -> torch.Tensor:
    """The same below a head that judges, under the names of NVIDIA's reranker of pages."""
    head = torch.randn(1, TEXT["hidden_size"], generator=torch.Generator().manual_seed(3))
    held = load_file(folder / "model.safetensors")
    tensors = {f"model.{name}": one for name, one in held.items()}
    save_file(tensors | {"score.weight": head}, folder / "model.safetensors")
    renamed(
        folder,
        architectures=["LlamaNemotronVLForSequenceClassification"],
        model_type="llama_nemotron_vl_rerank",
        **{"num_labels": 1, "id2label": {"0": "LABEL_0"}, "prompt_template": "v1"},
    )
    return head


def test_nemotrons_reranker_of_pages_is_its_embedder_below_a_head(tmp_path: Path) -> None:
    write_nemotron(tmp_path)
    spec = msgspec.structs.replace(model_spec(tmp_path), head="none")
    ids = [3, *[IMAGE] * 4, 7, 9]
    rows, grids = torch.arange(16 * 48, dtype=torch.uint8).view(16, 48), [(1, 4, 4)]
    answers = []
    for judges in (False, True):
        head = as_judge(tmp_path) if judges else None
        facts = read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
        assert facts.encodes and facts.pooling.how == "mean" and facts.media is not None
        spec = model_spec(tmp_path)
        spec = msgspec.structs.replace(spec, head=facts.pooling.head, num_labels=int(judges))
        model, _ = load_model(spec, mesh=Mesh(), device=torch.device("cpu"), block_tokens=16)
        with torch.inference_mode():
            seen = model.media.encode("image", rows, grids)
            encoded = EncodedTokens(rows_ME=seen, at_M=torch.arange(1, 5))
            answers.append(model.forward(replace(batch_of([ids]), encoded=encoded)))
            if head is not None:
                got = model.classify(answers[-1].mean(0, keepdim=True))
                torch.testing.assert_close(got, answers[-1].mean(0, keepdim=True) @ head.T)
    torch.testing.assert_close(answers[0], answers[1])
    assert facts.media.most == {"image": 1} and facts.pooling.pair is not None
    renamed(tmp_path, prompt_template="v2")
    with pytest.raises(CheckpointError, match="prompt_template"):
        read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))


def test_what_nemotrons_embedder_does_not_have_is_refused_by_key(tmp_path: Path) -> None:
    write_nemotron(tmp_path)
    renamed(tmp_path, force_image_size=448)
    spec = msgspec.structs.replace(model_spec(tmp_path), head="none")
    with pytest.raises(CheckpointError) as caught:
        load_model(spec, mesh=Mesh(), device=torch.device("cpu"), block_tokens=16)
    assert caught.value.field == "force_image_size"
