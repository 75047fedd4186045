"""Rows of the table of GGUF architectures: models that were published with code of their own, and
embedders that are decoders."""

from __future__ import annotations

from typing import Final

from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_gemma import embedding_gemma
from headrace.base.config.gguf_mixtures import ROUTED
from headrace.base.config.gguf_row import (
    GELU,
    LATENT,
    SILU,
    Config,
    GGUFArchitecture,
    count,
    each_of,
    latent_sizes,
    need_int,
    present,
    rows_of,
)


def _chatglm(file: GGUFFile, name: str, config: Config) -> None:
    """GLM-4-9B, converted from the layout of transformers, has its projections apart."""
    if "blk.0.attn_q.weight" in file.tensors:
        config.update(model_type="glm", architectures=["GlmForCausalLM"])
        return
    config["multi_query_attention"] = True
    config["add_qkv_bias"] = config["attention_bias"] = "blk.0.attn_qkv.bias" in file.tensors


def _qwen(file: GGUFFile, name: str, config: Config) -> None:
    """The inner size counts gates and ups."""
    config["intermediate_size"] = need_int(file, f"{name}.feed_forward_length") // 2


def _deci(file: GGUFFile, name: str, config: Config) -> None:
    """Heads, KV heads and inner sizes of each layer; none of them: it lacks the branch. Heads
    without KV heads: one matrix stands in place of attention, where that has its last one."""
    layers = config["num_hidden_layers"]
    heads = each_of(file, f"{name}.attention.head_count", layers)
    kv_heads = each_of(file, f"{name}.attention.head_count_kv", layers)
    inners = each_of(file, f"{name}.feed_forward_length", layers)
    for of, one in zip(heads, kv_heads, strict=True):
        if one and of % one:
            wanted = "divisors of the heads of their layers, 0 where there are none"
            raise file.wrong(f"{name}.attention.head_count_kv", wanted)
    config["block_configs"] = [
        {
            "attention": {
                "no_op": not of,
                "replace_with_linear": bool(of and not one),
                "linear_name": "self_attn.o_proj",
                "n_heads_in_group": of // one if one else None,
            },
            "ffn": {"no_op": not inner, "intermediate_size": inner or None},
        }
        for of, one, inner in zip(heads, kv_heads, inners, strict=True)
    ]
    config["num_key_value_heads_per_layer"] = list(kv_heads)
    config["num_key_value_heads"] = max(kv_heads)


def _nomic_experts(file: GGUFFile, name: str, config: Config) -> None:
    """Converters leave out the bias of experts."""
    config["layer_norm_eps"] = config.pop("rms_norm_eps")
    config["type_vocab_size"] = rows_of(file, "token_types.weight")
    config["num_experts"] = need_int(file, f"{name}.expert_count")
    config["moe_top_k"] = need_int(file, f"{name}.expert_used_count")
    config["moe_every_n_layers"] = count(file, f"{name}.moe_every_n_layers", 2)
    for key, tensor in (("qkv_proj", "attn_qkv"), ("mlp_fc1", "ffn_up"), ("mlp_fc2", "ffn_down")):
        config[f"{key}_bias"] = f"blk.0.{tensor}.bias" in file.tensors


def _pangu(file: GGUFFile, name: str, config: Config) -> None:
    """Its projections of attention have biases, all or none."""
    config["bias"] = "blk.0.attn_q.bias" in file.tensors


def _grok(file: GGUFFile, name: str, config: Config) -> None:
    """Files of Grok 1 may leave its numbers unsaid; those of Grok 2 have a dense MLP too."""
    config["residual_moe"] = "blk.0.ffn_up.weight" in file.tensors
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        yarn = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        stated = {key: f"{name}.rope.scaling.{ours}" for key, ours in yarn.items()}
        scaling |= {"beta_fast": 8.0, "attention_factor": 1.0, **present(file, stated)}


_THIRTEEN_B: Final = 40
"""Layers of the Baichuan that knows positions by ALiBi, as llama.cpp tells it."""


