"""jpaged: a JAX-native engine that serves large language models with paged KV memory.

Public names load lazily, so that ``import jpaged`` starts no backend.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.async_llm import AsyncLLM
    from jpaged.beam_search_params import BeamSearchParams
    from jpaged.errors import EngineBusy, EngineStopped, ProcessLost
    from jpaged.llm import LLM
    from jpaged.memory import MemoryReport
    from jpaged.outputs import CompletionOutput, RequestOutput, StreamDelta
    from jpaged.pyramid_kv import PyramidKV
    from jpaged.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "jpaged.llm",
    "AsyncLLM": "jpaged.async_llm",
    "BeamSearchParams": "jpaged.beam_search_params",
    "EngineBusy": "jpaged.errors",
    "EngineStopped": "jpaged.errors",
    "ProcessLost": "jpaged.errors",
    "PyramidKV": "jpaged.pyramid_kv",
    "SamplingParams": "jpaged.sampling_params",
    "StructuredOutputsParams": "jpaged.structured_outputs",
    "RequestOutput": "jpaged.outputs",
    "CompletionOutput": "jpaged.outputs",
    "StreamDelta": "jpaged.outputs",
    "MemoryReport": "jpaged.memory",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineBusy",
    "EngineStopped",
    "MemoryReport",
    "ProcessLost",
    "PyramidKV",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
