"""An engine whose pool is always full: swaps, host memory, a disk, priorities and cancels, for as long as it is run.

Every answer equals that of an engine that holds all; nothing stays behind. tests/scheduling/test_overload.py looks at
the order of service and at what a step costs.
"""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
from checkpoints import make_checkpoint
from greedy_reference import random_prompts

from jpaged import LLM, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 6,
    "max_model_len": 96,
    "max_num_batched_tokens": 32,
    "scheduling_policy": "priority",
}
HEADS = random_prompts(lengths=(40, 33, 24, 17))
PARAMS = [SamplingParams(temperature=t, seed=7, max_tokens=20, ignore_eos=True) for t in (0.0, 1.0)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with windows, prompts that begin alike, and each one's answers where nothing is ever short."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint("gemma2", folder)
    rng = random.Random(0)
    prompts = [[*head, *(rng.randrange(3, 60) for _ in range(5))] for head in HEADS for _ in range(4)]
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    roomy = LLM(str(folder), **SETTINGS)
    answers = [
        [output.outputs[0].token_ids for output in roomy.generate(prompts, params, use_tqdm=False)] for params in PARAMS
    ]
    page = roomy.memory_report().page_bytes
    roomy.close()
    return SimpleNamespace(folder=str(folder), prompts=prompts, answers=answers, page=page)


def overload(model, disk, mode: str, seconds: float, least: int) -> SimpleNamespace:
    """Keep twenty requests waiting or running, and return what happened after the last one ended."""
    rng = random.Random(1)
    llm = LLM(
        model.folder,
        kv_cache_memory_bytes=16 * model.page,
        preemption_mode=mode,
        kv_offloading_size=1 / 256,
        kv_offloading_break_even=1,
        disk_folder=str(disk),
        disk_space=1 / 64,
        disk_break_even=1,
        **SETTINGS,
    )
    engine, open_requests, counts = llm.control.engine, {}, SimpleNamespace(ended=0, cancelled=0, steps=0)
    end = time.monotonic() + seconds
    while open_requests or time.monotonic() < end or counts.ended < least:
        while len(open_requests) < 20 and (time.monotonic() < end or counts.ended + len(open_requests) < least):
            which = rng.randrange(len(model.prompts)), rng.randrange(len(PARAMS))
            request = llm.input_processor.process(model.prompts[which[0]], PARAMS[which[1]], rng.randrange(3))
            engine.add(request)
            open_requests[request.request_id] = request, which
        if rng.random() < 0.03:
            request, _ = open_requests.pop(rng.choice(list(open_requests)))
            engine.abort(request)
            counts.cancelled += 1
        for request in engine.step():
            if (found := open_requests.pop(request.request_id, None)) is not None:
                prompt, params = found[1]
                assert request.sequences[0].output_token_ids == model.answers[params][prompt]
                counts.ended += 1
        counts.steps += 1
    while engine.has_work:
        engine.step()
    stats = llm.stats()
    assert engine.memory.num_used_blocks == 0 and len(engine.runner.worker.host) == 0
    engine.memory.check_invariants()
    assert stats.num_preemptions and counts.cancelled
    assert stats.ram.hits and not stats.ram.failures and not stats.disk.failures
    llm.close()
    return counts


def test_a_full_pool_changes_no_token_and_leaves_nothing(model, tmp_path):
    assert overload(model, tmp_path, "swap", 0.0, 60).ended >= 60


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_five_minutes_of_a_full_pool_change_no_token(model, tmp_path, mode):
    assert overload(model, tmp_path, mode, 300.0, 60).ended > 60
