"""Texts and stops as transformers and vLLM have them, pinned by scripts/pin_text_cases.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kinds_of_tokenizers import cached

from jpaged.sampling_params import SamplingParams
from jpaged.text.detokenizer import Detokenizer, IncrementalDecoder

CASES = json.loads((Path(__file__).parent / "data" / "text_cases.json").read_text())


def made(case):
    """Return the outcome of a case."""
    names = ("stop", "min_tokens", "include_stop_str_in_output")
    params = SamplingParams(max_tokens=1000, **{name: case[name] for name in names})
    detokenizer, found, count = Detokenizer(cached("demo"), params, case["prompt"]), None, 0
    while found is None and count < len(case["output"]):
        found = detokenizer.push([case["output"][count]])
        count += 1
    if found is None:
        found = detokenizer.finish()
    return {"text": detokenizer.text, "num_tokens": count, "stop_reason": found}


@pytest.mark.parametrize("number", range(0, len(CASES), 20))
def test_a_sequence_ends_where_and_with_the_text_that_is_pinned(number):
    for case in CASES[number : number + 20]:
        assert made(case) == case["expected"], case


def test_text_that_is_made_at_once_is_the_same():
    for case in CASES:
        if case["expected"]["stop_reason"] is None:
            text = IncrementalDecoder(cached("demo"), prompt=case["prompt"]).whole(case["output"])
            assert text == case["expected"]["text"]
