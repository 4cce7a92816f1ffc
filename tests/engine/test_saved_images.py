"""Saved states of models with eyes: requests go on before, between and behind their images, and images stay cached."""

from __future__ import annotations

import pytest
from saved_image_prompts import PARAMS, SETTINGS, prompts_with
from thorough import rarely
from vision_checkpoints import FAMILIES, check_empty

from jpaged import LLM, StateRefused


@pytest.fixture(
    scope="module", params=["mllama", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma3", "llava"))]
)
def family(request, tmp_path_factory):
    """A checkpoint, prompts, and what an engine that nothing disturbs answers."""
    make, placeholder = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    make(folder)
    prompts = prompts_with(placeholder)
    llm = LLM(str(folder), **SETTINGS)
    return str(folder), prompts, answers(llm.generate(prompts, PARAMS, use_tqdm=False))


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def saved_after(model, prompts, steps, folder, **options):
    """The state after some steps, and images encoded until then."""
    llm = LLM(model, **SETTINGS | options)
    for prompt in prompts:
        llm.control.engine.add(llm.input_processor.process(prompt, PARAMS))
    for _ in range(steps):
        llm.control.engine.step()
    llm.save_state(folder)
    for _ in range(2):
        llm.control.engine.step()
    llm.save_state(folder)  # takes over what the first has of the blocks that are as they were
    encoded = llm.stats().num_encoded_images
    llm.close()
    return encoded


AFTER = [6, *map(rarely, (0, 1, 3, 12))]


@pytest.mark.parametrize("steps", AFTER)
def test_requests_go_on_wherever_they_are_and_no_image_is_encoded_twice(family, tmp_path, steps):
    model, prompts, expected = family
    before = saved_after(model, prompts, steps, tmp_path)
    llm = LLM.restore_state(tmp_path)
    llm.control.engine.memory.check_invariants()
    assert answers(llm.resume(use_tqdm=False)) == expected
    processed = (llm.input_processor.process(prompt, PARAMS) for prompt in prompts)
    every = len({image.digest for request in processed for image in request.asks.get("images", ())})
    assert before + llm.stats().num_encoded_images == every
    check_empty(llm)


@pytest.mark.nightly
def test_a_smaller_pool_gives_up_images_and_requests_and_the_answers_are_the_same(family, tmp_path):
    model, prompts, expected = family
    saved_after(model, prompts, 5, tmp_path)
    page = LLM(model, **SETTINGS).memory_report().page_bytes
    least = LLM.restore_state(tmp_path, kv_cache_memory_bytes=max(45 * 9216 // page, 24) * page)
    least.control.engine.memory.check_invariants()
    assert answers(least.resume(use_tqdm=False)) == expected
    check_empty(least)


def test_an_image_is_found_in_the_cache_that_was_saved(family, tmp_path):
    model, prompts, expected = family
    llm = LLM(model, **SETTINGS)
    llm.generate(prompts, PARAMS, use_tqdm=False)
    llm.save_state(tmp_path)
    llm.close()
    warm = LLM.restore_state(tmp_path)
    assert answers(warm.generate(prompts, PARAMS, use_tqdm=False)) == expected
    assert warm.stats().num_encoded_images == 0 and warm.stats().prefix_hits > 0
    check_empty(warm)


@pytest.mark.nightly
def test_other_layouts_of_blocks_encode_and_compute_again(family, tmp_path):
    model, prompts, expected = family
    saved_after(model, prompts, 4, tmp_path)
    llm = LLM.restore_state(tmp_path, block_size=16)
    assert answers(llm.resume(use_tqdm=False)) == expected
    check_empty(llm)


@pytest.mark.parametrize("block_size", [8, pytest.param(16, marks=pytest.mark.nightly)])
def test_a_pinned_prefix_with_an_image_comes_back_also_where_it_is_computed_again(family, tmp_path, block_size):
    model, prompts, expected = family
    llm = LLM(model, **SETTINGS)
    pinned = llm.pin_prefix(prompts[5])
    llm.save_state(tmp_path)
    llm.close()
    llm = LLM.restore_state(tmp_path, block_size=block_size)
    (output,) = llm.generate(prompts[5], PARAMS, use_tqdm=False)
    assert output.num_cached_tokens >= 32 and output.outputs[0].token_ids == expected[5]
    llm.unpin(pinned)
    check_empty(llm)


def test_a_damaged_picture_is_refused(family, tmp_path):
    model, prompts, _ = family
    saved_after(model, prompts, 1, tmp_path)
    (host,) = tmp_path.glob("*/host.msgpack")
    data = bytearray(host.read_bytes())
    name = b"pixel_values" if b"pixel_values" in data else b"pixels"
    data[data.index(name) + 1000] ^= 1
    host.write_bytes(data)
    with pytest.raises(StateRefused, match=r"host\.msgpack"):
        LLM.restore_state(tmp_path)


@pytest.mark.nightly
def test_an_image_that_no_step_here_could_compute_ends_its_request_and_no_other(tmp_path):
    make, placeholder = FAMILIES["gemma3"]
    make(tmp_path / "model")
    prompts = prompts_with(placeholder)
    saved_after(str(tmp_path / "model"), prompts, 0, tmp_path / "state")
    llm, ends = LLM.restore_state(tmp_path / "state", long_prefill_token_threshold=8), []
    requests = list(llm.control.engine.requests.restored.values())
    for _ in range(100):  # one that waited for such a step would wait for ever
        llm.control.engine.step()
    for request, prompt in zip(requests, prompts, strict=True):
        (seq,) = request.sequences
        ends.append(seq.finish_reason == ("abort" if prompt.get("multi_modal_data") else "length"))
        assert seq.finish_reason != "abort" or "one step has to compute together" in seq.stop_reason
    assert all(ends)
    llm.control.engine.abort(*requests)
    check_empty(llm)
