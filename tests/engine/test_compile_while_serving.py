"""An engine that compiles what it needs first serves at once, with the tokens of one that compiled all before."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from greedy_reference import random_prompts
from thorough import rarely
from tiny_chat_model import make_chat_model
from transformers import AutoModelForCausalLM

from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.engine.compilation import BackgroundCompiler
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.compile.recent import recent_programs
from jpaged.execution.programs import ModelPrograms
from jpaged.execution.sampling.sampling_batch import RANKED

pytestmark = pytest.mark.each_shape
SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 80,
    "kv_cache_memory_bytes": 1 << 20,
}
PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(lengths=(20, 9, 3, 40))]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_chat_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(model):
    with LLM(model, **SETTINGS) as llm:
        return tokens(llm)


@pytest.fixture(autouse=True)
def compiled_here():
    recent_programs.clear()


@pytest.fixture
def held(monkeypatch):
    """The background has not begun yet."""
    monkeypatch.setattr(BackgroundCompiler, "start", lambda self: None)
    monkeypatch.setattr(BackgroundCompiler, "stop", lambda self: None)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = [output for params in (GREEDY, DRAWN) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [list(output.outputs[0].token_ids) for output in outputs]


def finish(llm: LLM) -> None:
    llm.control.engine.background.wait(600)
    assert not llm.control.engine.background.is_running


def test_what_is_compiled_first_serves_every_request(model, expected, held):
    with LLM(model, background_compilation=True, **SETTINGS) as llm:
        first = len(llm.control.engine.runner.shapes.first())
        assert llm.stats().num_compiled == first == 5
        assert tokens(llm) == expected
        assert llm.stats().num_compiled == first, "a step waited for the compiler"


def test_what_the_background_compiled_is_not_compiled_again(model, expected):
    with LLM(model, background_compilation=True, **SETTINGS) as llm:
        finish(llm)
        stats, number = llm.stats(), llm.control.engine.runner.num_warmup
        assert stats.num_compiled == number and stats.num_shapes_to_come == 0
        assert stats.num_compiled_in_background == number - 5
        assert tokens(llm) == expected
        assert llm.num_recompiles == 0 and llm.stats().compile_seconds == stats.compile_seconds
        metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        assert metrics["jpaged:background_compiled_shapes"] == number - 5
        assert metrics["jpaged:shapes_to_compile"] == 0


def test_steps_run_in_their_own_shapes_once_these_are_compiled(model):
    with LLM(model, background_compilation=True, **SETTINGS) as llm:
        finish(llm)
        runner = llm.control.engine.runner
        assert all(map(runner.worker.model.has_step, runner.buckets.all))


def test_a_step_runs_in_the_smallest_shape_that_is_compiled(model, expected, held):
    with LLM(model, background_compilation=True, **SETTINGS) as llm:
        runner, ran = llm.control.engine.runner, []
        compute, draw = runner.worker.compute, runner.worker.draw
        runner.worker.compute = lambda batch, bucket, *more: ran.append(bucket) or compute(batch, bucket, *more)
        runner.worker.draw = lambda args, top: ran.append((len(args.position), top)) or draw(args, top)
        decode, mixed, most = runner.buckets.decode, runner.buckets.mixed, runner.buckets.sample_rows[-1]
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        assert set(ran) == {mixed[0], decode[0], (1, 0)}, "one request is not padded"
        assert llm.control.engine.runner.worker.compilations.num_padded == 0
        ran.clear()
        llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert set(ran) == {mixed[0], (most, RANKED)}, "two decodes take 64 tokens, not 80"
        counts = runner.worker.compilations
        assert set(counts.lacking) == {"decode step, 2 tokens", "greedy sampler, 4 rows"}
        assert counts.num_padded == sum(counts.lacking.values())
        for shape in runner.shapes.later():
            if shape.name == "decode step, 4 tokens":
                shape.trace()()
        ran.clear()
        llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert {bucket for bucket in ran if isinstance(bucket, Bucket)} == {mixed[0], decode[2]}
        assert tokens(llm) == expected


def test_requests_and_the_background_compile_each_shape_once(model, expected):
    with LLM(model, background_compilation=True, **SETTINGS) as llm:
        assert tokens(llm) == expected  # while it compiles
        finish(llm)
        assert llm.stats().num_compiled == llm.control.engine.runner.num_warmup


@pytest.mark.parametrize("ask", [rarely("params"), "update_params"])
def test_programs_for_weights_that_are_held_otherwise_are_compiled_in_the_background_too(ask, model, tmp_path):
    narrow = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path)
    other = {name: tensor.float() * (1 + 2**-12) for name, tensor in narrow.state_dict().items()}
    with LLM(str(tmp_path), tokenizer=model, background_compilation=True, **SETTINGS) as llm:
        runner, before = llm.control.engine.runner, tokens(llm)
        finish(llm)
        number, background = llm.stats().num_compiled_in_background, llm.control.engine.background
        if ask == "params":
            assert llm.params is not None
            assert tokens(llm) == before  # while it compiles
        else:
            llm.update_params(other)
        finish(llm)
        assert llm.control.engine.background is not background
        assert llm.stats().num_compiled_in_background > number and llm.stats().num_shapes_to_come == 0
        assert all(map(runner.worker.model.has_step, runner.buckets.all))
        assert tokens(llm) and llm.num_recompiles == 0


def test_a_warm_up_takes_over_from_the_background(model):
    with LLM(model, background_compilation=True, **SETTINGS) as llm:
        assert llm.warmup(use_tqdm=False) == llm.control.engine.runner.num_warmup
        assert not llm.control.engine.background.is_running
        assert tokens(llm) and llm.num_recompiles == 0


def test_closing_ends_the_background(model):
    llm = LLM(model, background_compilation=True, **SETTINGS)
    background = llm.control.engine.background
    llm.close()
    assert not background.is_running


def test_shutting_down_ends_the_background(model):
    async def serve() -> AsyncLLM:
        async with AsyncLLM(model, background_compilation=True, **SETTINGS) as engine:
            outputs = [output async for output in engine.generate(PROMPTS[0], GREEDY, "a")]
            assert len(outputs[-1].outputs[0].token_ids) == 6
            return engine

    asyncio.run(serve())
    assert not [thread for thread in threading.enumerate() if thread.name == "jpaged-background"]


def test_shapes_that_the_background_cannot_compile_leave_the_engine_as_it_was(model, expected, monkeypatch, caplog):
    prepare = ModelPrograms.prepare_step

    def fail_for_decodes(self, batch, last_tokens, bucket):
        if bucket.decode_only:
            raise RuntimeError("no such tile")
        return prepare(self, batch, last_tokens, bucket)

    monkeypatch.setattr(ModelPrograms, "prepare_step", fail_for_decodes)
    with LLM(model, background_compilation=True, **SETTINGS) as llm:
        finish(llm)
        assert "decode step, 1 tokens cannot be compiled; steps take a larger one" in caplog.text
        assert "decode step, 2 tokens cannot be compiled in the background" in caplog.text
        assert tokens(llm) == expected


@pytest.mark.parametrize("more", [{"deterministic": True}, {"preemption_mode": "swap"}])
def test_other_engines_have_what_they_need_first_too(more, model, held):
    settings = {**SETTINGS, "background_compilation": True, **more}
    with LLM(model, **settings) as llm:
        compiled = llm.stats().num_compiled
        assert tokens(llm)
        assert llm.stats().num_compiled == compiled


def test_settings_that_exclude_each_other_are_refused(model):
    with pytest.raises(ValueError, match="background_compilation=True needs enforce_eager=False: it compiles nothing"):
        LLM(model, background_compilation=True, enforce_eager=True)
