"""headrace: LLM inference and serving.

The public names are imported on first use: `import headrace` itself loads nothing else.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = (
    False  # type checkers take it for true; importing `typing` would cost more than all the rest
)

if TYPE_CHECKING:
    from headrace.base.config.resolved import TextSpec
    from headrace.base.config.tree import Options
    from headrace.base.errors import HeadraceError
    from headrace.base.wire.grammar import StructuredOutputs
    from headrace.base.wire.repetition import RepetitionDetection
    from headrace.base.wire.request import SamplingParams
    from headrace.front.client.engine import AsyncLLM
    from headrace.front.client.events import Delta, Ended, Generation
    from headrace.front.client.limits import Limits
    from headrace.front.client.llm import LLM, Completion, Output

_HOMES = {
    "AsyncLLM": "headrace.front.client.engine",
    "Completion": "headrace.front.client.llm",
    "Delta": "headrace.front.client.events",
    "Ended": "headrace.front.client.events",
    "Generation": "headrace.front.client.events",
    "HeadraceError": "headrace.base.errors",
    "LLM": "headrace.front.client.llm",
    "Limits": "headrace.front.client.limits",
    "Options": "headrace.base.config.tree",
    "Output": "headrace.front.client.llm",
    "RepetitionDetection": "headrace.base.wire.repetition",
    "SamplingParams": "headrace.base.wire.request",
    "StructuredOutputs": "headrace.base.wire.grammar",
    "TextSpec": "headrace.base.config.resolved",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Delta",
    "Ended",
    "Generation",
    "HeadraceError",
    "Limits",
    "Options",
    "Output",
    "RepetitionDetection",
    "SamplingParams",
    "StructuredOutputs",
    "TextSpec",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
