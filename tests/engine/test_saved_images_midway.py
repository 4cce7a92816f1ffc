"""A state that is saved, or a process that is killed, in the midst of an image: nothing is lost and nothing differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from saved_image_prompts import PARAMS, SETTINGS, prompts_with
from vision_checkpoints import FAMILIES, IMAGE, check_empty, make_llava

from jpaged import LLM

HERE = Path(__file__).parent
PROMPTS = prompts_with(IMAGE)


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A checkpoint whose chunks cut images, what it answers, and the bytes of a large page."""
    folder = tmp_path_factory.mktemp("llava")
    make_llava(folder)
    llm = LLM(str(folder), **SETTINGS)
    return str(folder), answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)), llm.memory_report().page_bytes


def kept(llm):
    """Return how many blocks hold features, for a request or until somebody needs the room."""
    return next(group.used + group.evictable for group in llm.memory_report().groups if group.name == "images")


@pytest.fixture(scope="module")
def midway(llava, tmp_path_factory):
    """The folder of a state in which the first chunks of an image's tokens are computed, and the others are not."""
    folder = tmp_path_factory.mktemp("midway")
    llm = LLM(llava[0], **SETTINGS)
    for prompt in PROMPTS:
        llm.control.engine.add(llm.input_processor.process(prompt, PARAMS))

    def cut():
        for request in llm.control.engine.requests.awaited.values():
            done = request.sequences[0].num_computed
            if any(image.start < done < image.stop for image in request.asks.get("images", ())):
                return True
        return False

    while not cut():
        assert llm.control.engine.has_work
        llm.control.engine.step()
    assert kept(llm) > 0
    llm.save_state(folder)
    encoded = llm.stats().num_encoded_images
    llm.close()
    return folder, encoded


def test_the_features_that_are_not_yet_consumed_are_kept_and_no_image_is_encoded_twice(llava, midway):
    folder, before = midway
    llm = LLM.restore_state(folder)
    assert kept(llm) > 0
    llm.control.engine.memory.check_invariants()
    assert answers(llm.resume(use_tqdm=False)) == llava[1]
    requests = (llm.input_processor.process(prompt, PARAMS) for prompt in PROMPTS)
    every = {image.digest for request in requests for image in request.asks.get("images", ())}
    assert before + llm.stats().num_encoded_images == len(every)
    check_empty(llm)


@pytest.mark.nightly
@pytest.mark.parametrize("pages", [24, 16])
def test_a_smaller_pool_gives_up_an_image_that_is_half_consumed_and_computes_it_again(llava, midway, pages):
    _, expected, page = llava
    llm = LLM.restore_state(midway[0], kv_cache_memory_bytes=pages * page)
    llm.control.engine.memory.check_invariants()
    assert answers(llm.resume(use_tqdm=False)) == expected
    check_empty(llm)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llava", "gemma3", "mllama"])
def test_a_process_that_is_killed_while_it_encodes_loses_nothing(name, request, tmp_path):
    make, placeholder = FAMILIES[name]
    if name == "llava":
        model, expected, _ = request.getfixturevalue("llava")
    else:
        model = str(tmp_path / "model")
        make(Path(model))
        llm = LLM(model, **SETTINGS)
        expected = answers(llm.generate(prompts_with(placeholder), PARAMS, use_tqdm=False))
    state = tmp_path / "state"
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "models")])
    command = [sys.executable, str(HERE / "killed_while_encoding.py"), model, str(state), str(placeholder)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert done.returncode == -9, done.stderr
    llm = LLM.restore_state(state)
    assert answers(llm.resume(use_tqdm=False)) == expected
    assert llm.stats().num_encoded_images > 0, "the image that the encoder had is encoded again"
    check_empty(llm)
