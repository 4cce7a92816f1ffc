"""An image that costs more than a step is encoded over several: tokens stay, streams go on, nothing is left of it."""

from __future__ import annotations

import pytest
from qwen_vl_checkpoints import IMAGE, SIZES, make, pictures, prompt
from vision_checkpoints import check_empty

from jpaged import LLM, SamplingParams
from jpaged.scheduling.scheduler import Scheduler

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_num_batched_tokens": 24,
    "kv_cache_memory_bytes": 8 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={IMAGE: -100})
_, WIDE, TALL, LARGE, TINY, *_ = pictures(*SIZES)
PROMPTS = [prompt(parts, n) for n, parts in enumerate([(30,), (2, WIDE, 3), (TALL, 1, TINY, 2), (1, LARGE, WIDE, 4)])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_vl")
    make("qwen3_vl", folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(folder):
    """The tokens of an engine whose steps hold every picture."""
    llm = LLM(folder, **SETTINGS | {"max_num_batched_tokens": 256})
    return tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.fixture(scope="module")
def engine(folder):
    return LLM(folder, **SETTINGS)


@pytest.fixture
def llm(engine):
    engine.reset_prefix_cache()
    yield engine
    check_empty(engine)
    assert not engine.control.engine.runner.worker.works["encodes"]._parts._states


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def watch(monkeypatch):
    """Return the steps that are planned from now on, as (rounds of a part, tokens of each chunk)."""
    steps, plan = [], Scheduler.schedule

    def watched(self):
        step = plan(self)
        parts = [encode.part[:2] for encode in step.work_of("encodes") if encode.part is not None]
        steps.append((parts, [chunk.length for chunk in step.chunks]))
        return step

    monkeypatch.setattr(Scheduler, "schedule", watched)
    return steps


def test_tokens_are_those_of_pictures_that_are_encoded_in_one_step(llm, expected, monkeypatch):
    steps = watch(monkeypatch)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    parts = [part for parts, _ in steps for part in parts]
    assert len(parts) > 6 and {stop for _, stop in parts} > {4} and {first for first, _ in parts} > {0}
    assert llm.stats().num_encoded_images == 4
