"""The service `vllm.Control`: administration over gRPC, for the tools that speak vLLM's protocol.

Every method does what its HTTP route does, and needs the key of that route. What is not built here
is UNIMPLEMENTED, with words; lists of what there cannot be (adapters, event sources) are empty."""

from __future__ import annotations

from typing import Any

from headrace import __version__
from headrace.base.errors import InvalidRequest, Unsupported
from headrace.front.server.administration import operations
from headrace.front.server.administration.named import AbortRequest
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.request import parse
from headrace.front.server.grpc.rpc import Fields, Rpc, RpcService, Unary
from headrace.front.server.grpc.wire import Protocol

_EMPTY = (
    *("GetServerInfo", "GetModelInfo", "Shutdown", "ListLoras", "GetKvEventSources"),
    *("ResumeGeneration", "IsPaused", "IsSleeping", "StartWeightUpdate", "StartDraftWeightUpdate"),
    "GetWeightVersion",
)
_SILENT = (
    *("Shutdown", "Abort", "PauseGeneration", "ResumeGeneration", "Sleep", "WakeUp"),
    *("InitWeightTransferEngine", "StartWeightUpdate", "StartDraftWeightUpdate"),
    *("UpdateWeights", "FinishWeightUpdate", "UpdateWeightVersion"),
)
_METHODS = {
    "GetServerInfo": "ServerInfo",
    "GetModelInfo": "ModelInfo",
    **{
        name: f"{name}Response"
        for name in (
            *("Shutdown", "Abort", "LoadLora", "UnloadLora", "ListLoras", "GetKvEventSources"),
            *("PauseGeneration", "ResumeGeneration", "IsPaused", "Sleep", "WakeUp", "IsSleeping"),
            *("InitWeightTransferEngine", "StartWeightUpdate", "StartDraftWeightUpdate"),
            *("UpdateWeights", "FinishWeightUpdate", "UpdateWeightVersion", "GetWeightVersion"),
        )
    },
}
CONTROL = Protocol(
    file="control.proto",
    package="vllm",
    enums={
        "PauseMode": [f"PAUSE_MODE_{name}" for name in ("UNSPECIFIED", "ABORT", "WAIT", "KEEP")]
    },
    messages={
        **{f"{name}Request": "" for name in _EMPTY},
        **{f"{name}Response": "" for name in _SILENT},
        "ServerInfo": (
            "engine_version:string=1 api_version:string=2 instance_id:string=3 "
            "parallelism:ParallelismInfo=4 max_model_len:uint32=5 kv_block_size:uint32=6 "
            "total_kv_blocks:uint64=7 max_running_requests:uint64=8 max_batched_tokens:uint64=9 "
            "max_loras:uint32=10 rl_capabilities:RlCapabilities=11 "
            "effective_attention_block_size:uint64?=14"
        ),
        "RlCapabilities": (
            "weight_transfer_enabled:bool=1 weight_transfer_backend:string=2 "
            "sleep_mode_enabled:bool=3 draft_weight_updates_enabled:bool=4"
        ),
        "ParallelismInfo": (
            "tensor_parallel_size:uint32=1 pipeline_parallel_size:uint32=2 "
            "data_parallel_size:uint32=3 data_parallel_rank:uint32=4 "
            "decode_context_parallel_size:uint32=5 world_size:uint64=6 "
            "data_parallel_size_local:uint32=7"
        ),
        "ModelInfo": (
            "model_id:string=1 served_model_name:string=2 served_model_aliases:string*=3 "
            "supports_text_input:bool=20 supports_token_ids_input:bool=21 supports_lora:bool=22 "
            "supports_multimodal:bool=23 reasoning_parser:string=24 tool_call_parser:string=25"
        ),
        "AbortRequest": "request_ids:string*=1",
        "LoraAdapter": "lora_id:int64=1 lora_name:string=2 source_path:string=3",
        "LoadLoraRequest": "lora_name:string=1 source_path:string=2",
        "LoadLoraResponse": "adapter:LoraAdapter=1",
        "UnloadLoraRequest": "lora_name:string=1",
        "UnloadLoraResponse": "adapter:LoraAdapter=1",
        "ListLorasResponse": "adapters:LoraAdapter*=1",
        "PauseGenerationRequest": "mode:PauseMode=1 clear_cache:bool?=2",
        "IsPausedResponse": "paused:bool=1",
        "SleepRequest": "level:uint32?=1 mode:PauseMode=2",
        "WakeUpRequest": "tags:string*=1",
        "IsSleepingResponse": "sleeping:bool=1",
        "InitWeightTransferEngineRequest": "init_info_json:bytes=1",
        "UpdateWeightsRequest": "update_info_json:bytes=1",
        "FinishWeightUpdateRequest": "weight_version:string?=1",
        "UpdateWeightVersionRequest": "weight_version:string=1",
        "GetWeightVersionResponse": "weight_version:string=1",
        "KvEventSource": "transport:string=1 endpoint:string=2",
        "GetKvEventSourcesResponse": "sources:KvEventSource*=1",
    },
    services={
        "Control": {
            name: (f"{name}Request", answer_type, False) for name, answer_type in _METHODS.items()
        }
    },
)
CONTROL.register()
_MODES = ("abort", "abort", "wait", "keep")


