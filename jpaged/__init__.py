"""jpaged: a JAX-native engine that serves large language models with paged KV memory.

Public names load lazily, so that ``import jpaged`` starts no backend.
"""

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.async_llm import AsyncLLM
    from jpaged.engine.stats import EngineStats
    from jpaged.errors import EngineBusy, EngineStopped, ProcessLost, StateRefused
    from jpaged.image_sources import ImageSources
    from jpaged.inputs import TextPrompt, TokensPrompt
    from jpaged.llm import LLM
    from jpaged.lora_request import LoRARequest
    from jpaged.memory import MemoryMap, MemoryReport
    from jpaged.outputs import CompletionOutput, RequestOutput, SavedState, StreamDelta
    from jpaged.pooling_params import PoolingParams
    from jpaged.pyramid_kv import PyramidKV
    from jpaged.reasoning_config import ReasoningConfig
    from jpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
    from jpaged.speculative import MTP, Assistant, DFlash, DraftModel, Eagle3, Layers, NGram

__version__ = "0.3.0"  # the only place: the build reads it from here
__version_tuple__ = tuple(int(part) for part in __version__.split(".")[:3])

_HOMES = {
    "LLM": "jpaged.llm",
    "LoRARequest": "jpaged.lora_request",
    "AsyncLLM": "jpaged.async_llm",
    "BeamSearchParams": "jpaged.sampling_params",
    "EngineBusy": "jpaged.errors",
    "EngineStats": "jpaged.engine.stats",
    "EngineStopped": "jpaged.errors",
    "ImageSources": "jpaged.image_sources",
    "ProcessLost": "jpaged.errors",
    "PyramidKV": "jpaged.pyramid_kv",
    "ReasoningConfig": "jpaged.reasoning_config",
    "NGram": "jpaged.speculative",
    "Layers": "jpaged.speculative",
    "DFlash": "jpaged.speculative",
    "DraftModel": "jpaged.speculative",
    "MTP": "jpaged.speculative",
    "Eagle3": "jpaged.speculative",
    "Assistant": "jpaged.speculative",
    "SamplingParams": "jpaged.sampling_params",
    "StructuredOutputsParams": "jpaged.sampling_params",
    "PoolingParams": "jpaged.pooling_params",
    "RequestOutput": "jpaged.outputs",
    "SavedState": "jpaged.outputs",
    "StateRefused": "jpaged.errors",
    "RequestOutputKind": "jpaged.sampling_params",
    "CompletionOutput": "jpaged.outputs",
    "StreamDelta": "jpaged.outputs",
    "TextPrompt": "jpaged.inputs",
    "TokensPrompt": "jpaged.inputs",
    "MemoryMap": "jpaged.memory",
    "MemoryReport": "jpaged.memory",
}

__all__ = [
    "LLM",
    "MTP",
    "Assistant",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "DFlash",
    "DraftModel",
    "Eagle3",
    "EngineBusy",
    "EngineStats",
    "EngineStopped",
    "ImageSources",
    "Layers",
    "LoRARequest",
    "MemoryMap",
    "MemoryReport",
    "NGram",
    "PoolingParams",
    "ProcessLost",
    "PyramidKV",
    "ReasoningConfig",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SavedState",
    "StateRefused",
    "StreamDelta",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# A library is silent unless its user configures logging; without this, Python would print warnings.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name.startswith("_"):
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    return import_module("jpaged.vllm_refusals").name_in(__name__, name)


class _Finder:
    """Finds modules under vLLM's names, after all others have looked for a file; see `jpaged.vllm_refusals`."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        if not name.startswith("jpaged.") or name == "jpaged.vllm_refusals":
            return None
        return import_module("jpaged.vllm_refusals").find_module(name)


if not any(getattr(each, "__module__", None) == __name__ for each in sys.meta_path):  # as when it is reloaded
    sys.meta_path.append(_Finder)


def __dir__() -> list[str]:
    """Name what users import, loaded or not, and nothing else."""
    return list(__all__)
