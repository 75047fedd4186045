"""Architectures that do not run here, and what each of them lacks: asked for by name, or known to
`transformers`. docs/MODELS.md has the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
ENCODERS = ("Model", "ForMaskedLM", *CLASSIFIERS)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A row: what people call the family, its architectures, and what they need."""

    family: str
    names: tuple[str, ...]
    needs: str


def _classes(base: str, endings: tuple[str, ...] = ENCODERS) -> tuple[str, ...]:
    return tuple(f"{base}{ending}" for ending in endings)


MISSING = (
    Missing(
        family="DeepSeek V4 with vision",
        names=("DeepseekV4ForConditionalGeneration",),
        needs="its tower before DeepSeek V4",
    ),
    Missing(
        family="Inkling's text part alone",
        names=("InklingForCausalLM", "Inkling2ForCausalLM"),
        needs="the whole checkpoint (InklingForConditionalGeneration)",
    ),
    Missing(
        family="North Micro Vision's text part alone",
        names=("CohereCompassForCausalLM", "CohereCompassTextForSequenceClassification"),
        needs="the whole checkpoint (CohereCompassForConditionalGeneration)",
    ),
    Missing(
        family="Gemma 4's drafters",
        names=("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
        needs="the model that they draft for (--speculative-config)",
    ),
    Missing(
        family="DiffusionGemma",
        names=("DiffusionGemmaForBlockDiffusion",),
        needs="blocks written from random tokens, with a pass of an encoder over each",
    ),
    Missing(
        family="others that see, by vLLM's list",
        names=(
            *("BeeForConditionalGeneration", "ChameleonForConditionalGeneration"),
            *("CheersForConditionalGeneration", "Cosmos3ForConditionalGeneration"),
            *("Eagle2_5_VLForConditionalGeneration", "GLM4VForCausalLM", "H2OVLChatModel"),
            *("Granite4VisionForConditionalGeneration", "IsaacForConditionalGeneration"),
            "InternS2MobiusForConditionalGeneration",
            *("KananaVForConditionalGeneration", "KeyeForConditionalGeneration"),
            *("KeyeVL1_5ForConditionalGeneration", "Llama_Nemotron_Nano_VL"),
            *("LlavaOnevision2ForConditionalGeneration", "MiniMaxVL01ForConditionalGeneration"),
            *("Molmo2ForConditionalGeneration", "Moondream3ForCausalLM", "NVLM_D_Model"),
            *("OpenCUAForConditionalGeneration", "Phi4ForCausalLMV", "RForConditionalGeneration"),
        ),
        needs="its tower, or its way to cut images, before the decoder",
    ),
    Missing(
        family="others that hear, by vLLM's list",
        names=(
            *("FireRedASR2ForConditionalGeneration", "FireRedLIDForConditionalGeneration"),
            *("FunASRForConditionalGeneration", "MiDashengLMModel", "MossAudioModel"),
            "UltravoxModel",
        ),
        needs="its encoder of sound before the decoder",
    ),
    Missing(
        family="DeepSeek-OCR and Unlimited-OCR; HyperCLOVA X SEED Think with vision and Ovis 1.6 "
        "and 2 as published",
        names=(
            *("DeepseekOCRForCausalLM", "UnlimitedOCRForCausalLM"),
            *("HCXVisionV2ForCausalLM", "Ovis"),
        ),
        needs="the tower under its authors' names: those of HyperCLOVA X SEED Think and Ovis 2 "
        "are read as converted for transformers",
    ),
    Missing(
        family="BAGEL, OpenVLA",
        names=("BagelForConditionalGeneration", "OpenVLAForActionPrediction"),
        needs="answers that are images or actions, or experts apart for these",
    ),
    Missing(
        family="RWKV 5", names=("Rwkv5ForCausalLM",), needs="a recurrence between those of 4 and 6"
    ),
    Missing(
        family="GIT",
        names=("GitForCausalLM",),
        needs="images whose rows stand before the texts of a decoder that it has by itself",
    ),
    Missing(
        family="ProphetNet's decoder alone",
        names=("ProphetNetForCausalLM",),
        needs="the encoder that it reads from: serve ProphetNetForConditionalGeneration",
    ),
    Missing(
        family="encoder-decoders as classifiers, but for BART, MVP and PLBART",
        names=tuple(
            f"{base}ForSequenceClassification"
            for base in (
                *("MBart", "BigBirdPegasus"),
                *("T5", "MT5", "UMT5", "T5Gemma", "T5Gemma2"),
            )
        ),
        needs="a decoder that judges, of this family",
    ),
    Missing(
        family="T5Gemma's encoders as classifiers of tokens",
        names=("T5GemmaForTokenClassification", "T5Gemma2ForTokenClassification"),
        needs="this head on its encoder",
    ),
    Missing(
        family="UMT5 without a head",
        names=("UMT5Model",),
        needs="something to answer with (the encoder alone is UMT5EncoderModel)",
    ),
    Missing(
        family="XLNet as a language model",
        names=("XLNetLMHeadModel",),
        needs="attention in both directions over a permutation: each new token is judged by vectors "
        "that read the whole text anew, so that no keys can be kept",
    ),
    Missing(
        family="Reformer",
        names=("ReformerModelWithLMHead", *_classes("Reformer")),
        needs="attention among tokens of one hash",
    ),
    Missing(
        family="CPM-Ant",
        names=("CpmAntForCausalLM",),
        needs="learned prompts, and biases by the segments of a text",
    ),
    Missing(
        family="Moshi, MusicGen",
        names=("MoshiForCausalLM", "MusicgenForCausalLM", "MusicgenMelodyForCausalLM"),
        needs="several tokens of sound at a time",
    ),
    Missing(
        family="Music Flamingo, VibeVoice, Nemotron Transcribe",
        names=(
            *("MusicFlamingoForConditionalGeneration", "VibeVoiceAsrForConditionalGeneration"),
            "Nemotron3_5TranscribeForConditionalGeneration",
        ),
        needs="its encoder of sound",
    ),
    Missing(
        family="Qwen3-ASR's aligner",
        names=("Qwen3ASRForTokenClassification", "Qwen3ASRForcedAlignerForTokenClassification"),
        needs="sound and its text in one request, whose words it places",
    ),
    Missing(
        family="LayoutLM 1 to 3, LiLT, MarkupLM, TAPAS, BROS",
        names=(
            *_classes("LayoutLM"),
            *(name for base in ("LayoutLMv2", "LayoutLMv3") for name in _classes(base)),
            *(name for base in ("Lilt", "MarkupLM", "Tapas", "Bros") for name in _classes(base)),
        ),
        needs="boxes, paths or cells beside the tokens, which no request carries",
    ),
    Missing(
        family="Nystromformer, YOSO, MRA, Funnel, Perceiver",
        names=tuple(
            name
            for base in ("Nystromformer", "Yoso", "Mra", "Funnel", "Perceiver")
            for name in _classes(base)
        ),
        needs="attention by landmarks, samples, blocks or fewer tokens, each of its own",
    ),
    Missing(
        family="I-BERT", names=_classes("IBert"), needs="functions of whole numbers of its own"
    ),
    Missing(
        family="RoCBert as an encoder",
        names=_classes("RoCBert"),
        needs="shapes and sounds of characters beside the tokens",
    ),
    Missing(
        family="CANINE",
        names=_classes("Canine", ("Model", *CLASSIFIERS)),
        needs="characters in place of tokens",
    ),
    Missing(
        family="NeoMME, UltraVBERT; ModernVBERT with other heads",
        names=(
            *_classes("NeoMME"),
            *_classes("UltraVBert"),
            *_classes("ModernVBert", ("ForMaskedLM", *CLASSIFIERS)),
        ),
        needs="a tower before an encoder of texts, with this head",
    ),
)
BLOCKED: Mapping[str, str] = {
    name: f"it needs {row.needs}" for row in MISSING for name in row.names
}
"""What an architecture needs, by its name."""


def missing_table() -> str:
    """The rows as docs/MODELS.md has them."""
    head = "| family | architecture | what it needs |\n|---|---|---|\n"
    return head + "".join(
        f"| {row.family} | {', '.join(row.names)} | {row.needs} |\n" for row in MISSING
    )
