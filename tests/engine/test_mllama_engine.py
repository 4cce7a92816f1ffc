"""Llama 3.2 Vision: tokens are those of transformers, an image is encoded once, and nothing leaks.

The judge is transformers with two things changed, see `taking_what_enters` and `blind_before_images`; where a prompt
begins with its image, the second changes nothing, and transformers judges without it.
"""

from __future__ import annotations

import pytest
import torch
from beam_reference import assert_same_beams, torch_beams
from greedy_reference import assert_same_tokens
from images_by_devices import PARAMS, assert_like, on_devices, prompts_with
from vision_checkpoints import (
    MLLAMA_IMAGE,
    assert_forks,
    blind_before_images,
    check_empty,
    make_mllama,
    mllama_seen,
    picture,
    prompt_of,
    torch_vision_greedy,
)

from jpaged import LLM, BeamSearchParams, NGram, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 16,
    "max_model_len": 128,
    "max_num_batched_tokens": 96,
    "long_prefill_token_threshold": 24,
    "kv_cache_memory_bytes": 30 * 48 << 10,
}
"""A pool of 30 large pages, in which requests are preempted, and chunks of 24 tokens."""

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
SMALL, WIDE, TALL = picture(0), picture(1, (20, 90)), picture(2, (90, 30))
DOT, LINE = picture(3, (1, 1)), picture(4, (1, 40))
TILE = 17
PARTS = [
    (3, SMALL, 5),
    (SMALL,),
    (20, WIDE, 30),
    (9,),
    (SMALL, WIDE, 2),
    (3, SMALL, 5, TALL, 1),
    (31,),
    (2, TALL, 33, SMALL, 4),
    (16, SMALL, 1),
    (7, WIDE, WIDE, SMALL, 7),
    (1,),
    (2, DOT, 1, LINE, 1, WIDE, 1, SMALL, TALL, 3),
    (3, SMALL, 9),
    (57,),
    (24, SMALL, 24),
    (5, WIDE, 6),
]


def prompt(parts, seed=0):
    return prompt_of(parts, seed, MLLAMA_IMAGE)


PROMPTS = [prompt(parts, seed) for seed, parts in enumerate(PARTS)]
RUNS = [(SMALL,), (WIDE,), (TALL,), (SMALL, WIDE), (WIDE, WIDE, SMALL), (DOT,), (LINE,), (SMALL, TALL)]
"""What is encoded for the prompts: images that follow one another without text are one."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mllama")
    return str(folder), make_mllama(folder)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLM(checkpoint[0], **SETTINGS)


@pytest.fixture(scope="module")
def model(checkpoint, as_it_is):
    """transformers' model, changed; `as_it_is` was asked before."""
    return blind_before_images(checkpoint[1])


def requests_of(engine, prompts):
    return [engine.input_processor.process(each, GREEDY) for each in prompts]


def torch_tokens(model, requests, number=48):
    return torch_vision_greedy(model, requests, number, [mllama_seen(request) for request in requests])


BEGIN_WITH_IMAGES = [{**prompt(parts, seed)} for seed, parts in enumerate([(SMALL, 9), (WIDE, TALL, 5, SMALL, 3)])]
for _each in BEGIN_WITH_IMAGES:
    del _each["prompt_token_ids"][0]  # the token that begins a text


@pytest.fixture(scope="module")
def as_it_is(engine, checkpoint):
    """Return what transformers' own model generates for prompts that begin with images, and for one that does not."""
    requests = requests_of(engine, [*BEGIN_WITH_IMAGES, PROMPTS[2]])
    return torch_tokens(checkpoint[1], requests)


@pytest.fixture(scope="module")
def expected(engine, model):
    return torch_tokens(model, requests_of(engine, PROMPTS))


@pytest.fixture
def llm(engine):
    """The engine; after every test its memory is empty and sound."""
    yield engine
    check_empty(engine)


def test_prompts_that_begin_with_images_give_the_tokens_of_transformers_as_it_is(llm, as_it_is):
    found = llm.generate(BEGIN_WITH_IMAGES, GREEDY, use_tqdm=False)
    assert_same_tokens(found, as_it_is[:2])


def test_greedy_tokens_are_those_of_transformers_while_requests_are_preempted(llm, expected, as_it_is):
    before = llm.stats().num_preemptions
    assert_same_tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert llm.stats().num_preemptions > before
    assert len({tuple(reference.tokens) for reference in expected}) > 12, "the prompts should be told apart"
    assert expected[2].tokens != as_it_is[2].tokens, "transformers shows text the images behind it"


def test_greedy_tokens_are_the_same_with_prefix_hits(llm, expected):
    assert_same_tokens(llm.generate(PROMPTS[2:6], GREEDY, use_tqdm=False), expected[2:6])
    hits = llm.stats().prefix_hits
    assert_same_tokens(llm.generate(PROMPTS[2:6], GREEDY, use_tqdm=False), expected[2:6])
    assert llm.stats().prefix_hits > hits


def test_greedy_tokens_are_the_same_when_requests_are_swapped_out(checkpoint, expected):
    llm = LLM(checkpoint[0], preemption_mode="swap", **SETTINGS)
    assert_same_tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert llm.stats().num_swaps > 0
    check_empty(llm)


@pytest.mark.nightly
def test_in_a_large_pool_each_image_is_encoded_once(checkpoint, expected):
    large = SETTINGS | {"long_prefill_token_threshold": 0, "kv_cache_memory_bytes": 8 << 20}
    llm = LLM(checkpoint[0], **large)
    assert_same_tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert (llm.stats().num_encoded_images, llm.stats().num_preemptions) == (len(RUNS), 0)
    check_empty(llm)


