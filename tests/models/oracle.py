"""Tiny random models made by transformers, saved as checkpoints, and built by us from the files.

The loading here is the seam in its plainest form (`copies` over a safetensors file); the real
loader has tests of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headrace.back.models.families import text_config
from headrace.back.models.load.source import name_of
from headrace.back.models.protocol import LoadableModel
from headrace.back.models.published_keys import in_common_keys
from headrace.back.models.registry import build_model, family_of
from headrace.back.models.weights import copies
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import ModelSpec
from headrace.front.media.processors.speech_families import read_speech
from headrace.launch.encoder_decoder import decoder_config, spectrogram_of

BLOCK_TOKENS = 8


def save_oracle(config: Any, folder: Path, *, seed: int = 11) -> Any:
    """A randomly initialised transformers model of `config` in float32, saved under `folder`.

    Weights are large enough, and norms and biases random enough, that a forgotten one changes the
    logits.
    """
    from transformers import (
        AutoModelForCausalLM,
        Emu3ForCausalLM,
        Emu3TextConfig,
        Inkling2ForCausalLM,
        Inkling2TextConfig,
        InklingForCausalLM,
        InklingTextConfig,
        Mistral4Config,
        Mistral4ForCausalLM,
        MllamaForCausalLM,
        MllamaTextConfig,
    )

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(Emu3TextConfig, Emu3ForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(Inkling2TextConfig, Inkling2ForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(InklingTextConfig, InklingForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(MllamaTextConfig, MllamaForCausalLM, exist_ok=True)

    torch.manual_seed(seed)
    config.architectures = None
    # transformers' eager attention of Falcon adds ALiBi twice, into the mask and onto the scores.
    once = "sdpa" if getattr(config, "alibi", False) is True else "eager"
    if config.model_type in PARTS:
        model = whole_of(config).eval()
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=once).eval()
    randomize(model, seed=seed)
    model.save_pretrained(folder)
    if config.model_type in CLASSES:  # their configs are transformers', their classes Llama's
        saved = json.loads((folder / "config.json").read_text())
        saved["architectures"] = [CLASSES[config.model_type]]
        (folder / "config.json").write_text(json.dumps(saved))
    if config.model_type in WHOLE:
        text = json.loads((folder / "config.json").read_text())
        whole = {"architectures": [WHOLE[config.model_type]], "text_config": text}
        (folder / "config.json").write_text(json.dumps(whole))
    if config.model_type in PUBLISHED:
        file = folder / "model.safetensors"
        save_file(PUBLISHED[config.model_type](load_file(file)), file)
    return model


PARTS = {
    "muse_glimmer_text": ("vision_tower", "vision_adapter", "vision_projection"),
    "muse_spark_text": ("vision_tower", "vision_adapter", "vision_projection", "audio_tower"),
}
"""What stands beside a text part that transformers has no class for alone, by the type of that part."""


def whole_of(config: Any) -> Any:
    """A model around the text part `config`, whose other parts are left out."""
    import transformers

    kind = config.model_type
    named = getattr(transformers, type(config).__name__.replace("TextConfig", "Config"))
    model = getattr(transformers, f"{named.__name__.removesuffix('Config')}{WHOLE_ENDING}")
    beside: dict[str, Any] = {"out_hidden_size": 8, "projector_hidden_size": 8}
    if "audio_tower" in PARTS[kind]:
        beside["audio_config"] = {**HEARS, "out_hidden_size": config.hidden_size}
    whole = named(text_config=config.to_dict(), vision_config=FEW, **beside)
    whole._attn_implementation = "eager"
    made = model(whole)
    for part in PARTS[kind]:
        setattr(made.model, part, None)
    return made


WHOLE_ENDING = "ForConditionalGeneration"
HEARS = {"patch_sizes": [2], "hidden_sizes": [8], "depths": [1], "num_hidden_layers": 1}
FEW = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


CLASSES = {"internlm3": "InternLM3ForCausalLM", "iquestcoder": "IQuestCoderForCausalLM"}
"""What checkpoints name, of types for which transformers takes the class of another."""


def split_minimax_m3(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the checkpoint of the whole model has it: gates and ups apart, and the experts."""
    stored = {}
    for name, tensor in tensors.items():
        base = name.removesuffix(".weight")
        if base.endswith(".experts.gate_up_proj"):
            for i, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                stored[f"{base[: -len('.gate_up_proj')]}.{i}.w1.weight"] = gate.contiguous()
                stored[f"{base[: -len('.gate_up_proj')]}.{i}.w3.weight"] = up.contiguous()
        elif base.endswith(".experts.down_proj"):
            for i, down in enumerate(tensor):
                stored[f"{base[: -len('.down_proj')]}.{i}.w2.weight"] = down.contiguous()
        elif base.endswith("gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                stored[f"{base[: -len('gate_up_proj')]}{part}.weight"] = half.contiguous()
        else:
            stored[name] = tensor
    return stored


INKLING = (
    ("model.embed_tokens.embed_norm.", "model.llm.embed_norm."),
    ("model.embed_tokens.", "model.llm.embed."),
    ("lm_head.", "model.llm.unembed."),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "mlp_norm"),
    *(
        (f"self_attn.{one}_proj", f"attn.w{one}_d{of}")
        for one, of in zip("qkvr", "uvvu", strict=True)
    ),
    ("self_attn.o_proj", "attn.wo_ud"),
    ("self_attn.", "attn."),
    ("sconv.conv1d", "sconv"),
    ("gate.e_score_correction_bias", "gate.bias"),
    ("mlp.experts.gate_up_proj", "mlp.experts.w13_weight"),
    ("mlp.experts.down_proj", "mlp.experts.w2_weight"),
    ("shared_experts.gate_proj", "shared_experts.shared_w13_weight"),
    ("shared_experts.down_proj", "shared_experts.shared_w2_weight"),
    ("mlp.gate_proj.weight", "mlp.w13_dn.weight"),
    ("mlp.down_proj", "mlp.w2_md"),
    ("model.layers.", "model.llm.layers."),
    ("model.norm.", "model.llm.norm."),
)
"""What the published checkpoint calls what transformers does; ups lie in turn with gates."""


