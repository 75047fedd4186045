"""GGUF architectures with recurrent layers: what their metadata and tensors say about them, as
config.json does."""

from __future__ import annotations

from typing import Any, Final

from headrace.base.config.gguf import GGUFFile

Config = dict[str, Any]

DELTA: Final = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
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
