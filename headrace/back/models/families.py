"""Architecture name in config.json -> family, and what else its name says: the head, and how its
tensors are named. Apart from `registry.py`, so that `launch` can ask without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.back.models import vlm_inside
from headrace.back.models.encoder_families import (
    BIDIRECTIONAL,
    EMBEDDERS,
    ENCODER_DECODERS,
    JUDGES,
    RERANKERS,
    SEES_BOTH_SIDES,
    TEXT_ENCODERS,
)
from headrace.back.models.hearing_families import TEXT_OF_HEARING
from headrace.back.models.media_families import WITH_MEDIA
from headrace.back.models.published_families import PUBLISHED, RWKV
from headrace.base import extensions
from headrace.base.config.ctc import is_ctc
from headrace.base.config.hf import ConfigReader
from headrace.base.config.index_choices import shared_layers
from headrace.base.config.two_towers import is_two_towers
from headrace.base.errors import CheckpointError

FALLBACK = "transformers"
TEXT_SECTIONS = ("text_config", "llm_config")
"""Where the text part's keys are."""
WIDTH = ("n_embd", "n_embed", "d_model", "dim", "emb_dim")
"""What `hidden_size` is called besides."""
HEADS = ("n_head", "n_heads", "num_heads", "attention_heads")
"""What `num_attention_heads` is called besides."""

