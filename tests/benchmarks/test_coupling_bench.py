"""How far drafts are from the best coupling: the bound, the race, and what was drawn."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from jpaged import LLM, SamplingParams
from jpaged.benchmarks.coupling import measure, race_agreement
from jpaged.loading import load_model

rates = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=12).filter(lambda p: sum(p) > 0.1)


@given(st.data(), rates)
def test_the_race_agrees_as_its_formula_says_and_never_more_than_the_bound(data, p):
    q = data.draw(st.lists(st.floats(0.0, 1.0), min_size=len(p), max_size=len(p)).filter(lambda q: sum(q) > 0.1))
    p, q = (np.array(x) / sum(x) for x in (p, q))
    both = (p > 1e-9) & (q > 1e-9)
    p, q = (np.where((x > 1e-9), x, 0.0) for x in (p, q))
    wanted = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in np.flatnonzero(both))
    assert race_agreement(p, q) == pytest.approx(wanted, abs=1e-9)
    assert race_agreement(p, q) <= np.minimum(p, q).sum() + 1e-9


def test_first_layers_are_measured_behind_the_models_own_tokens(tmp_path):
    make_checkpoint("llama", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=30, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (4, 9)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    loaded = load_model(tmp_path, dtype="float32")
    found = measure(loaded, 2, outputs, temperature=0.7, seed=5)
    assert found.places == 60
    assert 0 < found.race < found.bound < 1
    assert abs(found.kept - found.race) < 4 * (0.25 / 60) ** 0.5
    assert "at most" in str(found) and f"{found.bound:.1%}" in str(found)
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        measure(loaded, 2, outputs, temperature=0, seed=5)
    with pytest.raises(ValueError, match="layers=3 must be below the model's 3"):
        measure(loaded, 3, outputs, temperature=1.0, seed=5)