async def server_info(context: RequestContext, fields: Fields) -> Fields:
    """GetServerInfo: figures of the first core; all are alike."""
    services = context.services
    engine: Any = services.config["engine"]
    statuses: list[Any] = await services.engine.call("status")
    tensor, world = engine["device"]["tensor_parallel"], operations.world_size(context)
    return {
        "engine_version": __version__,
        "api_version": "vllm.Control",
        "parallelism": {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": 1,
            "data_parallel_size": world // tensor,
            "decode_context_parallel_size": 1,
            "world_size": world,
            "data_parallel_size_local": world // tensor,
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


async def shutdown(context: RequestContext, fields: Fields) -> Fields:
    """Shutdown: as SIGTERM, within --shutdown-timeout-s. Accepted, not complete."""
    context.services.shut_down()
    return {}


async def abort(context: RequestContext, fields: Fields) -> Fields:
    """Abort."""
    body = parse(fields, AbortRequest)
    if body.request_ids is None:
        raise InvalidRequest("request_ids: a list of ids is needed", field="request_ids")
    await operations.abort(context, body.request_ids, tenant=None)
    return {}


async def pause(context: RequestContext, fields: Fields) -> Fields:
    """PauseGeneration."""
    clear = fields.get("clear_cache", True)
    await operations.pause(context, _mode(fields), clear_cache=clear)
    return {}


async def resume(context: RequestContext, fields: Fields) -> Fields:
    """ResumeGeneration."""
    await operations.resume(context)
    return {}


async def is_paused(context: RequestContext, fields: Fields) -> Fields:
    """IsPaused."""
    return {"paused": await operations.is_paused(context)}


async def sleep(context: RequestContext, fields: Fields) -> Fields:
    """Sleep."""
    level = fields.get("level", 1)
    if level not in (0, 1, 2):
        raise InvalidRequest(f"level: {level} given; allowed: 0, 1, 2", field="level")
    await operations.sleep(context, level, _mode(fields))
    return {}


async def wake(context: RequestContext, fields: Fields) -> Fields:
    """WakeUp."""
    await operations.wake(context, fields.get("tags", ()))
    return {}


async def is_sleeping(context: RequestContext, fields: Fields) -> Fields:
    """IsSleeping."""
    return {"sleeping": await operations.is_sleeping(context)}


async def nothing(context: RequestContext, fields: Fields) -> Fields:
    """An empty list."""
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


_NO_LORA, _NO_TRANSFER = _refusing(operations.NO_LORA), _refusing(operations.NO_TRANSFER)
SERVICE = RpcService(
    protocol=CONTROL,
    name="Control",
    methods={
        "GetServerInfo": Rpc(route="/server_info", unary=server_info),
        "GetModelInfo": Rpc(route="/server_info", unary=model_info),
        "Shutdown": Rpc(route="/pause", unary=shutdown),
        "Abort": Rpc(route="/abort_requests", unary=abort),
        "LoadLora": Rpc(route="/v1/load_lora_adapter", unary=_NO_LORA),
        "UnloadLora": Rpc(route="/v1/unload_lora_adapter", unary=_NO_LORA),
        "ListLoras": Rpc(route="/server_info", unary=nothing),
        "GetKvEventSources": Rpc(route="/kv_event_sources", unary=nothing),
        "PauseGeneration": Rpc(route="/pause", unary=pause),
        "ResumeGeneration": Rpc(route="/resume", unary=resume),
        "IsPaused": Rpc(route="/is_paused", unary=is_paused),
        "Sleep": Rpc(route="/sleep", unary=sleep),
        "WakeUp": Rpc(route="/wake_up", unary=wake),
        "IsSleeping": Rpc(route="/is_sleeping", unary=is_sleeping),
        **{
            name: Rpc(route="/update_weights", unary=_NO_TRANSFER)
            for name in (
                *("InitWeightTransferEngine", "StartWeightUpdate", "StartDraftWeightUpdate"),
                *("UpdateWeights", "FinishWeightUpdate", "UpdateWeightVersion", "GetWeightVersion"),
            )
        },
    },
)
