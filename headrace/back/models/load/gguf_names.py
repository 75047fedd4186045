"""What GGUF files and checkpoints call the tensors of a block, and those outside of blocks: the
latter's names by the former's. A name that ends with a dot has no ending of its own.

Source: gguf.tensor_mapping of the `gguf` library.
"""

from __future__ import annotations

from collections.abc import Mapping

PLUS_ONE = {"linear_attn.norm.weight": 0.0, "norm.weight": 1.0}
"""What is added to norms, by the ends of their names, of which the first that fits counts."""
HEAD = {"output": "lm_head"}
TOP = HEAD | {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
BLOCK = {
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
MIXTURE = {
    **BLOCK,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL = {
    **BLOCK,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
GPT_OSS = {
    **MIXTURE,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks.",  # a name of its own
}
DELTA = {
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
SANDWICH = {
    **BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED_MLP = {**BLOCK, "ffn_up": "mlp.gate_up_proj"}


GLM4 = {
    **FUSED_MLP,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
BEHIND = {**BLOCK, "post_attention_norm": "post_attention_layernorm"}
HUNYUAN = {
    **BLOCK,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
SHARED_MLP = {
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}
ROUTED = {
    **MIXTURE,
    "exp_probs_b": "mlp.gate.e_score_correction_bias.",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
LFM2 = {
    **BLOCK,
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
GRANITE_MOE = {
    **BLOCK,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
MAMBA2 = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias.",
    "ssm_a": "mamba.A_log.",
    "ssm_d": "mamba.D.",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
LFM2_TOP = TOP | {"token_embd_norm": "model.embedding_norm"}
PLAIN_MLP = {
    **BLOCK,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}

LLAMA4 = {
    **BLOCK,
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
LAYER_INPUTS = {
    **SANDWICH,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
LAYER_INPUTS_TOP = {
    **TOP,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GEMMA3N = {
    **LAYER_INPUTS,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale.",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
GEMMA4 = {
    **LAYER_INPUTS,
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


def within(module: str, names: Mapping[str, str]) -> dict[str, str]:
    """The names below a module."""
    return {name: f"{module}.{rest}" for name, rest in names.items()}


SCAN = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_a": "A_log.",
    "ssm_d": "D.",
    "ssm_out": "out_proj",
}
SCAN1 = SCAN | {"ssm_x": "x_proj", "ssm_dt": "dt_proj"}
SCAN2 = SCAN | {"ssm_dt": "dt_bias.", "ssm_norm": "norm"}
BACKBONE = HEAD | {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
NORM = {"attn_norm": "norm"}
JAMBA = {
    **LLAMA4,
    **within("mamba", SCAN1),
    "ffn_norm": "pre_ff_layernorm",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
}
FINAL = TOP | {"output_norm": "model.final_layernorm"}
NEMOTRON_H = {
    **NORM,
    **within("mixer", SCAN2),
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
AFMOE = {
    **SANDWICH,
    "attn_gate": "self_attn.gate_proj",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias.",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
LING = {
    **ROUTED,
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "attn_q_norm": "attention.query_layernorm",
    "attn_k_norm": "attention.key_layernorm",
    "exp_probs_b": "mlp.gate.expert_bias.",
}
GPT_2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT_2_TOP = {
    **HEAD,
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
}
MPT = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
BLOOM_TOP = {
    **HEAD,
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
}
NEOX_TOP = {
    "output": "embed_out",
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
}
FALCON = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}

BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
JINA = {
    **BERT,
    "ffn_up": "mlp.gated_layers",
    "ffn_down": "mlp.wo",
    "layer_output_norm": "mlp.layernorm",
}
JINA_GATED = {"ffn_gate": "mlp.gated_layers_w", "ffn_up": "mlp.gated_layers_v"}
BERT_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
}
NOMIC = {
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_gate": "mlp.fc12",
    "ffn_up": "mlp.fc11",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
JINA_V3 = {
    **NOMIC,
    **{"attn_qkv": "mixer.Wqkv", "attn_output": "mixer.out_proj", "ffn_up": "mlp.fc1"},
}
NEOBERT = {
    **{"attn_norm": "attention_norm", "attn_qkv": "qkv", "attn_output": "wo"},
    **{"ffn_norm": "ffn_norm", "ffn_up": "ffn.w12", "ffn_down": "ffn.w3"},
}
NEOBERT_TOP = {"token_embd": "encoder", "enc.output_norm": "layer_norm"}
MODERN_BERT = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
MODERN_BERT_TOP = {
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "output_norm": "final_norm",
}
T5_ATTENTION = {
    "attn_norm": "layer.0.layer_norm",
    "attn_q": "layer.0.SelfAttention.q",
    "attn_k": "layer.0.SelfAttention.k",
    "attn_v": "layer.0.SelfAttention.v",
    "attn_o": "layer.0.SelfAttention.o",
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
}
T5_CROSS = {
    "cross_attn_norm": "layer.1.layer_norm",
    "cross_attn_q": "layer.1.EncDecAttention.q",
    "cross_attn_k": "layer.1.EncDecAttention.k",
    "cross_attn_v": "layer.1.EncDecAttention.v",
    "cross_attn_o": "layer.1.EncDecAttention.o",
    "cross_attn_rel_b": "layer.1.EncDecAttention.relative_attention_bias",
}
T5_TOP = {
    **HEAD,
    "token_embd": "shared",
    "enc.output_norm": "encoder.final_layer_norm",
    "dec.output_norm": "decoder.final_layer_norm",
}


def t5_mlp(place: str, *, gated: bool) -> dict[str, str]:
    """Of an MLP below `place`."""
    module = f"{place}.DenseReluDense"
    up = "wi_1" if gated else "wi"
    return {
        "ffn_norm": f"{place}.layer_norm",
        "ffn_gate": f"{module}.wi_0",
        "ffn_up": f"{module}.{up}",
        "ffn_down": f"{module}.wo",
    }