def test_log_probabilities_of_the_prompt_are_those_of_transformers(llm, model):
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[7], scored, use_tqdm=False)
    (request,) = requests_of(llm, PROMPTS[7:8])
    ids = torch.tensor([request.prompt_token_ids])
    with torch.inference_mode():
        logits = model(ids, attention_mask=torch.ones_like(ids), **mllama_seen(request)).logits[0].double()
    drawn = [place for place in range(1, ids.shape[1]) if ids[0, place] != MLLAMA_IMAGE]
    wanted = [float(logits[place - 1].log_softmax(-1)[ids[0, place]]) for place in drawn]
    found = [output.prompt_logprobs[place][int(ids[0, place])].logprob for place in drawn]
    assert found == pytest.approx(wanted, abs=1e-4) and len(found) > 2 * TILE
    image = next(place for place in range(1, ids.shape[1]) if place not in drawn)
    assert output.prompt_logprobs[image][MLLAMA_IMAGE].logprob == -float("inf"), "it cannot be drawn"


def test_four_outputs_fork_behind_an_image_and_draw_from_what_transformers_computes(llm, model):
    assert_forks(llm, model, PROMPTS[:3], [mllama_seen] * 3)


def test_beams_of_four_are_those_of_transformers(llm, model):
    params = BeamSearchParams(4, 8, ignore_eos=True)
    requests = requests_of(llm, PROMPTS[:5])
    prompts, more = [r.prompt_token_ids for r in requests], [mllama_seen(r) for r in requests]
    wanted = torch_beams(model, prompts, params, more=more)
    assert_same_beams(llm.beam_search(PROMPTS[:5], params, use_tqdm=False), wanted, params)


@pytest.mark.nightly
def test_drafts_change_no_token(checkpoint, expected):
    llm = LLM(checkpoint[0], speculative=NGram(tokens=3), **(SETTINGS | {"max_num_seqs": 4}))
    assert_same_tokens(llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False), expected[:3])
    assert llm.stats().num_drafts > 0
    check_empty(llm)


def test_many_requests_with_one_image_share_its_blocks_while_they_run(llm):
    llm.reset_prefix_cache()
    before, own = llm.stats().num_encoded_images, picture(10)
    peaks = []
    for number, _ in enumerate(llm.stream(prompt((4, own, 3), 99), SamplingParams(max_tokens=6, ignore_eos=True))):
        peaks.append(next(group for group in llm.memory_report().groups if group.name == "images").used)
        if not number:  # others come and go meanwhile
            llm.generate([prompt((1 + n % 5, own, n % 3), n) for n in range(20)], FEW, use_tqdm=False)
    assert llm.stats().num_encoded_images == before + 1
    assert set(peaks[:-1]) == {-(-2 * TILE // 8)}, "held until the last token"
    images = next(group for group in llm.memory_report().groups if group.name == "images")
    assert (images.used, images.evictable) == (0, -(-2 * TILE // 8))


def test_equal_images_share_a_prefix_and_different_ones_share_the_text_before_them(llm):
    def cached(image):
        return llm.generate([prompt((20, image, 20), 5)], FEW, use_tqdm=False)[0].num_cached_tokens

    llm.reset_prefix_cache()
    assert cached(SMALL) == 0
    same_pixels, other_pixels = SMALL.copy(), SMALL.copy()
    other_pixels.putpixel((0, 0), (1, 2, 3))
    assert cached(same_pixels) == 40
    assert cached(other_pixels) == 16, "text before an image does not see it"
    assert cached(other_pixels) == 40


def test_more_images_without_text_in_between_than_can_be_read_together_are_refused(llm):
    with pytest.raises(ValueError, match="5 images follow one another without text in between, the limit is 4"):
        llm.generate([prompt([SMALL] * 5 + [3])], FEW, use_tqdm=False)


def test_chat_messages_have_images(llm):
    content = [{"type": "image_pil", "image_pil": SMALL}, {"type": "text", "text": "what is it"}]
    (output,) = llm.chat([{"role": "user", "content": content}], FEW, use_tqdm=False)
    assert output.prompt_token_ids.count(MLLAMA_IMAGE) == 1 and len(output.outputs[0].token_ids) == 2


@pytest.mark.nightly
def test_without_its_eyes_the_model_answers_text_as_before(checkpoint, expected):
    llm = LLM(checkpoint[0], language_model_only=True, **(SETTINGS | {"max_num_seqs": 1}))
    assert_same_tokens(llm.generate(PROMPTS[3:4], GREEDY, use_tqdm=False), expected[3:4])
    with pytest.raises(ValueError, match="language_model_only=True takes no images"):
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)


@pytest.mark.nightly
def test_after_the_warm_up_images_compile_nothing(checkpoint, expected):
    llm = LLM(checkpoint[0], **(SETTINGS | {"max_num_seqs": 2, "max_num_batched_tokens": 48}))
    assert llm.warmup(use_tqdm=False) == llm.control.engine.runner.num_warmup
    assert_same_tokens(llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False), expected[:4])
    assert llm.num_recompiles == 0


@pytest.mark.nightly
def test_two_devices_and_replicas_give_the_tokens_of_transformers(checkpoint, llm, model):
    wanted = torch_tokens(model, requests_of(llm, prompts_with(MLLAMA_IMAGE)), PARAMS.max_tokens)
    assert_like(on_devices(checkpoint[0], MLLAMA_IMAGE, 1, 2, "2x1"), wanted)
