"""Five steps of the GRPO example on a tiny model: the divergence is 0 and the reward rises."""

from __future__ import annotations

import re
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
        import grpo_arithmetic
        import task

        yield grpo, task, grpo_arithmetic
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.nightly
def test_five_steps_on_policy_raise_the_reward(scripts, tmp_path):
    grpo, task, _ = scripts
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


def test_the_plot_is_read_in_grey_and_is_the_same_file_for_the_same_figures(scripts, tmp_path):
    pytest.importorskip("matplotlib")
    _, _, script = scripts
    rewards = {seed: [0.1 * seed + 0.02 * step for step in range(12)] for seed in (0, 1, 2)}
    script.draw(rewards, tmp_path / "reward.png")
    first = (tmp_path / "reward.svg").read_bytes()
    script.draw(rewards, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 1000 and (tmp_path / "reward.svg").read_bytes() == first
    colours = set(re.findall(r"(?:stroke|fill): #(\w{6})", first.decode()))
    assert colours and all(colour[:2] == colour[2:4] == colour[4:] for colour in colours)
    assert len({dashes for _, _, dashes in script.STYLES}) == len({mark for _, mark, _ in script.STYLES}) == 3


def test_another_seed_draws_other_completions(scripts):
    grpo, task, _ = scripts
    asked = []

    class Drawer:
        settings = grpo.Settings(samples=1)

        def roll_out(self, prompts, seed):
            asked.append(seed)
            return grpo.Rollout(["7"], None, None, 0, None)

        def step(self, rollout, worth):
            return grpo.Report(worth[0], 0.0, 0.0, 0.0)

    for seed in (0, 1):
        grpo.train(Drawer(), [[task.Problem("3 + 4 =", 7)]] * 3, lambda text, problem: 1.0, seed=seed)
    assert asked == list(range(6))


def test_the_task_is_the_same_for_a_seed_and_near_misses_are_worth_less(scripts):
    _, task, _ = scripts
    assert task.problems(3, 5) == task.problems(3, 5) != task.problems(4, 5)
    assert len(set(task.all_problems())) == 81 and set(task.problems(0, 50)) <= set(task.all_problems())
    worth = [task.reward(text, 7) for text in (" 7\n", " 8", "12", " seven", "77")]
    assert worth[0] == 1.0 > worth[1] > worth[2] > worth[3] == 0.0 and worth[4] < worth[1]
    assert task.rewards(["a", "b"], [" 7", " 1"], [7, 1]) == [1.0, 1.0]


def test_a_table_has_a_line_for_five_steps_and_a_column_for_each_seed(scripts):
    grpo, _, script = scripts
    reports = [grpo.Report(0.125 * number, 0.0, 0.0, 0.1) for number in range(7)]
    run = script.Run(reports, [float(10 * number) for number in range(7)], 5, 60)
    text = script.table({3: run})
    assert "| 1 to 5 | 0.250 | 0.0e+00 | 0.0e+00 | 40 |\n| 6 to 7 | 0.688 | 0.0e+00 | 0.0e+00 | 60 |" in text
    other = script.Run([report._replace(reward=0.5, divergence=1e-6) for report in reports], [1.0] * 7, 5, 62)
    text = script.table({3: run, 4: other})
    assert "| mean reward, seed 3 | mean reward, seed 4 |" in text
    assert "| 1 to 5 | 0.250 | 0.500 | 1.0e-06 | 0.0e+00 | 40 |" in text
