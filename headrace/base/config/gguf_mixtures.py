"""GGUF architectures with experts: what their metadata say about them, as config.json does."""

from __future__ import annotations

from typing import Any, Final

from headrace.base.config.gguf import GGUFFile

Config = dict[str, Any]

CHOSEN: Final = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
INNER: Final = {"moe_intermediate_size": "expert_feed_forward_length"}
SHARED: Final = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
GPT_OSS: Final = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}


def llama(file: GGUFFile, name: str, config: Config) -> None:
    """With experts a file of this architecture is a Mixtral; theirs lie in one tensor per layer."""
    experts = file.whole(f"{name}.expert_count") or 0
    if experts == 0:
        return
    config["model_type"], config["architectures"] = "mixtral", ["MixtralForCausalLM"]
    config["num_local_experts"] = experts
    config["num_experts_per_tok"] = file.whole(f"{name}.expert_used_count")
    config["sliding_window"] = None


def renormalized(file: GGUFFile, name: str, config: Config) -> None:
    """Whether the weights of the chosen add up to 1: newer files say so."""
    stated = file.metadata.get(f"{name}.expert_weights_norm")
    if isinstance(stated, bool):
        config["norm_topk_prob"] = stated


def gpt_oss(file: GGUFFile, name: str, config: Config) -> None:
    """YaRN as OpenAI's checkpoints have it; windows in every other layer, the first one's on."""
    layers = config["num_hidden_layers"]
    kinds = ("sliding_attention", "full_attention")
    config["layer_types"] = [kinds[layer % 2] for layer in range(layers)]
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        config["rope_scaling"] = scaling | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
