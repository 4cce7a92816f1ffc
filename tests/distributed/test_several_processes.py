"""Several processes as several hosts: the tokens of one, and an end with a reason when one of them dies."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from generate import NUM_TOKENS, prompts
from greedy_reference import torch_greedy
from late_draws import POINTS
from processes import finish, start
from tiny_chat_model import byte_level_tokenizer

SECONDS = 600
"""Seconds a run may take on a busy machine."""
LIMIT = 60
"""Seconds after a death in which a run has to end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    byte_level_tokenizer().save_pretrained(folder)
    return folder, make_checkpoint("llama", folder)


def answers(count: int, task: str, folder: Path, *, devices: int = 2):
    """Return what process 0 printed; the others must have ended in peace without printing any."""
    first, *others = finish(start(count, task, folder, devices=devices), SECONDS)
    assert first.status == 0, first.errors
    for other in others:
        assert other.status == 0, other.errors
        assert "[[" not in other.output, "only process 0 goes on after LLM()"
    return json.loads(next(line for line in first.output.splitlines() if line[:1] in "[{" and "Gloo" not in line))


def test_two_processes_generate_what_one_does_in_every_way(model):
    folder, _ = model
    alone = answers(1, "everything", folder, devices=4)
    together = answers(2, "everything", folder)
    assert together == alone
    assert together["swaps"] > 0 and len(together["streamed"]) == 5
    assert together["recompiles"] == 1, "warm-up leaves prompt_logprobs to whoever asks for them"
    assert together["prompt_logprobs"] == [len(prompt) for prompt in prompts()]
    assert len(together["interrupted"]) == 4 * len(POINTS)
    for name, tokens in together["interrupted"].items():
        assert tokens == together["late"], name


@pytest.mark.nightly
def test_four_processes_generate_the_tokens_of_transformers_in_deterministic_steps(model):
    folder, torch_model = model
    expected = torch_greedy(torch_model, prompts(), NUM_TOKENS)
    found = answers(4, "deterministic", folder)
    assert sum(reference.certain for reference in expected) >= 0.95 * NUM_TOKENS * len(expected)
    for tokens, reference in zip(found, expected, strict=True):
        assert tokens[: reference.certain] == reference.tokens[: reference.certain]


@pytest.mark.nightly
def test_two_processes_cut_prompts_down_as_one_does(model):
    folder, _ = model
    alone = answers(1, "budgeted", folder, devices=4)
    assert answers(2, "budgeted", folder) == alone
    assert len(alone) == len(prompts())


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_killed_process_ends_the_run_with_its_name(model, victim):
    folder, _ = model
    processes = start(2, "endless", folder)
    while "running" not in (line := processes[0].stdout.readline()):
        assert line, processes[0].communicate()
    processes[victim].send_signal(signal.SIGKILL)
    died = time.monotonic()
    ended = finish(processes, LIMIT)
    assert time.monotonic() - died < LIMIT
    survivor = ended[1 - victim]
    assert survivor.status not in (0, -signal.SIGKILL)
    assert f"ProcessLost: process {victim} on 127.0.0.1 is gone" in survivor.errors


def test_processes_with_other_settings_are_told_both(model):
    folder, _ = model
    for ended in finish(start(2, "disagreeing", folder), SECONDS):
        assert ended.status == 1
        assert "ValueError: process" in ended.errors and "seed=0" in ended.errors and "seed=1" in ended.errors
