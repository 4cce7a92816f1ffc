"""Running prompts for one vector each, from the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jpaged.engine.engine import Engine
from jpaged.engine.offline import run
from jpaged.pooling_params import Pooling
from jpaged.scheduling import Request
from jpaged.text.adapters import LoRA
from jpaged.text.input_processor import PREFILL_ONLY, InputProcessor
from jpaged.text.prompt import Prompt, Tokenization, parse_prompt
from jpaged.validation import boolean


class PooledPrompt(NamedTuple):
    """A prompt that was run, and its vector, float32."""

    request: Request
    vector: np.ndarray


def pool_prompts(
    engine: Engine,
    inputs: InputProcessor,
    batch: Sequence[Prompt],
    poolings: Sequence[Pooling],
    use_tqdm: bool,
    tokenization: Tokenization,
    loras: Sequence[LoRA | None],
) -> list[PooledPrompt]:
    """Run a batch and return a vector a prompt, of the hidden states after the final norm.

    Raises:
        ValueError: a prompt is empty, too long, or could never fit the pool; or the engine has replicas.
        RuntimeError: a prompt was aborted meanwhile, as by ``update_params(running="abort")`` in a signal's handler.
    """
    boolean("use_tqdm", use_tqdm)
    if len(engine.replicas) > 1:
        raise ValueError(f"embed(), classify() and score() need data_parallel_size=1, not {len(engine.replicas)}")
    requests = []
    for i, (prompt, pooling, lora) in enumerate(zip(batch, poolings, loras, strict=True)):
        try:
            parsed = parse_prompt(prompt, inputs.tokenizer, tokenization, inputs.images)
            request = inputs.request(parsed, PREFILL_ONLY, lora=lora, prefill_only=True)
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}") from error
        request.pooling = pooling
        requests.append(request)
    with engine.turn:
        engine.check_turn()
        try:
            for i, request in enumerate(requests):
                try:
                    engine.add(request)
                except ValueError as error:
                    raise ValueError(f"prompt {i}: {error}") from error
            run(engine, requests, use_tqdm)
        finally:
            engine.abort(*requests)
    for i, request in enumerate(requests):
        if request.sequences[0].finish_reason == "abort":
            raise aborted(i)
    return [PooledPrompt(request, _vector(request)) for request in requests]


def aborted(prompt: int) -> RuntimeError:
    """Return what tells that a prompt of a batch has no result."""
    return RuntimeError(f"prompt {prompt} was aborted before all of it was computed")


def _vector(request: Request) -> np.ndarray:
    """Return the mean over the chunks of a prompt, or the one vector of its last token."""
    length = len(request.prompt_token_ids)
    if request.pooling == "last":
        return next(vector for end, vector in request.pooled.values() if end == length)
    end, parts = 0, []
    while end < length:
        end, part = request.pooled[end]
        parts.append(part)
    return np.asarray(np.sum(parts, axis=0, dtype=np.float64) / length, np.float32)
