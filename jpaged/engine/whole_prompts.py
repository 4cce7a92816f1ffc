"""Adapts an engine's settings to a model that encodes each prompt in one step and keeps nothing of it."""

from __future__ import annotations

from dataclasses import replace

from jpaged.config import EngineConfig, SizedConfig
from jpaged.model_api import PromptEncoder
from jpaged.setting import refuse


def for_whole_prompts(config: SizedConfig, asked: EngineConfig, model: PromptEncoder) -> SizedConfig:
    """Return the settings with steps that hold the longest prompt, and without a prefix cache or preemption.

    Args:
        config: `asked` with defaults for its sizes.

    Raises:
        ValueError: a setting is refused without KV, or the longest prompt is above max_num_batched_tokens.
    """
    refuse(
        asked,
        "models without KV",
        f"does not go with {asked.model}, which encodes each prompt in one step and keeps no KV, so leave it out",
    )
    most = model.longest_prompt
    longest = most if asked.max_model_len is None else asked.max_model_len
    if longest > most:
        raise ValueError(f"max_model_len={longest} is above the {most} positions that {asked.model} knows")
    if asked.max_num_batched_tokens is None:
        tokens = max(config.max_num_batched_tokens, longest)
    elif asked.max_model_len is None:
        tokens = asked.max_num_batched_tokens
        longest = min(longest, tokens)
    elif asked.max_num_batched_tokens < longest:
        raise ValueError(
            f"max_num_batched_tokens={asked.max_num_batched_tokens} is below max_model_len={longest}: "
            f"{asked.model} computes a prompt in one step"
        )
    else:
        tokens = asked.max_num_batched_tokens
    return replace(
        config,
        max_model_len=longest,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=False,
        preemption_mode="recompute",
        swap_space=None,
        swap_space_bytes=None,
    )
