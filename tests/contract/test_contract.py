"""The promises of version 0.2.0 hold: tokens, flags, paths, and the files that it wrote."""

from __future__ import annotations

import difflib
import json
import shutil
from pathlib import Path

import golden_runs
import numpy as np
import pytest
import surfaces
from on_devices import printed_on_devices

from jpaged import LLM, SamplingParams

HERE = Path(__file__).parent
WRITTEN = golden_runs.WRITTEN
GOLDEN = json.loads((WRITTEN / "golden_tokens.json").read_text())


@pytest.mark.parametrize("name", golden_runs.RUNS)
def test_tokens_are_those_of_0_2_0(name):
    assert golden_runs.RUNS[name]() == GOLDEN[name]


def test_tokens_over_several_devices_are_those_of_0_2_0():
    names = list(golden_runs.ON_DEVICES)
    found = printed_on_devices(8, HERE / "golden_runs.py", *names)
    assert found == {name: GOLDEN[name] for name in names}


@pytest.mark.parametrize("surface", ["flags", "routes"])
def test_no_flag_and_no_path_changed_unannounced(surface):
    kept = (HERE / f"{surface}.txt").read_text(encoding="utf-8")
    found = getattr(surfaces, surface)()
    changes = "\n".join(difflib.unified_diff(kept.splitlines(), found.splitlines(), lineterm="", n=0))
    assert not changes, f"{changes}\n\nIf that is meant: python tests/contract/surfaces.py --write, and CHANGELOG.md."


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state of two requests in the middle of their answers, which names the model where it lies today."""
    folder = tmp_path / "state"
    shutil.copytree(WRITTEN / "state", folder)
    return folder


def test_a_saved_state_of_0_2_0_goes_on_with_the_tokens_that_it_gave_there(state):
    llm = LLM.restore_state(state, model=golden_runs.LLAMA)
    outputs = sorted(llm.resume(use_tqdm=False), key=lambda output: len(output.prompt_token_ids))
    found = [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
    assert found == json.loads((WRITTEN / "state_answers.json").read_text())


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_quantised_checkpoint_of_0_2_0_holds_the_weights_that_quantising_gives_today(form):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    outputs = [
        LLM(source, quantization=asked, **golden_runs.SMALL).generate(golden_runs.PROMPTS, params, use_tqdm=False)
        for source, asked in ((str(WRITTEN / f"checkpoint_{form}"), None), (golden_runs.LLAMA, form))
    ]
    assert golden_runs.answers(outputs[0]) == golden_runs.answers(outputs[1])
    first, second = ([o.outputs[0].cumulative_logprob for o in batch] for batch in outputs)
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-5)


def test_compiled_programs_of_0_2_0_are_refused_by_what_differs():
    settings = golden_runs.SMALL
    with pytest.raises(ValueError, match=r"was compiled for \S+="):
        LLM(golden_runs.LLAMA, compiled_programs=str(WRITTEN / "programs"), **settings)
