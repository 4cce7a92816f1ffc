"""Conversations of several turns: what is drawn, and what a run's figures count."""

from __future__ import annotations

import json
import sys

import pytest

from scripts.benchmarks.several_turns import PEER, several_turns, summed, talks_of


def test_conversations_are_drawn_alike_by_a_seed_and_within_the_bounds():
    talks = talks_of(3, 4, (5, 9), 50, seed=1)
    assert talks == talks_of(3, 4, (5, 9), 50, seed=1) != talks_of(3, 4, (5, 9), 50, seed=2)
    assert [len(talk) for talk in talks] == [4, 4, 4]
    assert all(5 <= len(turn) <= 9 and all(3 <= token < 50 for token in turn) for talk in talks for turn in talk)


def test_figures_leave_the_first_turn_out():
    first = {"seconds": 9.0, "prompt": 100, "found": 0, "first": [5.0, 5.0]}
    later = {"seconds": 2.0, "prompt": 200, "found": 150, "first": [0.5, 1.5]}
    assert summed([first, later, later], answer=8) == {"found": 0.75, "first token, s": 1.0, "tokens/s": 8.0}


def test_turns_go_on_from_the_answers(monkeypatch):
    monkeypatch.syspath_prepend(str(PEER.parent))
    monkeypatch.delitem(sys.modules, PEER.stem, raising=False)
    served = __import__(PEER.stem).served
    asked = []

    def run(prompts):
        asked.append([list(prompt) for prompt in prompts])
        return [([prompt[-1] + 1], len(prompt) // 2, 0.1) for prompt in prompts]

    turns = served(run, [[[1], [2]], [[5], [6]]])
    assert asked == [[[1], [5]], [[1, 2, 2], [5, 6, 6]]]
    assert [(turn["prompt"], turn["found"], turn["answers"]) for turn in turns] == [
        (2, 0, [[2], [6]]),
        (6, 2, [[3], [7]]),
    ]
    assert json.dumps(turns)


def test_a_folder_without_an_environment_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no environment"):
        next(several_turns(tmp_path, env=tmp_path))
