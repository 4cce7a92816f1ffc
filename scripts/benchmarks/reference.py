"""Runs the same batch through transformers' continuous batching on torch, with which the engine is compared."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged.loading.hugging_face import transformers
from jpaged.loading.model_config import as_transformers
from jpaged.loading.open_checkpoint import open_model

_PAGE = 64


@dataclass(frozen=True)
class Reference:
    """Holds the figures of one run: wall time from the first prompt sent to the last token received, tokens
    generated."""

    seconds: float
    output_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def run(name: str, prompts: list[list[int]], outputs: list[int], *, max_batch_tokens: int) -> Reference:
    """Generate `outputs[i]` tokens for ``prompts[i]``, all sent at once: greedy, float32, end-of-sequence ignored.

    The manager is warm (one short request was answered) when the clock starts.

    Args:
        name: any model `load_model` accepts.
        max_batch_tokens: token budget of a step, as the engine's max_num_batched_tokens.

    Raises:
        ImportError: torch is not installed.
        RuntimeError: transformers gave up, or generated another number of tokens.
    """
    model = torch_model(name)
    pages = sum(math.ceil((len(p) + n) / _PAGE) for p, n in zip(prompts, outputs, strict=True))
    batching = transformers().ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=pages + len(prompts),
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=len(prompts),
    )
    greedy = transformers().GenerationConfig(do_sample=False, eos_token_id=-1)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)
    manager.start()
    try:
        _answer(manager, [prompts[0][:8]], [2])
        start = time.perf_counter()
        generated = _answer(manager, prompts, outputs)
        seconds = time.perf_counter() - start
    finally:
        manager.stop(block=True)
    if generated != sum(outputs):
        raise RuntimeError(f"transformers generated {generated} tokens in place of {sum(outputs)}")
    return Reference(seconds, generated)


def torch_model(name: str) -> Any:
    """Build the model in transformers' own code, float32, with the weights that the engine reads (dequantised)."""
    import torch

    opened = open_model(name)
    model = transformers().AutoModelForCausalLM.from_config(as_transformers(opened.config), dtype=torch.float32).eval()
    state = {name: torch.from_numpy(np.array(opened.reader.read(name), np.float32)) for name in opened.reader.names()}
    missing = set(model.load_state_dict(state, strict=False).missing_keys)
    if missing - {"lm_head.weight"} or (missing and not opened.config.tie_word_embeddings):
        raise RuntimeError(f"{name} has no weights for {sorted(missing)}")
    model.tie_weights()
    return model


def _answer(manager: Any, prompts: list[list[int]], outputs: list[int]) -> int:
    """Send all prompts, wait for all answers; returns how many tokens there are."""
    for prompt, count in zip(prompts, outputs, strict=True):
        manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)
    waiting, generated = len(prompts), 0
    while waiting:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped before it was done")
        elif result.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
        elif result.is_finished():
            waiting -= 1
            generated += len(result.generated_tokens)
    return generated
