"""What is said when an engine starts: the model and the pool in the log, and warnings about what will not work."""

from __future__ import annotations

import logging
import warnings

from jpaged.config import EngineConfig, SizedConfig
from jpaged.engine.capacity import longest_sequence, pool_tokens
from jpaged.execution import PoolSpec, platform
from jpaged.execution.device_memory import device_bytes
from jpaged.loading import LoadedModel
from jpaged.memory import MemoryManager, StateCheckpoints
from jpaged.memory.policies import VerifiedStates

logger = logging.getLogger("jpaged")


def tell_loaded(loaded: LoadedModel, config: EngineConfig) -> None:
    """Log what was loaded and how it is sampled by default; warn where there is no tokenizer."""
    logger.info(
        "%s: %s from %s; dtype %s, quantization %s, %s bytes of weights on each of %d %s device(s)",
        loaded.name,
        type(loaded.model).__name__,
        loaded.location,
        loaded.dtype,
        config.quantization,
        f"{device_bytes(loaded.params):,}",
        loaded.mesh.size,
        platform(loaded.mesh),
    )
    logger.info("%s: generations end with tokens %s", loaded.name, list(loaded.eos_token_ids))
    if loaded.sampling:
        logger.info(
            "%s: generation_config=%r: requests without SamplingParams get %s; generation_config='vllm' ignores them",
            loaded.name,
            config.generation_config,
            dict(loaded.sampling),
        )
    if loaded.tokenizer is None:
        _warn(
            f"{loaded.location} has no tokenizer: prompts must be token ids, and outputs have no text; "
            "tokenizer= takes another model's"
        )


def tell_pool(memory: MemoryManager, spec: PoolSpec, config: SizedConfig, max_model_len: int) -> None:
    """Log the size of the pool and what it holds; warn where no sequence can be as long as max_model_len."""
    longest = longest_sequence(memory, max_model_len)
    tokens = pool_tokens(memory, max(longest, 1))
    logger.info(
        "KV pool of %s bytes a device (%d large pages of %s bytes, %s): %d tokens, that is %.1f sequences of %d; "
        "max_model_len=%d, max_num_seqs=%d, max_num_batched_tokens=%d, block_size=%d",
        f"{spec.device_bytes:,}",
        spec.layout.num_pages,
        f"{spec.layout.page_bytes:,}",
        spec.dtype,
        tokens,
        tokens / max(longest, 1),
        longest,
        max_model_len,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.block_size,
    )
    states = [group.spec for group in spec.layout.groups if isinstance(group.spec.policy, StateCheckpoints)]
    for group in states:
        logger.info(
            "layer group %r: a state of %s bytes a sequence; checkpoints every %d tokens, inside prompts %d, and where "
            "shared prompts end",
            group.name,
            f"{group.real_bytes:,}",
            config.state_interval,
            group.policy.entries_apart(group.block_size) * group.block_size,
        )
    for group in (group.spec for group in spec.layout.groups):
        if isinstance(group.policy, VerifiedStates):
            logger.info("layer group %r: %d more states a sequence, behind drafts", group.name, group.policy.slots)
    if longest < max_model_len:
        _warn(
            f"the KV pool of {spec.device_bytes:,} bytes a device holds a sequence of at most {longest} tokens, prompt "
            f"and output, which is below max_model_len={max_model_len}: longer requests are refused. Raise "
            f"kv_cache_memory_bytes or memory_utilization, or set max_model_len={max(longest, 1)}"
        )


def _warn(message: str) -> None:
    """Tell the user, who may have no log; `logging.captureWarnings` brings it there."""
    warnings.warn(message, UserWarning, stacklevel=2)
