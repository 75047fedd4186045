"""Rows of the table of GGUF architectures: those with recurrent layers."""

from __future__ import annotations

from typing import Final

from headrace.base.config import gguf_mixtures as mixtures
from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import SILU, Config, GGUFArchitecture, need_int
from headrace.base.errors import CheckpointError

DELTA: Final = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_MAMBA2: Final = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_ssm": "ssm.inner_size",
}


def qwen_delta(file: GGUFFile, name: str, config: Config) -> None:
    """Qwen3-Next and Qwen 3.5: layers with queries of their own have attention, the others the
    gated delta rule; layers behind them only draft tokens."""
    config["num_hidden_layers"] -= file.whole(f"{name}.nextn_predict_layers") or 0
    config["layer_types"] = [
        "full_attention" if f"blk.{layer}.attn_q.weight" in file.tensors else "linear_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    for key, metadata in DELTA.items():
        if config.get(key, 0) < 1:
            raise file.wrong(f"{name}.{metadata}", "a whole number of at least 1")
    heads, inner = config["linear_num_value_heads"], file.whole(f"{name}.ssm.inner_size") or 0
    if inner < 1 or inner % heads or heads % config["linear_num_key_heads"]:
        raise file.wrong(f"{name}.ssm.inner_size", f"a multiple of {heads} heads")
    config["linear_value_head_dim"] = inner // heads
    rotary = file.whole(f"{name}.rope.dimension_count") or config["head_dim"]
    config["partial_rotary_factor"] = rotary / config["head_dim"]
    config["separate_qkvz"] = any(one.endswith(".attn_gate.weight") for one in file.tensors)


def _lfm2(file: GGUFFile, name: str, config: Config) -> None:
    """Layers without KV heads are convolutions."""
    config["layer_types"] = [
        "full_attention" if f"blk.{layer}.attn_q.weight" in file.tensors else "conv"
        for layer in range(config["num_hidden_layers"])
    ]


def _granite_hybrid(file: GGUFFile, name: str, config: Config) -> None:
    """Layers with queries have attention, the others are Mamba 2; without experts the MLP is what
    others call the shared one."""
    config["layer_types"] = [
        "attention" if f"blk.{layer}.attn_q.weight" in file.tensors else "mamba"
        for layer in range(config["num_hidden_layers"])
    ]
    rotated = file.flag(f"{name}.rope.scaling.finetuned", False)
    config["position_embedding_type"] = "rope" if rotated else "nope"
    config.setdefault("num_local_experts", 0)
    if not config["num_local_experts"]:
        config["shared_intermediate_size"] = config["intermediate_size"]


def _mamba(file: GGUFFile, name: str, config: Config) -> None:
    """Falcon Mamba where time steps and what they weigh are normed."""
    if file.flag(f"{name}.ssm.dt_b_c_rms", False):
        config["model_type"], config["architectures"] = (
            "falcon_mamba",
            ["FalconMambaForCausalLM"],
        )
        config["mixer_rms_eps"] = config["rms_norm_eps"]
    config["use_conv_bias"] = "blk.0.ssm_conv1d.bias" in file.tensors


def _mamba2(file: GGUFFile, name: str, config: Config) -> None:
    config["head_dim"] = _head_dim(file, name, config["num_heads"])
    config["use_conv_bias"] = "blk.0.ssm_conv1d.bias" in file.tensors


def _head_dim(file: GGUFFile, name: str, heads: int) -> int:
    """Of Mamba 2's heads."""
    inner = need_int(file, f"{name}.ssm.inner_size")
    if inner % heads:
        raise file.wrong(f"{name}.ssm.inner_size", f"a multiple of {heads} heads")
    return inner // heads


def _places(file: GGUFFile, config: Config, part: str) -> list[int]:
    """The layers that have this tensor."""
    layers = range(config["num_hidden_layers"])
    return [layer for layer in layers if f"blk.{layer}.{part}.weight" in file.tensors]


def _plamo2(file: GGUFFile, name: str, config: Config) -> None:
    """Layers attend to all before them, as llama.cpp has it, or are recurrent."""
    attend = set(_places(file, config, "attn_qkv"))
    layers = range(config["num_hidden_layers"])
    config["layer_types"] = ["full_attention" if i in attend else "mamba" for i in layers]


def _jamba(file: GGUFFile, name: str, config: Config) -> None:
    """Attention and experts stand at one offset within each period."""
    for key, part in (("attn", "attn_q"), ("expert", "ffn_gate_inp")):
        layers, places = config["num_hidden_layers"], _places(file, config, part)
        first = places[0] if places else 0
        period = places[1] - first if len(places) > 1 else layers
        if places and places != list(range(first, layers, period)):
            raise CheckpointError(
                f"{file.paths[0]}: tensors {part} are in the layers {places}, in no period"
            )
        config[f"{key}_layer_offset"] = first
        config[f"{key}_layer_period"] = period if places else layers + 1
    config["mamba_expand"] = need_int(file, f"{name}.ssm.inner_size") // config["hidden_size"]
    config.setdefault("num_experts", 1)


def _falcon_h1(file: GGUFFile, name: str, config: Config) -> None:
    """All multipliers are in the weights already."""
    config["mamba_rms_norm"] = "blk.0.ssm_norm.weight" in file.tensors
    config["mamba_norm_before_gate"] = False


def _nemotron_h(file: GGUFFile, name: str, config: Config) -> None:
    """Each layer is one branch; layers behind the last only draft tokens."""
    config["num_hidden_layers"] -= file.whole(f"{name}.nextn_predict_layers") or 0
    kinds = (("ssm_in", "mamba"), ("attn_q", "attention"), ("ffn_gate_inp", "moe"))
    of_layer = dict.fromkeys(range(config["num_hidden_layers"]), "mlp")
    for part, kind in kinds:
        of_layer |= dict.fromkeys(_places(file, config, part), kind)
    config["layers_block_type"] = list(of_layer.values())
    config["mamba_head_dim"] = _head_dim(file, name, config["mamba_num_heads"])
    config["use_conv_bias"] = "blk.0.ssm_conv1d.bias" in file.tensors


_RECURRENT: Final = {
    "conv_kernel": "ssm.conv_kernel",
    "state_size": "ssm.state_size",
}
_NEMOTRON: Final = {
    "conv_kernel": "ssm.conv_kernel",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "mamba_num_heads": "ssm.time_step_rank",
}

ROWS: Final[dict[str, GGUFArchitecture]] = {
    "qwen3next": GGUFArchitecture(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        fixed={**SILU, "norm_topk_prob": True},
        keys=mixtures.CHOSEN | mixtures.INNER | mixtures.SHARED | DELTA,
        adjust=qwen_delta,
    ),
    "qwen35": GGUFArchitecture(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        fixed=SILU,
        keys=DELTA,
        adjust=qwen_delta,
    ),
    "qwen35moe": GGUFArchitecture(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        fixed={**SILU, "norm_topk_prob": True},
        keys=mixtures.CHOSEN | mixtures.INNER | mixtures.SHARED | DELTA,
        adjust=qwen_delta,
    ),
    "lfm2": GGUFArchitecture(
        model_type="lfm2",
        architecture="Lfm2ForCausalLM",
        fixed={"block_auto_adjust_ff_dim": False},
        keys={"conv_L_cache": "shortconv.l_cache"},
        adjust=_lfm2,
    ),
    "lfm2moe": GGUFArchitecture(
        model_type="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        fixed={"block_auto_adjust_ff_dim": False, "norm_topk_prob": True, "use_expert_bias": True},
        keys={
            **mixtures.CHOSEN,
            **mixtures.INNER,
            "conv_L_cache": "shortconv.l_cache",
            "num_dense_layers": "leading_dense_block_count",
        },
        adjust=_lfm2,
    ),
    "granitehybrid": GGUFArchitecture(
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        fixed={**SILU, "separate_experts": True},
        keys=mixtures.GRANITE | _MAMBA2,
        adjust=_granite_hybrid,
    ),
    "mamba": GGUFArchitecture(
        model_type="mamba",
        architecture="MambaForCausalLM",
        fixed=SILU,
        keys={
            **_RECURRENT,
            "intermediate_size": "ssm.inner_size",
            "time_step_rank": "ssm.time_step_rank",
        },
        adjust=_mamba,
        recurrent=True,
    ),
    "mamba2": GGUFArchitecture(
        model_type="mamba2",
        architecture="Mamba2ForCausalLM",
        fixed=SILU,
        keys={**_RECURRENT, "n_groups": "ssm.group_count", "num_heads": "ssm.time_step_rank"},
        adjust=_mamba2,
        recurrent=True,
    ),
    "plamo2": GGUFArchitecture(
        model_type="plamo2",
        architecture="Plamo2ForCausalLM",
        fixed=SILU,
        keys={
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_num_heads": "ssm.time_step_rank",
        },
        adjust=_plamo2,
    ),
    "jamba": GGUFArchitecture(
        model_type="jamba",
        architecture="JambaForCausalLM",
        fixed=SILU,
        keys={
            **mixtures.CHOSEN,
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        adjust=_jamba,
    ),
    "falcon-h1": GGUFArchitecture(
        model_type="falcon_h1",
        architecture="FalconH1ForCausalLM",
        fixed=SILU,
        keys=_MAMBA2,
        adjust=_falcon_h1,
    ),
    **{
        name: GGUFArchitecture(
            model_type="nemotron_h",
            architecture="NemotronHForCausalLM",
            fixed={"mlp_hidden_act": "relu2"},
            keys={
                **_NEMOTRON,
                **mixtures.ROUTED,
                "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
                "moe_latent_size": "moe_latent_size",
            },
            adjust=_nemotron_h,
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    },
}
