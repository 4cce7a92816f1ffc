"""Prompts with images for tests of saved states, and the settings with which they are run in small chunks."""

from __future__ import annotations

from vision_checkpoints import picture, prompt_of

from jpaged import SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 160,
    "max_num_batched_tokens": 48,
    "long_prefill_token_threshold": 24,
    "kv_cache_memory_bytes": 4 << 20,
}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
SMALL, WIDE, TALL = picture(0), picture(1, (20, 70)), picture(2, (90, 30))
PARTS = [(3, SMALL, 5), (20, WIDE, 30, SMALL, 3), (9,), (SMALL, TALL, 2), (2, TALL, 33), (31, SMALL, 24)]


def prompts_with(placeholder: int) -> list[dict]:
    """The prompts of a model in which this id stands for an image."""
    return [prompt_of(parts, seed, placeholder) for seed, parts in enumerate(PARTS)]
