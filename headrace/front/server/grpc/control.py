"""The service `vllm.Control`: administration over gRPC, for the tools that speak vLLM's protocol.

Every method does what its HTTP route does, and needs the key of that route. What is not built here
is UNIMPLEMENTED, with words; lists of what there cannot be (event sources) are empty."""

from __future__ import annotations

from typing import Any

from headrace import __version__
from headrace.base.errors import InvalidRequest, Unsupported
from headrace.front.server.administration import adapters, weights
from headrace.front.server.administration.api import answer
from headrace.front.server.administration.operations import OPERATIONS, num_workers
from headrace.front.server.administration.parameters import NoParameters
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.request import parse
from headrace.front.server.grpc.rpc import Fields, Rpc, RpcService, Unary

_MODES = ("abort", "abort", "wait", "keep")


async def server_info(context: RequestContext, fields: Fields) -> Fields:
    """GetServerInfo: figures of the first core; all are alike."""
    services = context.services
    engine: Any = services.config["engine"]
    statuses: list[Any] = await services.engine.call("status")
    device, world = engine["device"], num_workers(context)
    tensor, stages = device["tensor_parallel"], device["pipeline_parallel"]
    copies = world // (tensor * stages)
    return {
        "engine_version": __version__,
        "api_version": "vllm.Control",
        "parallelism": {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": stages,
            "data_parallel_size": copies,
            "decode_context_parallel_size": 1,
            "world_size": world,
            "data_parallel_size_local": copies,
        },
        "max_model_len": services.text.max_model_len,
        "kv_block_size": statuses[0]["block_tokens"],
        "total_kv_blocks": sum(one["total_blocks"] for one in statuses),
        "max_running_requests": sum(one["total_rows"] for one in statuses),
        "max_batched_tokens": engine["scheduler"]["max_step_tokens"],
        "rl_capabilities": {"sleep_mode_enabled": True},
        "effective_attention_block_size": statuses[0]["block_tokens"],
    }


async def model_info(context: RequestContext, fields: Fields) -> Fields:
    """GetModelInfo."""
    text = context.services.text
    return {
        "model_id": text.model_names[0],
        "served_model_name": text.model_names[0],
        "served_model_aliases": text.model_names[1:],
        "supports_text_input": True,
        "supports_token_ids_input": True,
        "reasoning_parser": "" if text.reasoning_parser == "none" else text.reasoning_parser,
        "tool_call_parser": "" if text.tool_parser == "none" else text.tool_parser,
    }


async def abort(context: RequestContext, fields: Fields) -> Fields:
    """Abort: those with these ids; never all."""
    if "request_ids" not in fields:
        raise InvalidRequest("request_ids: a list of ids is needed", field="request_ids")
    return await _done("abort", context, fields)


async def pause(context: RequestContext, fields: Fields) -> Fields:
    """PauseGeneration."""
    return await _done("pause", context, {**fields, "mode": _mode(fields)})


async def resume(context: RequestContext, fields: Fields) -> Fields:
    """ResumeGeneration."""
    return await _done("resume", context, {})


async def is_paused(context: RequestContext, fields: Fields) -> Fields:
    """IsPaused."""
    return {"paused": (await _asked("is_paused", context, {}))["is_paused"]}


async def sleep(context: RequestContext, fields: Fields) -> Fields:
    """Sleep."""
    return await _done("sleep", context, {**fields, "mode": _mode(fields)})


async def wake(context: RequestContext, fields: Fields) -> Fields:
    """WakeUp."""
    return await _done("wake", context, fields)


async def is_sleeping(context: RequestContext, fields: Fields) -> Fields:
    """IsSleeping."""
    return {"sleeping": (await _asked("is_sleeping", context, {}))["is_sleeping"]}


async def shutdown(context: RequestContext, fields: Fields) -> Fields:
    """Shutdown: accepted, not complete."""
    return await _done("shutdown", context, {})


async def nothing(context: RequestContext, fields: Fields) -> Fields:
    """An empty list."""
    return {}


_OPERATIONS = {operation.name: operation for operation in OPERATIONS}


