"""Gemma 4 with eyes: tokens are transformers', whatever the pictures and whatever happens to requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gemma4_checkpoints import AUDIO, FAMILIES, IMAGE, SIZES, VIDEO, assert_torchs, make, pictures, prompt
from vision_checkpoints import check_empty

from jpaged import LLM, NGram, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 448,
    "max_num_batched_tokens": 96,
    "kv_cache_memory_bytes": 8 << 20,
}
NEVER = dict.fromkeys((IMAGE, VIDEO, AUDIO), -100)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0, logit_bias=NEVER)
WIDE, TALL, ONE, FULL, *OTHERS = pictures(*SIZES)
PARTS = [
    (9,),
    (3, ONE, 5),
    (WIDE,),
    (2, TALL, 1, FULL, 3),
    (1, ONE, 1, WIDE, 2, OTHERS[0], 1, OTHERS[1], 1, OTHERS[2], 4),
]
"""Without a picture, with one, with two, and with five."""
PROMPTS = [prompt(parts, seed) for seed, parts in enumerate(PARTS)]
ON_A_COMMIT = ("gemma4_ahead",)
NAMES = [name if name in ON_A_COMMIT else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return str(folder), make(request.param, folder)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLM(checkpoint[0], **SETTINGS)


def test_tokens_are_transformers(engine, checkpoint):
    outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_torchs(checkpoint[1], PROMPTS, outputs)
    check_empty(engine)