INKLING_2 = (
    ("self_attn.gate_proj", "attn.gate_attn"),
    ("self_attn.sink_proj", "attn.attn_sink_proj"),
    ("sconv.static_weight", "sconv.static_w"),
    ("sconv.weight_proj.weight", "sconv.weight_proj"),
    ("post_attention_convolution.conv1d", "attn_sconv"),
    ("post_mlp_convolution.conv1d", "mlp_sconv"),
    ("_input_layernorm", "_input_norm"),
    ("model.final_input.query", "model.llm.attn_res.output_query"),
)
"""What Inkling 2 has besides."""


def publish_inkling_2(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the checkpoint of the whole model has it."""
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            tensor = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)
        for ours, theirs in INKLING_2 + INKLING:
            name = name.replace(ours, theirs)
        if name.endswith("_input.query"):
            layer = int(name.split(".")[3])
            of_mlp = "mlp_input" in name
            name = (
                f"model.llm.attn_res.{'mlp' if of_mlp else 'attn'}_queries.{layer - (not of_mlp)}"
            )
        stored[name] = tensor.contiguous()
    return stored


def publish_inkling(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the checkpoint of the whole model has it."""
    stored = {}
    for name, tensor in tensors.items():
        if "up_proj" in name and "gate_up_proj" not in name:
            continue
        if name.endswith("experts.gate_up_proj"):
            tensor = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)
        elif "gate_proj" in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            tensor = torch.stack((tensor, up), dim=-2).flatten(-3, -2)
        for ours, theirs in INKLING:
            name = name.replace(ours, theirs)
        stored[name] = tensor.contiguous()
    return stored


WHOLE = {
    "inkling_text": "InklingForConditionalGeneration",
    "inkling2_text": "Inkling2ForConditionalGeneration",
}
"""Architectures that are published with other parts, by the type of their text part."""
PUBLISHED = {
    "minimax_m3_vl_text": split_minimax_m3,
    "inkling_text": publish_inkling,
    "inkling2_text": publish_inkling_2,
}
"""How checkpoints hold a text part that transformers saves otherwise when it is alone, by its type."""


CHOICE_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")
"""What is added to experts' scores for the choice alone (MOD-12); zeros as made, which would hide it."""


def randomize(model: Any, *, seed: int = 11) -> None:
    """Gives every parameter random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(noise * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.mul_(0.7)
            if name.endswith("rotary_emb.alpha"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.5)
            if name.endswith(CHOICE_BIASES):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
            if name.endswith("tid2eid"):
                buffer.copy_(torch.randint(6, buffer.shape, generator=generator))


def model_spec(
    folder: Path,
    *,
    dtype: str = "float32",
    max_model_len: int = 128,
    encoder_tokens: int = 0,
    **changes: Any,
) -> ModelSpec:
    """The resolved description of the checkpoint in `folder`; `changes` override keys of its
    config."""
    config = in_common_keys(json.loads((folder / "config.json").read_text()) | changes)
    reader = ConfigReader(config, "config.json")
    return ModelSpec(
        path=str(folder),
        name="oracle",
        format="safetensors",
        family=family_of(config),
        dtype=dtype,
        max_model_len=max_model_len,
        logits_width=text_config(decoder_config(config))["vocab_size"],
        eos_ids=(),
        config=config,
        encoder_tokens=encoder_tokens,
        encoder_vocabulary=config.get("src_vocab_size", 0),
        spectrogram=spectrogram_of(reader, read_speech(folder, reader)),
    )


def load_ours(spec: ModelSpec, *, mesh: Mesh | None = None) -> LoadableModel:
    """Our model with the checkpoint's weights, checked to be complete: nothing missing, nothing
    unknown."""
    model = build_model(
        spec, mesh=mesh or Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
    )
    fill(model, Path(spec.path))
    model.finish_load()
    return model


def fill(model: LoadableModel, folder: Path) -> None:
    """Copies every wanted slice out of the safetensors file in `folder`."""
    import re

    with safe_open(folder / "model.safetensors", framework="pt") as checkpoint:
        names = list(checkpoint.keys())
        stored = {name_of(name, model.weights.renamed): name for name in names}
        wanted = {copy.name for param in model.weights.params for copy in copies(param)}
        known = {piece.name for param in model.weights.params for piece in param.pieces}
        extra = {
            name
            for name in set(stored) - known
            if not any(re.fullmatch(pattern, name) for pattern in model.weights.ignored)
        }
        assert wanted <= set(stored), f"missing: {sorted(wanted - set(stored))}"
        assert not extra, f"unknown: {sorted(extra)}"
        for param in model.weights.params:
            assert param.tensor is not None
            if param.dtype.is_floating_point:
                param.tensor.fill_(float("nan"))
            for copy in copies(param):
                source = checkpoint.get_slice(stored[copy.name])
                assert tuple(source.get_shape()) == copy.shape, copy.name
                param.target(copy).copy_(source[copy.source] * copy.scale)


def oracle_logits(oracle: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits [tokens, V] of every row, each run alone and whole."""
    with torch.inference_mode():
        return [oracle(torch.tensor([row])).logits[0].float() for row in rows]
