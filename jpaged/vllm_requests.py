"""Names that requests and imports have in vLLM and not here, refused with what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LORA = "adapters have the settings enable_lora, max_loras, max_lora_rank and lora_modules, and the model's dtype"
IMAGES = "images are prepared as the checkpoint says, and come in multi_modal_data or as image_url parts of messages"
_BEAMS = "call beam_search() with BeamSearchParams"
_LOGITS = "logit_bias, allowed_token_ids, bad_words and structured_outputs change what can be drawn"
_STRUCTURED = "give structured_outputs=StructuredOutputsParams(...), with the same arguments"

_PARAMETERS: Mapping[str, str] = {
    "best_of": "give n, and choose among the outputs by cumulative_logprob",
    "early_stopping": _BEAMS,
    "extra_args": "there are no extensions that would read them",
    "flat_logprobs": "log-probabilities come as a list of mappings",
    "guided_decoding": _STRUCTURED,
    "length_penalty": _BEAMS,
    "logits_processors": _LOGITS,
    "skip_reading_prefix_cache": "a cache_salt in the prompt keeps requests apart",
    "use_beam_search": _BEAMS,
}

_SHAPE_PARAMETERS: Mapping[str, str] = {
    "backend": "llguidance follows all shapes",
    "disable_additional_properties": 'write "additionalProperties": false into the schema',
    "disable_fallback": "there is one backend",
    "structural_tag": "give grammar=, in which free text and JSON may stand beside each other",
    "whitespace_pattern": "disable_any_whitespace=True allows none",
}

_IMPORTS: Mapping[str, str] = {
    "AsyncEngineArgs": "give the settings to AsyncLLM(...)",
    "AsyncLLMEngine": "use AsyncLLM",
    "EngineArgs": "give the settings to LLM(...)",
    "GuidedDecodingParams": "use StructuredOutputsParams, with the same arguments, as "
    "SamplingParams(structured_outputs=...)",
    "LLMEngine": "use LLM, or AsyncLLM to add and abort requests while others run",
}

_PROMPT_KEYS: Mapping[str, str] = {
    "encoder_prompt": "models with an encoder are not supported",
    "mm_processor_kwargs": IMAGES,
    "multi_modal_uuids": IMAGES,
    "prompt_embeds": "prompts are text or token ids, not embeddings",
}


def refuse_parameters(names: Iterable[str]) -> None:
    """Refuse parameters of vLLM's SamplingParams that ours does not have.

    Raises:
        TypeError: one of the names is such a parameter; the message says what to use here.
    """
    for name in names:
        if name in _PARAMETERS:
            raise TypeError(f"{name} is a parameter of vLLM that SamplingParams has not: {_PARAMETERS[name]}")


def refuse_shape_parameters(names: Iterable[str]) -> None:
    """Refuse parameters of vLLM's StructuredOutputsParams that ours does not have.

    Raises:
        TypeError: one of the names is such a parameter; the message says what to use here.
    """
    for name in names:
        if name in _SHAPE_PARAMETERS:
            reason = _SHAPE_PARAMETERS[name]
            raise TypeError(f"{name} is a parameter of vLLM that StructuredOutputsParams has not: {reason}")


def refuse_import(module: str, name: str) -> None:
    """Refuse a name that vLLM's module has and the one called `module` has not.

    Raises:
        ImportError: it is such a name; the message says what to use here.
    """
    if name in _IMPORTS:
        raise ImportError(f"{module} has no {name}, which vLLM has: {_IMPORTS[name]}", name=module)


def check_prompt_keys(prompt: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that a prompt has no other keys than `known`, and vLLM's other ones only with nothing in them.

    Raises:
        ValueError: it has.
    """
    unknown = [key for key in prompt if key not in known and key not in _PROMPT_KEYS]
    if unknown:
        raise ValueError(f"a prompt may have {', '.join(map(repr, known[:-1]))} and {known[-1]!r}, not {unknown}")
    for key, reason in _PROMPT_KEYS.items():
        value = prompt.get(key)
        if value is not None and not (isinstance(value, Mapping) and not value):
            raise ValueError(f"a prompt has {key!r}: {reason}")
