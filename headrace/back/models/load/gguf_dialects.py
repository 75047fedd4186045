"""How the tensors of each GGUF architecture are named and ordered, against those of transformers: a
row for each (base/config/gguf_config.py has what their metadata mean).

Sources: gguf.tensor_mapping of the `gguf` library for names, and llama.cpp's converters for the
order of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.back.models.load.gguf_heads import Rows, ValueHeads

HEAD = {"output": "lm_head"}
TOP = HEAD | {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MIXTURE = {
    **_BLOCK,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    **_BLOCK,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_GPT_OSS = {
    **_MIXTURE,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks.",  # a name of its own
}
_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias.",
    "ssm_a": "linear_attn.A_log.",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SANDWICH = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_MLP = {**_BLOCK, "ffn_up": "mlp.gate_up_proj"}


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one architecture's tensors differ: block names, interleaved query and key rows, norms
    stored plus one (but those of recurrent layers), rows in another `order`. `layers`: where blocks
    lie, `top`: names outside of them, `further`: blocks of another name, with their place and
    names; `drafts`: layers behind the last ones only draft tokens; `joined`: what is one tensor
    here and several in the file, `stacked`: what is several here, by their names."""

    blocks: Mapping[str, str]
    interleaved: bool = False
    norm_plus_one: bool = False
    order: Callable[[Mapping[str, Any]], Rows] | None = None
    layers: str = "model.layers"
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    further: tuple[tuple[str, str, Mapping[str, str]], ...] = ()
    drafts: bool = False
    joined: tuple[Joined, ...] = ()
    stacked: Mapping[str, str] = field(default_factory=dict)

    @property
    def sections(self) -> tuple[tuple[str, str, Mapping[str, str]], ...]:
        """Blocks: what files call them, where they lie, and the names in one."""
        return (("blk", self.layers, self.blocks), *self.further)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A tensor `name` of a layer that lies in `parts` of the file, side by side in dimension 1 of
    [heads or experts, rows, columns]. `turned`: the first of them has rows and columns exchanged;
    `flat`: the first two dimensions are one."""

    name: str
    parts: tuple[str, str]
    turned: bool = False
    flat: bool = False


_GLM4 = {
    **_FUSED_MLP,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_BEHIND = {**_BLOCK, "post_attention_norm": "post_attention_layernorm"}
_HUNYUAN = {
    **_BLOCK,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_SHARED_MLP = {
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}
_ROUTED = {
    **_MIXTURE,
    "exp_probs_b": "mlp.gate.e_score_correction_bias.",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_LFM2 = {
    **_BLOCK,
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.w1",
    "ffn_up_exps": "feed_forward.experts.w3",
    "ffn_down_exps": "feed_forward.experts.w2",
    "exp_probs_b": "feed_forward.expert_bias.",
}
_GRANITE_MOE = {
    **_BLOCK,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_MAMBA2 = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias.",
    "ssm_a": "mamba.A_log.",
    "ssm_d": "mamba.D.",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_GRANITE_PARTS = (
    Joined(
        name="block_sparse_moe.input_linear.weight",
        parts=("ffn_gate_exps", "ffn_up_exps"),
    ),
    Joined(name="shared_mlp.input_linear.weight", parts=("ffn_gate_shexp", "ffn_up_shexp")),
)
_GRANITE_MLP = Joined(name="shared_mlp.input_linear.weight", parts=("ffn_gate", "ffn_up"))
_LFM2_TOP = TOP | {"token_embd_norm": "model.embedding_norm"}
_PLAIN_MLP = {
    **_BLOCK,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}

_LLAMA4 = {
    **_BLOCK,
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps": "feed_forward.experts.gate_proj",
    "ffn_up_exps": "feed_forward.experts.up_proj",
    "ffn_down_exps": "feed_forward.experts.down_proj",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
_LAYER_INPUTS = {
    **_SANDWICH,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_LAYER_INPUTS_TOP = {
    **TOP,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA3N = {
    **_LAYER_INPUTS,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale.",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = {
    **_LAYER_INPUTS,
    "layer_output_scale": "layer_scalar.",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale.",
    "ffn_gate_up_exps": "experts.gate_up_proj.",
    "ffn_down_exps": "experts.down_proj.",
    "ffn_down_exps.scale": "router.per_expert_scale.",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}


def _within(module: str, names: Mapping[str, str]) -> dict[str, str]:
    return {name: f"{module}.{rest}" for name, rest in names.items()}


_SCAN = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_a": "A_log.",
    "ssm_d": "D.",
    "ssm_out": "out_proj",
}
_SCAN1 = _SCAN | {"ssm_x": "x_proj", "ssm_dt": "dt_proj"}
_SCAN2 = _SCAN | {"ssm_dt": "dt_bias.", "ssm_norm": "norm"}
_BACKBONE = HEAD | {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_NORM = {"attn_norm": "norm"}
_JAMBA = {
    **_LLAMA4,
    **_within("mamba", _SCAN1),
    "ffn_norm": "pre_ff_layernorm",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
}
_FINAL = TOP | {"output_norm": "model.final_layernorm"}
_NEMOTRON_H = {
    **_NORM,
    **_within("mixer", _SCAN2),
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias.",
    "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_FALCON = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "ln_attn",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}

DIALECTS: Mapping[str, Dialect] = {
    "llama": Dialect(blocks=_MIXTRAL, interleaved=True),
    "qwen2moe": Dialect(blocks=_MIXTURE),
    "qwen3moe": Dialect(blocks=_MIXTURE),
    "olmoe": Dialect(blocks=_MIXTURE),
    "gpt-oss": Dialect(blocks=_GPT_OSS),
    "qwen3next": Dialect(blocks=_MIXTURE | _DELTA, norm_plus_one=True),
    "qwen35": Dialect(blocks=_BLOCK | _DELTA, norm_plus_one=True, order=ValueHeads, drafts=True),
    "qwen35moe": Dialect(
        blocks=_MIXTURE | _DELTA, norm_plus_one=True, order=ValueHeads, drafts=True
    ),
    "qwen3vl": Dialect(blocks=_BLOCK),
    "qwen3vlmoe": Dialect(blocks=_MIXTURE),
    "qwen2": Dialect(blocks=_BLOCK),
    "qwen2vl": Dialect(blocks=_BLOCK),
    "qwen3": Dialect(blocks=_BLOCK),
    "gemma2": Dialect(blocks=_SANDWICH, norm_plus_one=True),
    "gemma3": Dialect(blocks=_SANDWICH, norm_plus_one=True),
    "phi3": Dialect(blocks=_FUSED_MLP),
    "olmo2": Dialect(blocks=_SANDWICH),
    "granite": Dialect(blocks=_BLOCK, interleaved=True),
    "smollm3": Dialect(blocks=_BLOCK, interleaved=True),
    "gemma": Dialect(blocks=_BLOCK, norm_plus_one=True),
    "glm4": Dialect(blocks=_GLM4),
    "seed_oss": Dialect(blocks=_BEHIND),
    "exaone": Dialect(blocks=_BLOCK),
    "exaone4": Dialect(blocks=_SANDWICH),
    "internlm2": Dialect(blocks=_BLOCK, interleaved=True),
    "starcoder2": Dialect(blocks={**_BLOCK, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "stablelm": Dialect(blocks=_BLOCK),
    "command-r": Dialect(blocks=_BLOCK),
    "cohere2": Dialect(blocks=_BLOCK),
    "nemotron": Dialect(blocks=_BLOCK, norm_plus_one=True),
    "arcee": Dialect(blocks=_BLOCK, interleaved=True),
    "olmo": Dialect(blocks=_BLOCK, interleaved=True),
    "phi2": Dialect(blocks=_PLAIN_MLP, top=TOP | {"output_norm": "model.final_layernorm"}),
    "ernie4_5": Dialect(blocks=_BLOCK),
    "ernie4_5-moe": Dialect(
        blocks=_ROUTED | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias."}
    ),
    "hunyuan-dense": Dialect(blocks=_HUNYUAN),
    "hunyuan-moe": Dialect(
        blocks=_MIXTURE | _HUNYUAN | _SHARED_MLP | {"ffn_gate_inp": "mlp.gate.wg"}
    ),
    "lfm2": Dialect(blocks=_LFM2, top=_LFM2_TOP),
    "lfm2moe": Dialect(blocks=_LFM2, top=_LFM2_TOP),
    "glm4moe": Dialect(
        blocks=_ROUTED | {"post_attention_norm": "post_attention_layernorm"}, drafts=True
    ),
    "dots1": Dialect(blocks=_ROUTED),
    "minimax-m2": Dialect(
        blocks=_MIXTRAL | {"exp_probs_b": "block_sparse_moe.e_score_correction_bias."}
    ),
    "deepseek2": Dialect(
        blocks=_ROUTED | _LATENT,
        joined=(
            Joined(
                name="self_attn.kv_b_proj.weight",
                parts=("attn_k_b", "attn_v_b"),
                turned=True,
                flat=True,
            ),
        ),
    ),
    "granitemoe": Dialect(blocks=_GRANITE_MOE, interleaved=True, joined=_GRANITE_PARTS),
    "granitehybrid": Dialect(
        blocks=_GRANITE_MOE | _MAMBA2 | {"ffn_down": "shared_mlp.output_linear"},
        interleaved=True,
        joined=(*_GRANITE_PARTS, _GRANITE_MLP),
    ),
    "mistral3": Dialect(blocks=_BLOCK, interleaved=True),
    "llama4": Dialect(blocks=_LLAMA4),
    "gemma3n": Dialect(
        blocks=_GEMMA3N,
        top=_LAYER_INPUTS_TOP,
        stacked={
            "altup_proj.weight": "model.altup_projections.{}.weight",
            "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
        },
    ),
    "gemma4": Dialect(blocks=_GEMMA4, top=_LAYER_INPUTS_TOP),
    "mamba": Dialect(
        blocks=_NORM | _within("mixer", _SCAN1), layers="backbone.layers", top=_BACKBONE
    ),
    "mamba2": Dialect(
        blocks=_NORM | _within("mixer", _SCAN2), layers="backbone.layers", top=_BACKBONE
    ),
    "jamba": Dialect(blocks=_JAMBA, top=_FINAL),
    "falcon-h1": Dialect(
        blocks=_LLAMA4 | _within("mamba", _SCAN2) | {"ffn_norm": "pre_ff_layernorm"}, top=_FINAL
    ),
    "nemotron_h": Dialect(blocks=_NEMOTRON_H, layers="backbone.layers", top=_BACKBONE),
    "nemotron_h_moe": Dialect(
        blocks=_NEMOTRON_H, layers="backbone.layers", top=_BACKBONE, drafts=True
    ),
}
