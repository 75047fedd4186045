"""The options about devices and processes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.base.config.bounds import Auto, Natural, Processes

OWN_EXECUTORS = ("auto", "inline", "processes", "null")
"""What `--executor` takes without packages."""


class DeviceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where and in how many processes the model runs."""

    device: Annotated[
        str,
        Meta(
            min_length=1,
            description="Kind of device: auto, cpu, cuda, or the platform of an installed package.",
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool,
        Meta(
            description="Call the kernels of each step instead of replaying recorded steps: slower, for looking for "
            "faults. Results are the same."
        ),
    ] = False
    unfused: Annotated[
        tuple[Literal["qk-rope", "norm-quant", "linear", "all-reduce-norm"], ...],
        Meta(
            description="Kernels that do several operations in one and are left out, for looking for faults: norms of "
            "queries and keys, rotation and the write to the cache; a norm and the quantization behind it; a "
            "product with the norm before it and the activation, sum or choice of experts behind it; the sum over "
            "ranks and the norm behind it."
        ),
    ] = ()
    executor: Annotated[
        str,
        Meta(
            description="Workers inside the core process (inline), in processes of their own (processes), or none "
            "(null, a fake for measuring); or an extension's."
        ),
    ] = "auto"
    tensor_parallel: Annotated[Processes, Meta(description="Devices that share each layer.")] = 1
    pipeline_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=6,
            description="Stages that the layers are split into, one behind the other, each with its own "
            "--tensor-parallel devices.",
        ),
    ] = 1
    pipeline_layers: Annotated[
        tuple[Processes, ...] | None,
        Meta(
            description="Layers of each stage, such as 10,12,10; none: as many as make the bytes of the stages alike."
        ),
    ] = None
    sequence_parallel: Annotated[
        bool,
        Meta(
            description="Between the layers of a long prompt each rank of --tensor-parallel keeps its part of the "
            "tokens: as many bytes are sent, and activations take a part of the memory."
        ),
    ] = False
    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="The devices of --tensor-parallel and --data-parallel share out the routed experts of mixtures "
            "as whole ones, instead of a part of each; all else stays divided as it was."
        ),
    ] = False
    all2all_backend: Annotated[
        Literal["allreduce", "allgather_reducescatter", "ragged", "padded"],
        Meta(
            description="How tokens come to whole experts: not at all, as all devices have all tokens and add up what "
            "their experts give; or each device sends a share of the tokens, to all (with --data-parallel the "
            "default), to those that have their experts, or in messages of one size."
        ),
    ] = "allreduce"
    num_redundant_experts: Annotated[
        Natural,
        Meta(
            description="With --enable-expert-parallel: so many more places for experts than a layer has, for copies "
            "of those with most tokens; at least what makes the devices' numbers alike."
        ),
    ] = 0
    expert_rebalance_steps: Annotated[
        Natural,
        Meta(
            description="With --enable-expert-parallel: every so many steps experts, and copies of them, change "
            "devices as the tokens of each were counted; such as 3000. 0: they stay where they are."
        ),
    ] = 0
    decode_context_parallel_size: Annotated[
        Processes,
        Meta(
            description="So many devices of --tensor-parallel, which would hold the same KV heads, share out the KV of "
            "each sequence instead, token by token: so many times the context fits."
        ),
    ] = 1
    dcp_comm_backend: Annotated[
        Literal["a2a", "ag_rs"],
        Meta(
            description="How these put their attention together: one exchange of results with their log-sum-exps, or "
            "log-sum-exps gathered and weighed results summed and scattered."
        ),
    ] = "a2a"
    dcp_kv_cache_interleave_size: Annotated[
        Processes, Meta(description="Tokens in a row that lie on one of them.")
    ] = 1
    data_parallel: Annotated[
        Processes,
        Meta(
            description="Engine cores, each with requests, attention and a KV cache of its own. With "
            "--enable-expert-parallel the devices of all of them share out the routed experts; without, each has a "
            "whole copy of the model, as with --replicas."
        ),
    ] = 1
    replicas: Annotated[
        Processes, Meta(description="Engine cores, each with a whole copy of the model.")
    ] = 1
    max_replicas: Annotated[
        Processes | None,
        Meta(
            description="Engine cores that the server may have while it runs (/scale_elastic_ep), of which --replicas "
            "are there at start and always. None: as many as --replicas."
        ),
    ] = None
    gpu_memory: Annotated[
        str,
        Meta(
            pattern=r"^(auto|\d+(\.\d+)?\s*([kKmMgGtT]i?)?[bB]?)$",
            description="Memory that a worker may take on its GPU, all in: a size such as 80GiB, or a fraction of what "
            "is free (0.5); auto is 0.92 of it. What the model and its largest step leave goes to the KV cache.",
        ),
    ] = "auto"
    offload_layers: Annotated[
        Natural | Auto,
        Meta(
            description="Layers whose weights lie in pinned host memory and are copied to the GPU ahead of their use, "
            "each step anew, for models larger than it; 3 at least, as two slots for them stay on the device. auto: "
            "as few as the memory needs, or none. headrace plan says how fast that is."
        ),
    ] = 0
    offload_experts: Annotated[
        Natural | Auto,
        Meta(
            description="Layers whose routed experts lie in pinned host memory: steps of few tokens read the chosen "
            "ones there, larger ones have them copied as with --offload-layers."
        ),
    ] = 0
    threads: Annotated[
        Processes | Auto,
        Meta(description="CPU threads of a worker; auto respects cpuset and cgroup."),
    ] = "auto"
    cpu_binding: Annotated[
        str,
        Meta(
            pattern=r"^(auto|none|\d+(-\d+)?(,\d+(-\d+)?)*)$",
            description="CPUs of the kernel threads of a single CPU worker, one thread each, such as 0-3,8; the other "
            "threads of the server get the rest. auto: one per physical core; none: left to the system.",
        ),
    ] = "auto"
