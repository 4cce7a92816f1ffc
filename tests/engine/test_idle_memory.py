"""When nothing runs, a CPU's pool gives back what is neither cached nor was in use last; it reads as zeros."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import make_checkpoint

from jpaged import LLM, SamplingParams
from pallas_kernels.zero_pages import frees_memory

pytestmark = pytest.mark.skipif(not frees_memory(), reason="memory is given back on Linux' CPUs with Numba only")

PROMPTS = [{"prompt_token_ids": list(range(start, start + 40))} for start in (1, 50, 100)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)


def engine(folder, **settings) -> LLM:
    return LLM(
        str(folder), max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64, block_size=8, seed=0, **settings
    )


def tokens(llm: LLM, prompts=PROMPTS) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def written_pages(llm: LLM) -> set[int]:
    pool = np.asarray(llm.control.engine.runner.worker.pool)
    return set(np.flatnonzero(pool.any(axis=(0, 2, 3))).tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma2")
    make_checkpoint("gemma2", folder)  # two groups of layers, one with a window
    return folder


def test_without_a_cache_the_pool_keeps_what_was_in_use_last_and_the_same_prompts_give_the_same_tokens(folder):
    llm = engine(folder, enable_prefix_caching=False)
    assert written_pages(llm) == set()
    address = llm.control.engine.runner.worker.pool.unsafe_buffer_pointer()
    first = tokens(llm)
    of_three = written_pages(llm)
    assert tokens(llm) == first
    assert written_pages(llm) == of_three
    assert tokens(llm, PROMPTS[:1]) == first[:1]
    of_one = written_pages(llm)
    assert of_one and of_one < of_three  # what one prompt did without is gone
    assert tokens(llm) == first
    assert llm.reset_prefix_cache()
    assert written_pages(llm) == set()
    assert tokens(llm) == first
    assert llm.control.engine.runner.worker.pool.unsafe_buffer_pointer() == address


def test_cached_blocks_stay_until_the_cache_is_reset(folder):
    llm = engine(folder)
    first = tokens(llm)
    assert 0 < llm.memory_report().idle_pages < len(written_pages(llm))  # others were in use and are free
    assert tokens(llm) == first
    llm.control.engine.give_back_memory(at_once=True)
    cached = written_pages(llm)
    assert 0 < len(cached) == llm.memory_report().idle_pages
    assert tokens(llm) == first
    assert cached <= written_pages(llm)
    assert llm.reset_prefix_cache()
    assert written_pages(llm) == set()
    assert tokens(llm) == first
