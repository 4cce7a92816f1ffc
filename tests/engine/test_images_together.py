"""Images of one shape are encoded in one call, which changes nothing but rounding, and no shape is unforeseen."""

from __future__ import annotations

import numpy as np
import pytest
from vision_checkpoints import FAMILIES, check_empty, picture, prompt_of

from jpaged import LLM, SamplingParams
from jpaged.execution import encode
from jpaged.execution.encode import calls, numbers_together
from jpaged.execution.work import images
from jpaged.model_api import CrossAttentionGroup, ImageGroup

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 4 << 20,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.fixture
def together(monkeypatch):
    """Let a CPU encode several images at once, as other devices do, and count the images of each call."""
    monkeypatch.setattr(images, "platform", lambda mesh: "tpu")
    made, stacked = [], encode.calls

    def counted(each, numbers):
        for call in stacked(each, numbers):
            made.append(len(call[0][1]))
            yield call

    monkeypatch.setattr(images, "calls", counted)
    return made


def test_answers_are_those_of_images_that_are_encoded_one_by_one(tmp_path, request):
    """Of a family whose encoder takes no rows."""
    make, placeholder = FAMILIES["mllama"]
    make(tmp_path)
    prompts = [prompt_of((3, picture(n), n), n, placeholder) for n in range(5)]
    prompts.append(prompt_of((picture(7), picture(8), 2), 9, placeholder))
    alone = LLM(str(tmp_path), **SETTINGS).generate(prompts, PARAMS, use_tqdm=False)
    sizes = request.getfixturevalue("together")
    llm = LLM(str(tmp_path), **SETTINGS)
    assert llm.warmup(use_tqdm=False) == llm.control.engine.runner.num_warmup
    sizes.clear()
    for one, other in zip(alone, llm.generate(prompts, PARAMS, use_tqdm=False), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        logprobs = ([next(iter(each.values())).logprob for each in o.outputs[0].logprobs] for o in (one, other))
        np.testing.assert_allclose(*logprobs, atol=1e-4)
    assert max(sizes) > 1 and sum(sizes) == 7
    assert llm.num_recompiles == 0
    check_empty(llm)


def test_as_many_are_encoded_at_once_as_a_step_has_room_for_or_stand_together():
    features = ImageGroup("images", (), 64, "float32")
    assert numbers_together(features, 256, 2048, platform="gpu") == (4, 2, 1)
    assert numbers_together(features, 256, 700, platform="tpu") == (2, 1)
    assert numbers_together(features, 6000, 512, platform="tpu") == (1,)
    assert numbers_together(features, 256, 2048, platform="cpu") == (1,)
    stays = CrossAttentionGroup("images", (1,), 2, 64, 6404)
    assert numbers_together(stays, 6404, 512, platform="tpu") == ((4, 2, 1) if stays.most_together >= 4 else (2, 1))


def image(number):
    return {"pixels": np.full((2, 3), number, np.float32)}, np.full(4, number, np.int32)


def test_calls_take_the_largest_number_there_is_and_blanks_write_nowhere():
    made = list(calls([[image(n) for n in range(7)], [image(9)]], (4, 2, 1)))
    assert [len(first[1]) for first, _ in made] == [4, 2, 1]
    assert made[0][0][1][:, 0].tolist() == [0, 1, 2, 3]
    nowhere = np.iinfo(np.int32).max
    assert [call[1][1][:, 0].tolist() for call in made] == [[9, *[nowhere] * 3], [nowhere] * 2, [nowhere]]
    assert all(call[1][0]["pixels"].shape == call[0][0]["pixels"].shape for call in made)
