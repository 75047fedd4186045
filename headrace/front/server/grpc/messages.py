"""The protocol `headrace.render.v1`: what the routes that need no model take and give."""

from __future__ import annotations

from headrace.front.server.grpc.wire import Protocol

PACKAGE = "headrace.render.v1"
SERVICE = f"{PACKAGE}.RenderService"
RENDER = Protocol(
    file="headrace/render/v1/render.proto",
    package=PACKAGE,
    messages={
        "RenderChatRequest": (
            "model:string?=1 messages:json*=2 tools:json*=3 tool_choice:string?=4 "
            "add_generation_prompt:bool?=5 continue_final_message:bool?=6 chat_template:string?=7 "
            "chat_template_kwargs:json?=8 sampling:json?=9 return_prompt_text:bool?=10 "
            "return_token_offsets:bool?=11"
        ),
        "RenderCompletionRequest": (
            "model:string?=1 prompts:string*=2 add_special_tokens:bool?=3 sampling:json?=4"
        ),
        "Rendered": (
            "request_id:string?=1 token_ids:uint32*=2 num_tokens:uint32?=3 prompt_text:string?=4 "
            "model:string?=5 sampling_params:json?=6 token_offsets:Span*=7"
        ),
        "Span": "start:uint32=1 end:uint32=2",
        "RenderCompletionResponse": "prompts:Rendered*=1",
        "TokenizeRequest": "model:string?=1 prompt:string?=2 add_special_tokens:bool?=3",
        "TokenizeResponse": "token_ids:uint32*=1 max_model_len:uint32?=2",
        "DetokenizeRequest": "model:string?=1 token_ids:uint32*=2",
        "DetokenizeResponse": "text:string?=1",
        "HealthCheckRequest": "",
        "HealthCheckResponse": "status:string?=1 version:string?=2",
    },
    services={
        "RenderService": {
            "RenderChat": ("RenderChatRequest", "Rendered", False),
            "RenderCompletion": ("RenderCompletionRequest", "RenderCompletionResponse", False),
            "Tokenize": ("TokenizeRequest", "TokenizeResponse", False),
            "Detokenize": ("DetokenizeRequest", "DetokenizeResponse", False),
            "HealthCheck": ("HealthCheckRequest", "HealthCheckResponse", False),
        }
    },
)
CLASSES = RENDER.register()
"""The message classes by name."""
