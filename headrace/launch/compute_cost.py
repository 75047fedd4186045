"""What a step costs on one device, by the shapes of the model's weights and caches: what the engine
core counts by with `--mfu-metrics` (core/compute_meter.py)."""

from __future__ import annotations

from headrace.back.attention.forms import CacheForm, HeadsForm, LatentForm
from headrace.back.models.blocks import Decoder
from headrace.back.models.registry import DTYPES
from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import ConfigError
from headrace.core.compute_meter import AttendedCache, StepCost
from headrace.launch.plan import build_without_memory, cost_of, rank_share


def step_cost(spec: EngineSpec) -> StepCost:
    """Of each of the devices; ConfigError for a model whose cost is not known by its shapes. Stages
    of a pipeline are taken to be alike."""
    device, model_spec = spec.device, spec.model
    model = build_without_memory(
        model_spec,
        block_tokens=spec.kv.block_tokens,
        **rank_share(device),
    )
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"--mfu-metrics: models of family {model_spec.family} are not counted",
            field="mfu_metrics",
        )
    sizes, stages = model.spec.sizes, device.pipeline_parallel
    dtype = DTYPES[model_spec.dtype]
    cost = cost_of(model, dtype=dtype)
    head = sizes.vocabulary * sizes.width // device.tensor_parallel
    heads = -(-sizes.heads // device.tensor_parallel)
    caches = [
        _attended(form, heads, form.block_bytes(16, dtype) // 16, stages) for form in model.kv_forms
    ]
    return StepCost(
        token_flops=2 * (cost.multiplied - head) // stages,
        sampled_flops=2 * head // stages,
        read_by=lambda tokens: cost.read_by(tokens) / stages,
        caches=tuple(cache for cache in caches if cache is not None),
    )


def _attended(form: CacheForm, heads: int, token_bytes: int, stages: int) -> AttendedCache | None:
    """Scores and their sum of values are a product each. None: no token sees others there."""
    if isinstance(form, HeadsForm):
        width = form.head_dim
    elif isinstance(form, LatentForm):
        width = form.width
    else:
        return None
    return AttendedCache(
        pair_flops=2 * 2 * heads * width // stages,
        token_bytes=token_bytes // stages,
        span=form.span,
    )
