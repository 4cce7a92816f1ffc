"""What users of vLLM, SGLang and tpu-inference reported, on pools of a few blocks.

The prefixes are found, every request gets the tokens that it gets alone, and no block stays in use. The requests of
scripts/benchmarks/public_reports.py have their full size.
"""

from __future__ import annotations

from itertools import count

import pytest
from fake_device import Loop
from fake_store import FakeStore
from small_schedulers import group, layout_of, make_request, make_scheduler
from unpaged import alone

from jpaged.memory import Lifetime, MemoryManager

_fresh = count(100)


def tokens(number: int) -> list[int]:
    """Tokens that no other call made."""
    return [next(_fresh) for _ in range(number)]


def hybrid(states: int = 40) -> list:
    """Attention and states of `states` times the bytes of a token's KV, so that a block as large has as many tokens."""
    return [group("full", layer_bytes=8), group("state", interval=32, layer_bytes=2 * states)]


def served(loop: Loop, groups: list, prompts: list[list[int]], output: int = 3) -> list[int]:
    """Serve prompts one after another; return the tokens found of each. Their tokens are right, and no block stays."""
    found = []
    for prompt in prompts:
        loop.run(request := make_request(prompt, output))
        assert request.sequences[0].output_token_ids == alone(request, groups)[0]
        found.append(request.num_cached_tokens)
    assert loop.num_used_blocks == 0
    return found


@pytest.mark.parametrize(
    "shared, own, states",
    [
        (36, 6, 40),  # vllm #40696: the prompt is as short as a block would be
        (60, 28, 21),  # vllm #45238: what is shared ends before the last checkpoint that a block's end would be
        (48, 12, 300),  # vllm #48401: no prompt is as long as such a block
        (44, 12, 52),  # vllm #53749: what is shared is shorter than one
        (16, 16, 52),  # vllm #54607: so are all prompts
    ],
)
def test_a_hybrids_shared_prefix_is_found_however_large_its_states_are(shared, own, states):
    groups = hybrid(states)
    loop = Loop(make_scheduler(400, groups=groups, prefix_caching=True))
    head = tokens(shared)
    found = served(loop, groups, [head + tokens(own) for _ in range(5)])
    assert found[2:] == [shared] * 3, "the second request shows where the prompts part"


def test_a_hybrids_prompt_sent_again_with_a_suffix_is_found():  # vllm #51250
    groups = hybrid()
    loop = Loop(make_scheduler(400, groups=groups, prefix_caching=True))
    first = tokens(41)
    assert served(loop, groups, [first, first + tokens(5)], output=1)[1] >= 32


def test_sessions_in_turn_keep_their_windows_while_passed_ones_are_evicted():  # vllm #48435
    groups = [group("full", layer_bytes=8), group("window", window=8, layer_bytes=40)]
    heads = [tokens(120) for _ in range(4)]
    needed, passed = 4 * (120 // 4 // 5 + 8), 4 * 120 // 4
    pages = 80
    assert needed < pages < passed, "the pool holds all sessions' windows, not all that they passed"
    loop = Loop(make_scheduler(pages, groups=groups, prefix_caching=True))
    found = served(loop, groups, [head + tokens(3) for _ in range(3) for head in heads])
    assert found[:4] == [0] * 4 and min(found[4:]) >= 116


def test_prompts_that_part_early_keep_the_window_there():
    groups = [group("full", layer_bytes=8), group("window", window=8, layer_bytes=40)]
    loop = Loop(make_scheduler(70, groups=groups, prefix_caching=True))
    head = tokens(60)
    found = served(loop, groups, [head + tokens(80) for _ in range(5)])
    assert min(found[2:]) >= 56


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_hybrid_starts_with_host_memory_for_its_blocks_and_swaps(mode):  # vllm #36463
    groups = hybrid()
    options = {"preemption_mode": mode, "swap_blocks": 6} if mode == "swap" else {}
    loop = Loop(make_scheduler(7, groups=groups, prefix_caching=True, max_num_seqs=2, **options))
    requests = [make_request(tokens(30), 40), make_request(tokens(30), 40)]
    steps = loop.run(*requests)
    assert any(step.preempted for step in steps)
    for request in requests:
        assert request.sequences[0].output_token_ids == alone(request, groups)[0]
    assert loop.num_used_blocks == 0


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_hybrids_evicted_prompts_come_back_with_their_states(tier):  # sglang #39436
    groups = hybrid()
    store = FakeStore()
    loop = Loop(make_scheduler(12, groups=groups, prefix_caching=True, **{tier: store, f"{tier}_pages": 60}))
    heads = [tokens(72) for _ in range(8)]
    served(loop, groups, heads, output=1)
    found = served(loop, groups, [head + tokens(3) for head in heads[-4:]], output=1)
    assert min(found) >= 64 and store.num_read


def test_a_long_request_needs_its_kv_and_few_states():  # tpu-inference #3483
    groups = hybrid()
    kv = 1024 // 4 * 8
    for pages in range(1, 200):
        memory = MemoryManager(layout := layout_of(groups, pages), max_step_tokens=64, prefix_caching=True)
        if memory.is_possible(Lifetime(1024, prompt_tokens=1000)):
            break
    assert kv <= layout.pool_bytes <= kv + 8 * layout.groups[1].block_bytes + layout.page_bytes