def _baichuan(file: GGUFFile, name: str, config: Config) -> None:
    """The 7B rotates as Llama does; projections are apart in files."""
    if config["num_hidden_layers"] != _THIRTEEN_B:
        config.update(model_type="llama", architectures=["LlamaForCausalLM"], mlp_bias=False)
        return
    config["joined_projections"] = False
    config["model_max_length"] = config.pop("max_position_embeddings")


def _jais(file: GGUFFile, name: str, config: Config) -> None:
    """Converters multiply the embeddings and the head, which are no longer one."""
    if config["tie_word_embeddings"]:
        raise file.wrong("output.weight", "there: the head is scaled otherwise than embeddings")


def _maincoder(file: GGUFFile, name: str, config: Config) -> None:
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors


def _talkie(file: GGUFFile, name: str, config: Config) -> None:
    """Rows of queries and keys have other signs, so that rotations go forward."""
    config["turned_back"] = False
    config["logit_scale"] = file.number(f"{name}.logit_scale", 1.0)


def _deepseek_ocr(file: GGUFFile, name: str, config: Config) -> None:
    """The text part, which attends as Llama does."""
    if file.whole(f"{name}.attention.sliding_window", 0):
        raise file.wrong(f"{name}.attention.sliding_window", "absent: its windows are not built")
    softmax = 1
    if file.whole(f"{name}.expert_gating_func", softmax) != softmax:
        raise file.wrong(f"{name}.expert_gating_func", f"{softmax} (softmax)")


