"""Keys of published config.json files (published_keys.py) of models that see and hear."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.back.models.encoder_keys import bidirectional
from headrace.back.models.first_llava_keys import TEXTS, first_llava
from headrace.back.models.key_names import Keys, called
from headrace.back.models.pooling_families import NEMOTRON_JUDGE
from headrace.base.config.hf import ConfigReader

PHI4MM = "Phi4MMForCausalLM"
PHI4_TOWER = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
    **{"num_attention_heads": 16, "patch_size": 14},
}
"""SigLIP's layers, which the published config leaves unsaid."""
PHI4_AUDIO = {
    **{"attention_dim": "hidden_size", "attention_heads": "num_attention_heads"},
    **{"linear_units": "intermediate_size"},
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
}


def _phi4mm(config: ConfigReader) -> Keys:
    """What its config calls a layer of embeddings are both towers, of which that for images is
    hardly described."""
    layers = config.required_section("embd_layer")
    image, sound = (layers.required_section(f"{name}_embd_layer") for name in ("image", "audio"))
    image.choice("hd_transform_order", ("sub_glb",), "sub_glb")
    conformer = config.required_section("audio_processor").required_section("config")
    halving = conformer.section("nemo_conv_settings") or ConfigReader({}, conformer.where)
    biases = conformer.section("relative_attention_bias_args") or ConfigReader({}, conformer.where)
    stated = config.section("vision_config")
    side = image.int("crop_size", 448, ge=1, le=16_384)
    return {
        "model_type": "phi4_multimodal",
        "vision_config": {
            **PHI4_TOWER,
            **{"image_size": side, "crop_size": side},
            **({} if stated is None else stated.raw),
        },
        "audio_config": {
            **conformer.raw,
            **called(conformer, PHI4_AUDIO),
            "nemo_conv_channels": halving.int("conv_channels", 1024, ge=1),
            "bias_max_distance": biases.int("t5_bias_max_distance", 1000, ge=1),
            "bias_symmetric": biases.bool("t5_bias_symmetric", False),
            "downsample_rate": sound.int("downsample_rate", 1, ge=1),
        },
    }


OCR2_ENCODER = {
    **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
    **{"num_attention_heads": 14, "num_key_value_heads": 2, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1_000_000.0, "vocab_size": 151_936, "max_position_embeddings": 131_072},
}
"""Qwen2-0.5B's layers, of which the published config says the width alone."""
SAM_KEYS = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}


def _deepseek_ocr2(config: ConfigReader) -> Keys:
    """As DeepSeek-VL2's, whose `model_type` it has. SAM's last width is the encoder's, not what
    `downsample_channels` says; keys of the text that have the defaults of V2's class are not
    there."""
    text = config.required_section("language_config")
    widths = config.required_section("vision_config").required_section("width")
    sam, encoder = (widths.required_section(name) for name in ("sam_vit_b", "qwen2-0-5b"))
    if text.bool("use_mla", False):
        raise text.wrong("use_mla", "false")
    heads = {**OCR2_ENCODER, **encoder.raw, **called(encoder, {"dim": "hidden_size"})}
    middle = sam.list("downsample_channels", (512, 1024), of=int, length=2)[0]
    absent = {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6}
    return {
        "model_type": "deepseek_ocr2_published",
        "text_config": {**absent, **text.raw, "model_type": "deepseek_ocr2_text"},
        "vision_config": {
            "sam_config": {
                **sam.raw,
                **called(sam, SAM_KEYS),
                "downsample_channels": [middle, heads["hidden_size"]],
            },
            "encoder_config": heads,
        },
    }


MOLMO_MORE_WORDS = 128


def _molmo(config: ConfigReader) -> Keys:
    """Behind the words that it says are more, in a table of their own, among them those that stand
    for images."""
    rows = config.int("embedding_size", config.int("vocab_size", ge=1), ge=1)
    return {"embedding_size": rows, "vocab_size": rows + MOLMO_MORE_WORDS}


def _cogvlm(config: ConfigReader) -> Keys:
    """What its code takes for granted, in which the second differs: its configs have the number of
    KV heads."""
    heads = config.int("num_attention_heads", ge=1)
    kv_heads = config.int("num_multi_query_heads", None, ge=1)
    theta = 10_000.0 if kv_heads is None else 500_000.0
    return {
        "model_type": "cogvlm",
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        **({} if "rope_theta" in config else {"rope_theta": theta}),
    }


def _hcx_vision(config: ConfigReader) -> Keys:
    """Its older configs call the text part's section otherwise."""
    text = config.section("text_config") or config.required_section("language_config")
    return {"model_type": "hyperclovax_vlm", "text_config": text.raw}


def _nemotron_judge(config: ConfigReader) -> Keys:
    """What its head is and what it reads, its text part says as NVIDIA's reranker of texts does."""
    config.choice("prompt_template", ("v1",), "v1")
    text = config.required_section("llm_config")
    stated = ("pooling", "num_labels", "id2label", "temperature", "problem_type")
    return {
        "llm_config": {
            **text.raw,
            **{key: config.raw[key] for key in stated if key in config},
            **bidirectional(config),
            "architectures": ["LlamaBidirectionalForSequenceClassification"],
        }
    }


MEDIA_KEYS: Mapping[str, Callable[[ConfigReader], Keys]] = {
    PHI4MM: _phi4mm,
    "DeepseekOCR2ForCausalLM": _deepseek_ocr2,
    "MolmoForCausalLM": _molmo,
    "CogVLMForCausalLM": _cogvlm,
    NEMOTRON_JUDGE: _nemotron_judge,
    "HCXVisionForCausalLM": _hcx_vision,
    **dict.fromkeys(TEXTS, first_llava),
}
"""By the name of the architecture."""