KV_HEADS_LISTED = "num_key_value_heads_per_layer"
"""The KV heads of each layer, where they differ; 0: it does not attend."""

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "Emu3ForCausalLM": "emu3",
    "DiffLlamaForCausalLM": "diffllama",
    "JetMoeForCausalLM": "jetmoe",
    "Llama4ForCausalLM": "llama4",
    "FlexOlmoForCausalLM": "flex_olmo",
    "YoutuForCausalLM": "youtu",
    "PhimoeForCausalLM": "phimoe",
    "PhiMoEForCausalLM": "phimoe",
    "Step3p5ForCausalLM": "step3p5",
    "SarvamMoEForCausalLM": "sarvam_moe",
    "SarvamMLAForCausalLM": "deepseek",
    "Mistral4ForCausalLM": "mistral4",
    "AfmoeForCausalLM": "afmoe",
    "HYV3ForCausalLM": "hy_v3",
    "HYV4ForCausalLM": "hy_v4",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    **dict.fromkeys(("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"), "exaone_moe"),
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "OlmoForCausalLM": "olmo",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GraniteForCausalLM": "granite",
    "GraniteMoeSWAForCausalLM": "granitemoe_swa",
    "GraniteSWAForCausalLM": "granite_swa",
    "SmolLM3ForCausalLM": "smollm3",
    "MiniCPM3ForCausalLM": "minicpm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "NemotronForCausalLM": "nemotron",
    "ArceeForCausalLM": "arcee",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "Cohere2MoeForCausalLM": "cohere2_moe",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Exaone4ForCausalLM": "exaone4",
    "SeedOssForCausalLM": "seed_oss",
    "ApertusForCausalLM": "apertus",
    **dict.fromkeys(("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), "ernie4_5"),
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1",
    "GPT2LMHeadModel": "gpt2",
    "OpenAIGPTLMHeadModel": "openai_gpt",
    "CTRLLMHeadModel": "ctrl",
    "MllamaForCausalLM": "mllama",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GPTNeoXJapaneseForCausalLM": "gpt_neox_japanese",
    "ModernBertDecoderForCausalLM": "modernbert_decoder",
    "FalconForCausalLM": "falcon",
    "BloomForCausalLM": "bloom",
    "OPTForCausalLM": "opt",
    "GPTJForCausalLM": "gptj",
    "CodeGenForCausalLM": "codegen",
    "GPTNeoForCausalLM": "gpt_neo",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "BioGptForCausalLM": "biogpt",
    "XGLMForCausalLM": "xglm",
    "PersimmonForCausalLM": "persimmon",
    "NanoChatForCausalLM": "nanochat",
    "DbrxForCausalLM": "dbrx",
    "Gemma4UnifiedForCausalLM": "gemma4_unified",
    "CwmForCausalLM": "cwm",
    "VaultGemmaForCausalLM": "vaultgemma",
    "HyperCLOVAXForCausalLM": "hyperclovax",
    "Jais2ForCausalLM": "jais2",
    "BitNetForCausalLM": "bitnet_b158",
    "MptForCausalLM": "mpt",
    "MPTForCausalLM": "mpt",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "GraniteMoeForCausalLM": "granitemoe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "AXK1ForCausalLM": "axk1",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "SolarOpenForCausalLM": "solar_open",
    "Dots1ForCausalLM": "dots1",
    "Dots3NoteForCausalLM": "dots3_note",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiniMaxM3VLForCausalLM": "minimax_m3",
    "GptOssForCausalLM": "gpt_oss",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    **{"MambaForCausalLM": "mamba", "FalconMambaForCausalLM": "falcon_mamba"},
    **{"JambaForCausalLM": "jamba", "Mamba2ForCausalLM": "mamba2"},
    **{"BambaForCausalLM": "bamba", "FalconH1ForCausalLM": "falcon_h1"},
    "Zamba2ForCausalLM": "zamba2",
    **{"ZambaForCausalLM": "zamba", "ZayaForCausalLM": "zaya", "DogeForCausalLM": "doge"},
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
    "RwkvForCausalLM": "rwkv",
    "xLSTMForCausalLM": "xlstm",
    "HrmTextForCausalLM": "hrm_text",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Lfm3ForCausalLM": "lfm3",
    "Kolibri1ForCausalLM": "kolibri1",
    "FlintForCausalLM": "flint",
    "MellumForCausalLM": "mellum",
    "LagunaForCausalLM": "laguna",
    "AXK2ForCausalLM": "axk2",
    "LongcatFlashForCausalLM": "longcat_flash",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "KimiLinearForCausalLM": "kimi_linear",
    "BailingHybridForCausalLM": "bailing_hybrid",
    "MiniMaxForCausalLM": "minimax",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen4ExpForCausalLM": "qwen4",
    **PUBLISHED,
    **TEXT_ENCODERS,
}
TEXT_TYPES: Mapping[str, str] = {
    **TEXT_OF_HEARING,
    "llama": "llama",
    "emu3_text_model": "emu3",
    "internlm2": "internlm2",
    "phi3": "phi3",
    **{"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe"},
    "gpt_oss": "gpt_oss",
    "opt": "opt",
    "lfm2": "lfm2",
    "lfm3": "lfm3",
    "lfm2_moe": "lfm2_moe",
    "mistral": "mistral",
    "ministral3": "ministral3",
    "mistral4": "mistral4",
    "mistral_large4_text": "mistral_large4",
    **{"kimi_k2": "deepseek", "kimi_linear": "kimi_linear"},
    "step3p5": "step3p5",
    "deepseek_v3": "deepseek",
    "llama4_text": "llama4",
    **{"aria_text": "aria_text", "granite_docling_text": "granite"},
    "hunyuan_vl_text": "hunyuan_v1",
    "minimax_m3_vl_text": "minimax_m3",
    "glm5_next_text": "glm5_next",
    "cohere": "cohere",
    "cohere2": "cohere2",
    "exaone4": "exaone4",
    "exaone4_5_text": "exaone4",
    "hyperclovax": "hyperclovax",
    "glm_ocr_text": "glm4",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "nemotron_h": "nemotron_h",
    **{"gemma": "gemma", "gemma2": "gemma2", "persimmon": "persimmon"},
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    **{"gemma4_text": "gemma4", "gemma4_unified_text": "gemma4_unified"},
    **{"qwen4_exp_text": "qwen4", "muse_glimmer_text": "muse_glimmer"},
    **{"inkling_text": "inkling", "inkling_model": "inkling", "inkling2_text": "inkling2"},
    "mllama_text_model": "mllama",
}
"""Families of the text part of models with several, by its `model_type`."""
WRAPPERS: Mapping[str, str] = dict.fromkeys(
    ("MllamaForConditionalGeneration", "KimiK3ForConditionalGeneration"), "language_model"
)
"""Architectures with several parts, of which the text part is served, and where it lies."""
BASES_WITHIN: Mapping[str, str] = {
    "Emu3ForConditionalGeneration": "model.text_model",
    "Qwen4ExpForConditionalGeneration": "model.language_model",
    "MuseGlimmerForConditionalGeneration": "model.language_model",
    "InklingForConditionalGeneration": "model.llm",
    "Inkling2ForConditionalGeneration": "model.llm",
}
"""The same, where the head stands apart from the rest of the text part, which lies here."""
RECURRENT = frozenset({"mamba", "mamba2", "falcon_mamba", "xlstm", *RWKV})
"""Families without attention: their config states neither heads nor a longest text."""
RECURRENT_KINDS = frozenset({"mamba", "linear_attention", "conv", "recurrent"})
"""Kinds of layers, as config.json lists them, that keep a state and no cache per token."""
CHOICES_SHARED = {
    **{"glm_moe_dsa": 1, "glm5_next": 1, "glm5_vision": 1, "hy_v4": 4, "mistral_large4": 1},
    "mistral_large4_vision": 1,
}
"""Families whose layers may read what the indexer of one before them chose, and every how manieth
has one of its own unless the config says."""
CHOOSING = "minimax_m3_sparse"
"""What MiniMax calls layers with an indexer, where others have none."""
TWO_ATTENTIONS = frozenset({"longcat_flash"})
"""Families of which each layer has two attentions."""
SHARING = {"gemma3n", "gemma3n_audio", "gemma4", "gemma4_vision"}
SHARING |= {"gemma4_unified", "gemma4_unified_vision"}
"""Families whose upper layers may read the caches of lower ones."""
BOTH_SIDES = "eurobert"
"""The family of decoders whose tokens see both sides."""
COLBERT = "HF_ColBERT"
"""BERT below a projection of every token (Khattab and Zaharia 2020), as its authors store it."""
CAUSAL, MASKED, LM_HEAD = "ForCausalLM", "ForMaskedLM", "LMHeadModel"
_HEADS = {
    CAUSAL: "lm",
    "WithLMHeadModel": "none",
    "ForPreTraining": "none",
    LM_HEAD: "lm",
    MASKED: "none",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForProcessRewardModel": "token",
    "ForRewardModel": "sequence",
    "Model": "none",
}
_BASES = {
    name.removesuffix(CAUSAL).removesuffix(MASKED).removesuffix(LM_HEAD): family
    for name, family in ARCHITECTURES.items()
}
_BASES |= {"Gemma3Text": "gemma3", "Qwen3_5Text": "qwen3_5"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a class name says. `head`: lm, sequence, token or none. `bare`: the checkpoint is of the
    base model alone, whose tensor names lack the prefix. `within`: where the text part lies among
    others; `base_within`: where all of it but the head does, instead of below its prefix. `media`:
    the family builds the other parts too."""

    family: str
    head: str = "lm"
    bare: bool = False
    within: str = ""
    base_within: str = ""
    media: bool = False


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """By the first architecture a config.json names; what no row covers goes to the fallback."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        why = f"config.json: architectures is {names!r}; it must be a list of class names"
        raise CheckpointError(why, field="architectures")
    if names[0] in extensions.allowed(extensions.MODELS):
        return Architecture(family=names[0])
    if names[0] in ENCODER_DECODERS:
        return Architecture(family=ENCODER_DECODERS[names[0]])
    if names[0] in JUDGES:
        return Architecture(family=JUDGES[names[0]], head="sequence")
    if names[0] == COLBERT:
        turned = config.get("position_embedding_type") == "rotary"
        return Architecture(family="jina_embeddings_v3" if turned else "bert", head="none")
    if names[0] in BIDIRECTIONAL and config.get("use_bidirectional_attention"):
        return Architecture(family=BIDIRECTIONAL[names[0]], head="none", bare=True)
    if names[0] in PUBLISHED:
        return Architecture(family=PUBLISHED[names[0]])
    if names[0] in RERANKERS:
        family, bare = RERANKERS[names[0]]
        return Architecture(family=family, head="sequence", bare=bare)
    if names[0] in SEES_BOTH_SIDES and config.get("is_causal") is False:
        bare = names[0].endswith("Model")
        return Architecture(family=BOTH_SIDES, head="none", bare=bare)
    if names[0] in EMBEDDERS:
        family, within = EMBEDDERS[names[0]]
        return Architecture(family=family, head="none", bare=True, within=within)
    if names[0] in vlm_inside.LATE_VISION:
        return Architecture(family=vlm_inside.late_family(config), head="none", media=True)
    if is_two_towers(config):
        return Architecture(family="two_towers", head="none", media=True)
    if is_ctc(config):
        return Architecture(family="frame_labels", head="token", media=True)
    if names[0] in WITH_MEDIA:
        return Architecture(family=WITH_MEDIA[names[0]], media=True)
    text = config.get("text_config")
    within, base = WRAPPERS.get(names[0], ""), BASES_WITHIN.get(names[0], "")
    if (within or base) and isinstance(text, Mapping) and text.get("model_type") in TEXT_TYPES:
        family = TEXT_TYPES[text["model_type"]]
        return Architecture(family=family, within=within, base_within=base)
    for suffix, head in _HEADS.items():
        base = names[0].removesuffix(suffix)
        if base != names[0] and base in _BASES:
            return Architecture(family=_BASES[base], head=head, bare=suffix == "Model")
    return Architecture(family=FALLBACK)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the text part; whether its embeddings are tied, the whole model may say."""
    named = architecture_of(config)
    if vlm_inside.is_late_vision(config):
        return text_config(vlm_inside.inside_vlm(config))
    section = next((key for key in TEXT_SECTIONS if isinstance(config.get(key), Mapping)), None)
    apart = named.media and section is not None
    if not named.within and not named.base_within and not apart:
        return config
    over = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**config[section or "text_config"], **over}


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a config.json: that of the first architecture it names, else the fallback."""
    return architecture_of(config).family


def kv_heads_of(family: str, config: ConfigReader, heads: int) -> int:
    """The KV heads beside `heads` query heads. Some families have keys of their own."""
    if family == "gpt_bigcode":
        return 1 if config.bool("multi_query", True) else heads
    if family == "dbrx":
        section = config.section("attn_config")
        return 1 if section is None else section.int("kv_n_heads", 1, ge=1)
    if family != "falcon":
        return config.int("num_key_value_heads", heads, ge=1)
    if config.bool("new_decoder_architecture", False):
        return config.int("num_kv_heads", heads, aliases=("n_head_kv",), ge=1)
    return 1 if config.bool("multi_query", True) else heads


def layers_without_cache(family: str, config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """The layers that keep no cache per token, as far as the config lists them: recurrent ones, and
    those that read the caches of others."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    attending, shared = config.get("attn_layer_indices"), config.get("num_kv_shared_layers")
    sources, repeated = config.get("kv_source_layers"), config.get("block_types")
    if isinstance(listed := config.get(KV_HEADS_LISTED), list):
        return frozenset(i for i, count in enumerate(listed) if count == 0)
    if family in RECURRENT:
        return frozenset(range(layers))
    if family in SHARING and isinstance(shared, int):
        return frozenset(range(layers - shared, layers))
    if isinstance(sources, list) and len(sources) == layers:
        return frozenset(i for i, source in enumerate(sources) if source != i)
    if isinstance(kinds, list):
        return frozenset(i for i, kind in enumerate(kinds) if kind in RECURRENT_KINDS)
    if isinstance(repeated, list) and repeated:
        return frozenset(i for i in range(layers) if repeated[i % len(repeated)] in RECURRENT_KINDS)
    if isinstance(crossing := config.get("cross_attention_layers"), list):
        return frozenset(i for i in crossing if isinstance(i, int))
    if isinstance(config.get("attn_type_list"), list):
        return frozenset(i for i, kind in enumerate(config["attn_type_list"]) if kind == 0)
    if isinstance(attending, list):
        return frozenset(i for i in range(layers) if i not in attending)
    if isinstance(every := config.get("layer_group_size"), int) and every > 0:
        return frozenset(i for i in range(layers // every * every) if (i + 1) % every)
    return frozenset()


def indexed_layers(family: str, config: ConfigReader, layers: int) -> int:
    """How many layers keep keys of an indexer, of a config that states one."""
    if family in CHOICES_SHARED:
        shared = shared_layers(config, layers, every=CHOICES_SHARED[family])
        return layers - sum(shared)
    types = config.list("layer_types", None, of=str)
    return layers if types is None or CHOOSING not in types else types.count(CHOOSING)