def _openelm(file: GGUFFile, name: str, config: Config) -> None:
    """Heads and inner sizes of each layer, the latter as shares of the width."""
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    kv_heads = each_of(file, f"{name}.attention.head_count_kv", layers)
    inners = each_of(file, f"{name}.feed_forward_length", layers)
    config.update(
        num_query_heads=list(each_of(file, f"{name}.attention.head_count", layers)),
        num_kv_heads=list(kv_heads),
        num_key_value_heads_per_layer=list(kv_heads),
        num_key_value_heads=max(kv_heads),
        ffn_multipliers=[inner / width for inner in inners],
        ffn_dim_divisor=1,
        normalize_qk_projections="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _plamo3(file: GGUFFile, name: str, config: Config) -> None:
    """All but the last of each period slide, with rotations of their own."""
    window = file.whole(f"{name}.attention.sliding_window", 0)
    config["sliding_window"] = window or None
    config["sliding_window_pattern"] = count(file, f"{name}.attention.sliding_window_pattern", 8)
    config["rope_local_theta"] = file.number(f"{name}.rope.freq_base_swa", 10000.0)


def _paddle_ocr(file: GGUFFile, name: str, config: Config) -> None:
    """The text part; positions of text are alike in all sections of its rotations."""
    config.update(mlp_bias=False, attention_bias=False)
    config.pop("rope_scaling", None)


ROWS: Final[dict[str, GGUFArchitecture]] = {
    "refact": GGUFArchitecture(
        model_type="gpt_refact",
        architecture="GPTRefactForCausalLM",
        fixed={"activation_function": "silu", "multi_query": True},
    ),
    "openelm": GGUFArchitecture(
        model_type="openelm",
        architecture="OpenELMForCausalLM",
        fixed=SILU,
        adjust=_openelm,
        varied=True,
    ),
    "plamo3": GGUFArchitecture(
        model_type="plamo3", architecture="Plamo3ForCausalLM", fixed=SILU, adjust=_plamo3
    ),
    "paddleocr": GGUFArchitecture(
        model_type="llama", architecture="LlamaForCausalLM", fixed=SILU, adjust=_paddle_ocr
    ),
    "hunyuan_vl": GGUFArchitecture(
        model_type="hunyuan_v1_dense", architecture="HunYuanDenseV1ForCausalLM", fixed=SILU
    ),
    "baichuan": GGUFArchitecture(
        model_type="baichuan", architecture="BaichuanForCausalLM", fixed=SILU, adjust=_baichuan
    ),
    "bitnet": GGUFArchitecture(model_type="bitnet", architecture="BitNetForCausalLM", fixed=SILU),
    "codeshell": GGUFArchitecture(
        model_type="codeshell",
        architecture="CodeShellForCausalLM",
        fixed={"activation_function": "gelu_pytorch_tanh"},
    ),
    "jais": GGUFArchitecture(
        model_type="jais",
        architecture="JAISLMHeadModel",
        fixed={
            **{"activation_function": "swiglu", "position_embedding_type": "alibi"},
            **{"scale_qk_dot_by_d": True, "outputs_first": True},
        },
        keys={"alibi_bias_max": "attention.max_alibi_bias"},
        adjust=_jais,
    ),
    "maincoder": GGUFArchitecture(
        model_type="maincoder",
        architecture="MaincoderForCausalLM",
        fixed=SILU,
        adjust=_maincoder,
    ),
    "plamo": GGUFArchitecture(
        model_type="plamo",
        architecture="PlamoForCausalLM",
        fixed={**SILU, "tiled_heads": False},
    ),
    "plm": GGUFArchitecture(
        model_type="plm",
        architecture="PLMForCausalLM",
        fixed={"hidden_act": "relu2"},
        keys=LATENT,
        adjust=latent_sizes,
        latent=True,
    ),
    "talkie": GGUFArchitecture(
        model_type="talkie", architecture="TalkieForCausalLM", fixed=SILU, adjust=_talkie
    ),
    "deepseek2-ocr": GGUFArchitecture(
        model_type="deepseek",
        architecture="DeepseekForCausalLM",
        fixed={**SILU, "scoring_func": "softmax", "norm_topk_prob": False},
        keys=ROUTED,
        adjust=_deepseek_ocr,
    ),
    "xverse": GGUFArchitecture(
        model_type="llama", architecture="LlamaForCausalLM", fixed={**SILU, "mlp_bias": False}
    ),
    "pangu-embedded": GGUFArchitecture(
        model_type="pangu", architecture="PanguEmbeddedForCausalLM", fixed=SILU, adjust=_pangu
    ),
    "llama-embed": GGUFArchitecture(
        model_type="llama", architecture="LlamaBidirectionalModel", fixed=SILU
    ),
    "gemma-embedding": GGUFArchitecture(
        model_type="gemma3_text",
        architecture="Gemma3TextModel",
        fixed={**GELU, "use_bidirectional_attention": True},
        keys={"sliding_window": "attention.sliding_window"},
        adjust=embedding_gemma,
    ),
    "grok": GGUFArchitecture(
        model_type="grok",
        architecture="Grok1ForCausalLM",
        keys={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "router_logit_softcapping": "router_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            "attn_temperature_len": "attention.temperature_length",
            "attn_output_multiplier": "attention.output_scale",
            "embedding_multiplier_scale": "embedding_scale",
            "output_multiplier_scale": "logit_scale",
        },
        adjust=_grok,
    ),
    "arctic": GGUFArchitecture(
        model_type="arctic",
        architecture="ArcticForCausalLM",
        fixed={**SILU, "moe_layer_frequency": 1, "use_residual": True},
        keys={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
    ),
    "nomic-bert-moe": GGUFArchitecture(
        model_type="nomic_bert",
        architecture="NomicBertModel",
        fixed={"hidden_act": "gelu", "activation_function": "gelu", "experts_apart": True},
        adjust=_nomic_experts,
    ),
    "chatglm": GGUFArchitecture(
        model_type="chatglm", architecture="ChatGLMModel", fixed=SILU, adjust=_chatglm
    ),
    "qwen": GGUFArchitecture(
        model_type="qwen", architecture="QWenLMHeadModel", fixed=SILU, adjust=_qwen
    ),
    "deci": GGUFArchitecture(
        model_type="nemotron-nas",
        architecture="DeciLMForCausalLM",
        fixed={**SILU, "mlp_bias": False},
        adjust=_deci,
        varied=True,
    ),
    "deepseek": GGUFArchitecture(
        model_type="deepseek",
        architecture="DeepseekForCausalLM",
        fixed={**SILU, "scoring_func": "softmax", "norm_topk_prob": False},
        keys=ROUTED,
    ),
}
