"""Estimated rates of published loads: a run is gone through step by step."""

from __future__ import annotations

import pytest

from scripts.compiled_code.served_loads import Load, fitted, host_seconds, published, serve
from scripts.compiled_code.step_models import MODELS

LOAD = Load("", "", "", 100, 10, 4, 12, 64, 0.0, 0.0, "")


def test_all_prompts_and_answers_are_gone_through():
    steps = []
    rate, step = serve(LOAD, lambda decodes, keys, prompts: steps.append((decodes, keys, prompts)) or 0.5)
    assert sum(prompts.tokens for _, _, prompts in steps if prompts) == 12 * 100
    assert sum(decodes for decodes, _, _ in steps) == 12 * 9  # a prompt's last step has the first token
    assert rate == pytest.approx(12 * 10 / (0.5 * len(steps)))
    assert step == pytest.approx(0.5)


def test_a_step_has_no_more_tokens_and_no_more_sequences_than_the_run_had():
    def seconds(decodes, keys, prompts):
        waiting = 0 if prompts is None else len(prompts.spans)
        assert decodes + waiting <= LOAD.at_once
        assert decodes + (0 if prompts is None else prompts.tokens) <= LOAD.chunk
        assert decodes == 0 or 101 <= keys <= 109
        return 1.0

    serve(LOAD, seconds)


def test_a_prompt_makes_those_that_decode_wait():
    _, alone = serve(LOAD, lambda decodes, keys, prompts: 1.0)
    _, waiting = serve(LOAD, lambda decodes, keys, prompts: 3.0 if prompts else 1.0)
    assert alone == pytest.approx(1) and 1 < waiting < 3


def test_published_runs_are_of_known_models_and_agree_with_themselves():
    for load in published():
        assert load.model in MODELS and load.device in ("v6e-4", "tpu7x-8") and load.source
        assert load.tokens_per_second < load.at_once / load.step * 1e3


def test_the_host_takes_as_long_as_its_docstring_says():
    assert host_seconds(128, 1) == pytest.approx(1.87e-3, rel=0.01)
    assert host_seconds(128, 8) == pytest.approx(2.14e-3, rel=0.01)
    assert host_seconds(256, 1) == pytest.approx(2.79e-3, rel=0.01)


def test_a_step_and_a_sequence_have_times_besides_the_estimate():
    loads = [(4.0, 8), (6.0, 8), (5.0, 64), (12.0, 256), (20.0, 32)]
    rows = [{"engine": "x", "estimate ms": ms, "at once": n, "published ms": 1.25 * ms + 2 + n / 20} for ms, n in loads]
    text = fitted([*rows, {"engine": "y", "estimate ms": 1, "at once": 1, "published ms": 99}], "x")
    assert text == "published ms = 1.25 x estimate + 2.0 ms + 0.050 ms a sequence, at most 0.0 ms off in 5 rows"