async def _asked(name: str, context: RequestContext, fields: Fields) -> Fields:
    return await answer(context, _OPERATIONS[name], fields)


async def _done(name: str, context: RequestContext, fields: Fields) -> Fields:
    """Of a method whose answer has no fields."""
    await _asked(name, context, fields)
    return {}


def _mode(fields: Fields) -> str:
    number = fields.get("mode", 0)
    if not 0 <= number < len(_MODES):
        raise InvalidRequest(f"mode: {number} given; allowed: 0 to {len(_MODES) - 1}", field="mode")
    return _MODES[number]


def _refusing(words: str) -> Unary:
    async def method(context: RequestContext, fields: Fields) -> Fields:
        raise Unsupported(words)

    return method


async def load_lora(context: RequestContext, fields: Fields) -> Fields:
    """LoadLora: into every engine core."""
    name, folder = fields.get("lora_name", ""), fields.get("source_path", "")
    asked = {"lora_name": name, "lora_path": folder}
    await adapters.load(context, parse(asked, adapters.LoadAdapterParameters))
    return {"adapter": {"lora_name": name, "source_path": folder}}


async def unload_lora(context: RequestContext, fields: Fields) -> Fields:
    """UnloadLora."""
    asked = {"lora_name": fields.get("lora_name", "")}
    await adapters.unload(context, parse(asked, adapters.UnloadAdapterParameters))
    return {"adapter": asked}


async def list_loras(context: RequestContext, fields: Fields) -> Fields:
    """ListLoras."""
    names = context.services.engine.adapters
    return {"adapters": [{"lora_name": name} for name in names]}


async def weight_version(context: RequestContext, fields: Fields) -> Fields:
    """GetWeightVersion: of the weights that answers come from."""
    return await weights.version(context, NoParameters())


async def name_weights(context: RequestContext, fields: Fields) -> Fields:
    """UpdateWeightVersion: another name for the weights that are there."""
    try:
        asked = parse({"new_version": fields.get("weight_version", "")}, weights.VersionParameters)
        await weights.name_version(context, asked)
    except InvalidRequest as error:
        message = error.message.replace("new_version", "weight_version")
        raise InvalidRequest(message, field="weight_version") from None
    return {}


_NO_TRANSFER = _refusing(
    "weights are replaced over HTTP (POST /update_weights and its like), or by "
    "headrace.admin.v1.Admin/UpdateWeights"
)
SERVICE = RpcService(
    full_name="vllm.Control",
    methods={
        "GetServerInfo": Rpc(route="/server_info", unary=server_info),
        "GetModelInfo": Rpc(route="/server_info", unary=model_info),
        "Shutdown": Rpc(route="/pause", unary=shutdown),
        "Abort": Rpc(route="/abort_requests", unary=abort),
        "LoadLora": Rpc(route="/v1/load_lora_adapter", unary=load_lora),
        "UnloadLora": Rpc(route="/v1/unload_lora_adapter", unary=unload_lora),
        "ListLoras": Rpc(route="/v1/lora_adapters", unary=list_loras),
        "GetKvEventSources": Rpc(route="/kv_event_sources", unary=nothing),
        "PauseGeneration": Rpc(route="/pause", unary=pause),
        "ResumeGeneration": Rpc(route="/resume", unary=resume),
        "IsPaused": Rpc(route="/is_paused", unary=is_paused),
        "Sleep": Rpc(route="/sleep", unary=sleep),
        "WakeUp": Rpc(route="/wake_up", unary=wake),
        "IsSleeping": Rpc(route="/is_sleeping", unary=is_sleeping),
        "GetWeightVersion": Rpc(route="/get_weight_version", unary=weight_version),
        "UpdateWeightVersion": Rpc(route="/update_weight_version", unary=name_weights),
        **{
            name: Rpc(route="/update_weights", unary=_NO_TRANSFER)
            for name in (
                *("InitWeightTransferEngine", "StartWeightUpdate", "StartDraftWeightUpdate"),
                *("UpdateWeights", "FinishWeightUpdate"),
            )
        },
    },
)
