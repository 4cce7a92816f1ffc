"""An image that costs more than a step is encoded over several: tokens stay, streams go on, nothing is left of it."""

from __future__ import annotations

import pytest
from qwen_vl_checkpoints import FAMILIES, IMAGE, SIZES, make, pictures, prompt
from vision_checkpoints import BEGIN, check_empty, make_gemma3, prompt_of

from jpaged import LLM, SamplingParams
from jpaged.scheduling.scheduler import Scheduler
from jpaged.scheduling.step import StepPlan

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_num_batched_tokens": 24,
    "kv_cache_memory_bytes": 8 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, logit_bias={IMAGE: -100})
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
    assert not kept(engine)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def kept(llm):
    """The lengths of the rows of which a part is encoded."""
    return llm.control.engine.runner.worker.works["encodes"].parts.kept


def watch(monkeypatch):
    """Return the steps that are planned from now on, as (rounds of parts, tokens of each chunk)."""
    steps, plan = [], Scheduler.schedule

    def watched(self):
        step = plan(self)
        parts = [encode.part[:2] for encode in step.work_of("encodes") if encode.part is not None]
        steps.append((parts, [chunk.length for chunk in step.chunks]))
        return step

    monkeypatch.setattr(Scheduler, "schedule", watched)
    return steps


def begin(llm, *prompts):
    """Add requests, and make steps until a part of an image is encoded; return the requests."""
    requests = [llm.input_processor.process(asked, GREEDY) for asked in prompts]
    for request in requests:
        llm.control.engine.add(request)
    while not kept(llm):
        assert llm.control.engine.has_work
        llm.control.engine.step()
    return requests


def test_tokens_are_those_of_pictures_that_are_encoded_in_one_step(llm, expected, monkeypatch):
    steps, before = watch(monkeypatch), llm.stats().num_encoded_images
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    parts = [part for parts, _ in steps for part in parts]
    assert {first for first, _ in parts} > {0} and max(stop for _, stop in parts) == 4
    assert llm.stats().num_encoded_images == before + 4


def test_streams_get_a_token_in_every_step_that_encodes_a_part(llm, monkeypatch):
    core = llm.control.engine
    streams = [llm.input_processor.process(prompt((3,), n), GREEDY) for n in range(2)]
    for stream in streams:
        core.add(stream)
    core.step()
    steps = watch(monkeypatch)
    (request,) = begin(llm, prompt((LARGE, 2), 9))
    while kept(llm):
        core.step()
    encoding = [lengths for parts, lengths in steps if parts]
    assert len(encoding) >= 3 and all(lengths.count(1) == 2 for lengths in encoding)
    core.abort(*streams, request)


def test_a_picture_is_begun_without_a_trace(llm, expected, monkeypatch):
    assert tokens(llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)) == expected[1:2]
    llm.reset_prefix_cache()
    monkeypatch.setattr("jpaged.execution.programs.between_parts", lambda *_: pytest.fail("streams wait for a trace"))
    assert tokens(llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)) == expected[1:2]


def test_the_arrays_of_a_picture_are_sent_once(llm, expected, monkeypatch):
    work, sent = llm.control.engine.runner.worker.works["encodes"], []
    run = work.run

    def watched(pool, names, *args):
        sent.append(len(names))
        return run(pool, names, *args)

    monkeypatch.setattr(work, "run", watched)
    assert tokens(llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)) == expected[1:2]
    assert len(sent) >= 3 and sent[0] > 0 and not any(sent[1:])


def test_aborted_requests_leave_nothing_of_a_half_encoded_picture(llm, expected):
    text, picture = begin(llm, PROMPTS[0], PROMPTS[1])
    llm.control.engine.abort(picture)
    llm.control.engine.step()
    assert not kept(llm)
    llm.control.engine.abort(text)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.nightly), 1, 2])
