"""Five steps of the GRPO example on a tiny model: the divergence is 0 and the reward rises."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_chat_model import make_chat_model

from jpaged import LLM

FOLDER = Path(__file__).parents[2] / "scripts" / "rl"


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(FOLDER))
    try:
        import grpo
        import task

        yield grpo, task
    finally:
        sys.path.remove(str(FOLDER))


def test_five_steps_on_policy_raise_the_reward(scripts, tmp_path):
    grpo, task = scripts
    make_chat_model(tmp_path)
    settings = grpo.Settings(samples=8, prompt_tokens=24, answer_tokens=8, rate=3e-3)
    batches = [[task.Problem(prompt, 0) for prompt in ("the cab", "a far cry")]] * 5
    with LLM(
        str(tmp_path), dtype="float32", deterministic=True, max_model_len=32, max_num_seqs=16, block_size=8
    ) as llm:

        def vowels(text, problem):
            return sum(letter in "aeiou" for letter in text) / max(len(text), 1)

        reports = grpo.train(grpo.Trainer(llm, settings), batches, vowels)
    assert [report.divergence for report in reports] == [0.0] * 5
    assert [report.ratio_off for report in reports] == [0.0] * 5
    assert reports[-1].reward > reports[0].reward + 0.05
    assert all(np.isfinite(report.loss) for report in reports)


def test_the_task_is_the_same_for_a_seed_and_near_misses_are_worth_less(scripts):
    _, task = scripts
    assert task.problems(3, 5) == task.problems(3, 5) != task.problems(4, 5)
    worth = [task.reward(text, 7) for text in (" 7\n", " 8", "12", " seven", "77")]
    assert worth[0] == 1.0 > worth[1] > worth[2] > worth[3] == 0.0 and worth[4] < worth[1]
    assert task.rewards(["a", "b"], [" 7", " 1"], [7, 1]) == [1.0, 1.0]
