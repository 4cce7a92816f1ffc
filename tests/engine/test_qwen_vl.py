"""Families with eyes of Qwen: tokens are transformers', whatever the pictures and whatever happens to requests."""

from __future__ import annotations

import pytest
from greedy_reference import assert_same_tokens
from qwen_vl_checkpoints import FAMILIES, IMAGE, SIZES, make, pictures, prompt, torch_greedy
from vision_checkpoints import check_empty

from jpaged import LLM, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 8 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={IMAGE: -100})
ONE, WIDE, TALL, LARGE, TINY, *OTHERS = pictures(*SIZES)
PARTS = [
    (9,),
    (3, ONE, 5),
    (WIDE,),
    (2, TALL, 1),
    (4, LARGE, 2, OTHERS[0], 3),
    (1, ONE, 1, WIDE, 2, TINY, 1, OTHERS[1], 1, OTHERS[2], 4),
]
"""Without a picture, with one of each size, with two, and with five."""
PROMPTS = [prompt(parts, seed) for seed, parts in enumerate(PARTS)]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return str(folder), make(request.param, folder)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLM(checkpoint[0], **SETTINGS)


def test_tokens_are_transformers(engine, checkpoint):
    outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    expected = [
        torch_greedy(checkpoint[1], asked, output.prompt_token_ids, GREEDY.max_tokens)
        for asked, output in zip(PROMPTS, outputs, strict=True)
    ]
    assert_same_tokens(outputs, expected)
    check_empty(engine)
