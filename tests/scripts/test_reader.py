"""The model that reads numbers: its parts, and how much of what it never saw it reads after the whole training."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from greedy_reference import one_torch_thread

from jpaged import SamplingParams
from scripts import reader as script


@pytest.fixture(scope="module")
def reader():
    with one_torch_thread():
        return script.make()


def test_pictures_and_numbers_are_the_same_for_a_seed():
    def drawn(seed):
        rng = np.random.default_rng(seed)
        return [np.asarray(script.draw(number, rng)) for number in script.learned(8, rng)]

    for one, same, other in zip(drawn(3), drawn(3), drawn(4), strict=True):
        assert np.array_equal(one, same) and not np.array_equal(one, other)
        assert np.ptp(one) > 50, "a number is seen on its paper"


def test_no_number_that_is_asked_for_is_learned():
    learned = script.learned(20_000, np.random.default_rng(0))
    assert len(learned) == 20_000 and len(set(learned)) > 3000 and {1, 2, 3, 4} == {len(str(each)) for each in learned}
    assert len(set(script.unseen())) == 1000 and not set(script.unseen()) & set(learned)
    assert {3, 4} == {len(str(each)) for each in script.unseen()}


def test_a_digit_counts_in_its_own_place():
    score = script.Score.of(["123", "4567", "12", ""], [123, 4576, 812, 999])
    assert score == (0.25, (3 + 2) / 13)


def test_a_step_of_training_changes_the_loss(reader):
    with one_torch_thread():
        losses = list(script.train(script.make(), steps=4, batch=4, rate=1e-2))
        again = list(script.train(script.make(), steps=4, batch=4, rate=1e-2))
        stopped = list(script.train(script.make(), steps=4, batch=4, minutes=0))
    assert losses == again and stopped == []
    assert losses[-1] < losses[0] - 1 and abs(losses[0] - np.log(len(reader.tokenizer))) < 0.5


def test_the_folder_is_opened_as_it_is_and_asks_what_was_trained(reader, tmp_path):
    """The prompt and the pixels of a chat are those of a batch, so the likeliest tokens are torch's."""
    reader.save(tmp_path)
    numbers, text = [7, 4711], script.QUESTIONS[1]
    rng = np.random.default_rng(0)
    pictures = [script.draw(number, rng) for number in numbers]
    batch = script.batch_of(reader, numbers, text, np.random.default_rng(0))
    prompt = batch["input_ids"][:, : int((batch["labels"][1] < 0).sum())]
    with one_torch_thread(), torch.inference_mode():
        wanted = reader.model(prompt, pixel_values=batch["pixel_values"]).logits[:, -1].log_softmax(-1).numpy()
    with script.opened(tmp_path) as llm:
        asked = [script.question(picture, text) for picture in pictures]
        outputs = llm.chat(asked, SamplingParams(temperature=0, max_tokens=1, logprobs=3), use_tqdm=False)
    for output, ids, each in zip(outputs, prompt.tolist(), wanted, strict=True):
        assert list(output.prompt_token_ids) == ids
        found = {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}
        assert found == pytest.approx({token: each[token] for token in found}, abs=1e-4)


@pytest.mark.nightly
def test_nineteen_of_twenty_unseen_numbers_are_read_and_none_from_another_picture(tmp_path, capsys):
    script.main(["--folder", str(tmp_path), "--minutes", "60"])
    own, swapped = (
        [float(part) / 100 for part in re.findall(r"([\d.]+)%", line)]
        for line in capsys.readouterr().out.splitlines()[-2:]
    )
    assert own[0] >= 0.95
    assert swapped[0] < 0.01 and 0.05 < swapped[1] < 0.15