def test_a_part_that_fails_is_begun_again(llm, expected, monkeypatch, which):
    model, calls = llm.control.engine.runner.worker.model, []
    run = model.encode_part

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 1 + which:
            raise RuntimeError("out of memory")
        return run(*args)

    monkeypatch.setattr(model, "encode_part", fails_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    check_empty(llm)
    assert not kept(llm)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize("between", ["sleep", "save", pytest.param("new weights", marks=pytest.mark.nightly)])
def test_what_comes_between_two_parts_changes_no_token(llm, expected, between, tmp_path):
    requests, core = begin(llm, *PROMPTS), llm.control.engine
    if between == "sleep":
        llm.sleep()
        assert not kept(llm)
        llm.wake_up()
    elif between == "save":
        llm.save_state(tmp_path / "state")
        other = LLM.restore_state(tmp_path / "state")
        assert tokens(other.resume(use_tqdm=False)) == expected
        check_empty(other)
    else:
        llm.update_params(llm.params)
        assert not kept(llm)
    while core.has_work:
        core.step()
    found = [request.sequences[0].output_token_ids for request in requests]
    core.abort(*requests)
    assert found == expected


def test_preempted_requests_begin_their_picture_again(llm, expected):
    requests, core = begin(llm, *PROMPTS), llm.control.engine
    with core.change():
        plan = StepPlan(SETTINGS["max_num_batched_tokens"])
        while core.scheduler.running:
            core.scheduler.preemption.preempt_last(plan)
    while core.has_work:
        core.step()
    found = [request.sequences[0].output_token_ids for request in requests]
    core.abort(*requests)
    assert found == expected


@pytest.mark.nightly
def test_deterministic_steps_give_the_bits_of_a_prompt_alone(folder):
    llm = LLM(folder, deterministic=True, **SETTINGS)

    def bits(outputs):
        return [[next(iter(each.values())).logprob for each in output.outputs[0].logprobs] for output in outputs]

    together = bits(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    llm.reset_prefix_cache()
    for number in (3, 1, 2):
        assert bits(llm.generate([PROMPTS[number]], GREEDY, use_tqdm=False)) == [together[number]]


@pytest.mark.nightly
def test_no_part_compiles_after_a_warm_up(folder, expected):
    llm = LLM(folder, **SETTINGS)
    assert llm.warmup(use_tqdm=False) == llm.control.engine.runner.num_warmup
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected and llm.num_recompiles == 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in [*FAMILIES, "gemma3"] if name != "qwen3_vl"])
def test_every_family_gives_the_tokens_of_pictures_that_one_step_encodes(name, tmp_path, monkeypatch):
    if name == "gemma3":
        make_gemma3(tmp_path)
    else:
        make(name, tmp_path)
    settings = SETTINGS | {"max_model_len": 512, "kv_cache_memory_bytes": 32 << 20}
    parts, placeholder = [(2, LARGE, 3), (LARGE, 1, TINY, 2), (30,)], BEGIN if name == "gemma3" else IMAGE
    prompts = [prompt_of(part, n, placeholder) for n, part in enumerate(parts)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={placeholder: -100})
    monkeypatch.setattr("jpaged_models.vision.family.patch_work", lambda *_: 4.0)
    one = LLM(str(tmp_path), **settings | {"max_num_batched_tokens": 512})
    wanted = tokens(one.generate(prompts, params, use_tqdm=False))
    longest = max([3, *(image.length for image in _items(one, prompts) if image.whole)])
    llm = LLM(str(tmp_path), **settings | {"max_num_batched_tokens": longest + 1, "max_num_seqs": 2})
    steps = watch(monkeypatch)
    assert tokens(llm.generate(prompts, params, use_tqdm=False)) == wanted
    assert any(parts for parts, _ in steps)
    check_empty(llm)


def _items(llm, prompts):
    requests = (llm.input_processor.process(asked, SamplingParams()) for asked in prompts)
    return [image for request in requests for image in request.asks.get("images", ())]
