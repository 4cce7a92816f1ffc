"""Reads Tunix's `RolloutConfig`: what it asks of an engine, and how it has completions drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.rollout import base_rollout

from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams
from jpaged.validation import integer


def check_config(config: base_rollout.RolloutConfig, llm: LLM) -> None:
    """Check that an engine is what Tunix wants, and that prompts have a width.

    Raises:
        ValueError: it is not, or they have none; names the field, its value and the engine's or the limit.
    """
    integer("max_prompt_length", config.max_prompt_length, low=1)
    engine = llm.config
    if config.data_type is not None and jnp.dtype(config.data_type) != jnp.dtype(llm.dtype):
        raise ValueError(f"data_type={jnp.dtype(config.data_type)}, but the engine's is {jnp.dtype(llm.dtype)}")
    sizes = {
        "tensor_parallel_size": (-1, engine.tensor_parallel_size),
        "data_parallel_size": (-1, engine.data_parallel_size),
        "expert_parallel_size": (1, engine.tensor_parallel_size if engine.enable_expert_parallel else 1),
    }
    for name, (default, own) in sizes.items():
        wanted = getattr(config, name)
        if wanted not in (default, own):
            raise ValueError(f"{name}={wanted}, but the engine's is {own}: give it to LLM(...)")
    if config.rollout_mapping_config is not None:
        raise ValueError("rollout_mapping_config must be None: the actor has the engine's own names of weights")


def sampling_of(config: base_rollout.RolloutConfig, number: int) -> list[SamplingParams]:
    """Return each prompt's parameters; with a seed each has one of its own that follows from it."""
    seeds: list[int | None] = [None] * number
    if config.seed is not None:
        data = config.seed
        if jnp.issubdtype(getattr(data, "dtype", np.int32), jax.dtypes.prng_key):
            data = jax.random.key_data(data)
        words = [int(word) for word in np.atleast_1d(np.asarray(data)).reshape(-1)]
        seeds = [int(seed) for seed in np.random.default_rng(words).integers(0, 2**31, number)]
    ends = config.eos_tokens
    return [
        SamplingParams(
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=-1 if config.top_k is None else config.top_k,
            max_tokens=config.max_tokens_to_generate,
            seed=seed,
            ignore_eos=ends is not None,
            stop_token_ids=[] if ends is None else list(ends),
            logprobs=0 if config.return_logprobs else None,
        )
        for seed in seeds
    ]
