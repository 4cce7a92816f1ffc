"""What else happens to requests with images: chunks, budgets, aborts, failures, drafts, AsyncLLM, refusals."""

from __future__ import annotations

import asyncio
from math import ceil

import pytest
from vision_checkpoints import IMAGE_TOKENS, check_empty, make_gemma3, picture, prompt_of

from jpaged import LLM, AsyncLLM, NGram, SamplingParams
from jpaged.scheduling.scheduler import Scheduler

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 96,
    "max_num_batched_tokens": 40,
    "kv_cache_memory_bytes": 4 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
A, B = picture(0), picture(1)
PROMPTS = [prompt_of(parts, seed) for seed, parts in enumerate([(30, A, 5), (2,), (A, B, 9), (3, B, 20)])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    make_gemma3(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engine(folder):
    return LLM(folder, **SETTINGS)


@pytest.fixture
def llm(engine):
    engine.reset_prefix_cache()
    yield engine
    check_empty(engine)


@pytest.fixture(scope="module")
def expected(engine):
    return tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False))


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_a_step_computes_and_encodes_no_more_than_its_budget_and_cuts_no_image(llm, expected, monkeypatch):
    steps, plan = [], Scheduler.schedule

    def watched(self):
        step = plan(self)
        steps.append((step, [chunk[1:3] for chunk in step.chunks]))
        return step

    monkeypatch.setattr(Scheduler, "schedule", watched)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    policy = llm.control.engine.memory.shared["images"].policy
    encodes = [
        [ceil(len(e.image.arrays[policy.patches]) * policy.work) for e in s.work_of("encodes")] for s, _ in steps
    ]
    cost = [step.num_tokens + sum(made) for (step, _), made in zip(steps, encodes, strict=True)]
    assert max(cost) <= 40 and {one for made in encodes for one in made} != {IMAGE_TOKENS}
    assert sum(len(step.work_of("encodes")) for step, _ in steps) == 2
    reads = [read for step, _ in steps for read in step.rows.get("images", ())]
    assert len(reads) == 4 and all(read.stop - read.start == IMAGE_TOKENS for read in reads)


def test_images_are_computed_with_the_prefix_cache_off_and_nothing_stays(folder, expected):
    llm = LLM(folder, enable_prefix_caching=False, **SETTINGS)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert all(blocks.evictable == blocks.used == 0 for blocks in llm.stats().blocks)
    check_empty(llm)


def test_drafts_change_no_token_behind_an_image(folder, expected):
    llm = LLM(folder, speculative=NGram(tokens=2), **SETTINGS)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    check_empty(llm)


def test_more_outputs_than_places_all_see_the_images(llm, expected):
    six = SamplingParams(n=6, temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[2], six, use_tqdm=False)
    assert [out.token_ids for out in output.outputs] == [expected[2]] * 6


def test_a_closed_stream_leaves_nothing_of_its_images(llm):
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()
    assert llm.control.engine.memory.num_used_blocks == 0


def test_a_failed_encoder_leaves_an_engine_that_gives_the_same_tokens(llm, expected, monkeypatch):
    worker, calls = llm.control.engine.runner.worker, []
    run = worker.works["encodes"].run

    def fails_first(*args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return run(*args)

    monkeypatch.setattr(worker.works["encodes"], "run", fails_first)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    check_empty(llm)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_one_bad_image_harms_no_other_prompt(llm, expected):
    bad = prompt_of((3, picture(5)), 9) | {"multi_modal_data": {"image": "data:image/png;base64,AAAA"}}
    outputs = llm.generate([*PROMPTS, bad], GREEDY, use_tqdm=False, on_error="return")
    assert tokens(outputs[:4]) == expected
    assert "image 1 of 1" in outputs[4].error and "not an image of PNG" in outputs[4].error
    with pytest.raises(ValueError, match="prompt 1: image 1 of 1"):
        llm.generate([PROMPTS[0], bad], GREEDY, use_tqdm=False)


def test_chat_takes_images_in_messages(llm):
    content = [{"type": "text", "text": "what is "}, {"type": "image_pil", "image_pil": A}]
    messages = [{"role": "user", "content": content}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "<bos>[user]what is <begin>[model]"
    assert tokens([output]) == tokens(llm.generate(llm.chat_prompt(messages), GREEDY, use_tqdm=False))


def test_many_clients_of_an_async_engine_send_images(llm, expected):
    async def one(engine, number):
        async for output in engine.generate(PROMPTS[number], GREEDY, f"request {number}"):
            last = output
        return last.outputs[0].token_ids

    async def all_of_them():
        async with AsyncLLM.from_llm(llm) as engine:
            return await asyncio.gather(*(one(engine, number) for number in range(len(PROMPTS))))

    assert asyncio.run(all_of_them()) == expected


def test_an_image_that_no_step_can_compute_is_refused_with_the_limit(folder):
    llm = LLM(folder, **(SETTINGS | {"max_num_batched_tokens": 18}))
    with pytest.raises(ValueError, match=r"image 1 takes 16 tokens, which one step has to compute together, .* 15"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    tight = LLM(folder, **(SETTINGS | {"kv_cache_memory_bytes": 8 << 14}))
    with pytest.raises(ValueError, match="can never fit the pool of 8 large pages"):
        tight.generate(prompt_of((20, A, 30)), GREEDY, use_tqdm=False)
    for small in (llm, tight):
        check_empty(small)


def test_a_model_without_its_eyes_refuses_images_and_runs_text(folder, expected):
    llm = LLM(folder, language_model_only=True, **SETTINGS)
    message = "prompts are text only, as model='.*' with language_model_only=True takes no"
    with pytest.raises(ValueError, match=f"a prompt has 'multi_modal_data': {message}"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert tokens(llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)) == expected[1:2]


def test_a_prefix_with_images_is_pinned_up_to_a_whole_image_and_serves_prompts_of_its_salt_only(llm):
    pinned = llm.pin_prefix(prompt_of((6, A), 5), cache_salt="tenant")
    assert pinned.num_tokens == 8, "the ends of the second and third block lie in the image"
    llm.unpin(pinned)
    with pytest.raises(ValueError, match="23 tokens have no end of a block, each of 8 tokens, that is not within an"):
        llm.pin_prefix(prompt_of((2, A), 5))
    pinned = llm.pin_prefix(prompt_of((6, A, 7), 5), cache_salt="tenant")
    llm.reset_prefix_cache()
    before = llm.stats().num_encoded_images

    def cached(salt, image=A):
        prompt = prompt_of((6, image, 7, 9), 5) | ({"cache_salt": salt} if salt else {})
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert (cached("tenant"), cached("tenant", B), cached(None)) == (32, 8, 0)
    assert llm.stats().num_encoded_images == before + 2, "no token of the pinned image is computed again"
    llm.unpin(pinned)


def test_after_the_warm_up_images_compile_nothing(folder):
    llm = LLM(folder, **SETTINGS)
    assert llm.warmup(use_tqdm=False) == llm.control.engine.runner.num_warmup
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.num_recompiles == 0
