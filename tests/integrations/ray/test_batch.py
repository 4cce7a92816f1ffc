"""Ray Data's workers answer as one engine does, and a column that is missing is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from live_server import SETTINGS

from jpaged import SamplingParams
from jpaged.integrations.ray.batch import Generator, generate

ENGINE = SETTINGS | {"kv_cache_memory_bytes": 2**23}
PARAMS = {"max_tokens": 6, "temperature": 0.7, "ignore_eos": True}
PROMPTS = [f"the cab {i}" for i in range(12)]
SCRIPT = Path(__file__).parents[3] / "scripts" / "ray" / "batch.py"


def tokens_of_one_engine(llm, **changes):
    params = [SamplingParams(**(PARAMS | {"seed": i} | changes)) for i in range(len(PROMPTS))]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_a_batch_gets_its_answers_as_columns(tiny_folder, tiny_llm):
    answer = Generator(tiny_folder, ENGINE, PARAMS, seed="number")
    batch = {"prompt": np.asarray(PROMPTS, object), "number": np.arange(len(PROMPTS))}
    found = answer(batch)
    assert [list(tokens) for tokens in found["token_ids"]] == tokens_of_one_engine(tiny_llm)
    assert list(found["finish_reason"]) == ["length"] * len(PROMPTS)
    assert found["prompt"] is batch["prompt"] and all(isinstance(text, str) for text in found["text"])
    tokens = np.asarray([tiny_llm.tokenizer.encode(prompt) for prompt in PROMPTS[:2]], object)
    again = answer({"prompt": tokens, "number": np.arange(2)})
    assert [list(row) for row in again["token_ids"]] == [list(row) for row in found["token_ids"][:2]]
    with pytest.raises(ValueError, match=r"no column 'number'; it has \['prompt'\]"):
        answer({"prompt": batch["prompt"]})


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"batch_size": 0}])
def test_numbers_are_checked_before_anything_starts(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        generate(None, "m", **wrong)


@pytest.mark.nightly
def test_two_workers_give_the_tokens_of_one_engine(tiny_folder, tiny_llm):
    from local_cluster import start_ray

    ray = start_ray(num_cpus=4)
    try:
        rows = ray.data.from_items([{"prompt": prompt, "number": i} for i, prompt in enumerate(PROMPTS)])
        answered = generate(
            rows.repartition(4), tiny_folder, engine=ENGINE, params=PARAMS, seed="number", workers=2, batch_size=3
        )
        found = sorted(answered.take_all(), key=lambda row: row["number"])
    finally:
        ray.shutdown()
    assert [list(row["token_ids"]) for row in found] == tokens_of_one_engine(tiny_llm)


@pytest.mark.nightly
def test_the_script_answers_a_file(tiny_folder, tiny_llm, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "number": i}) + "\n" for i, prompt in enumerate(PROMPTS)))
    command = [sys.executable, SCRIPT, file, tmp_path / "answers", "--model", tiny_folder, "--max-tokens", "6"]
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    options = ["--engine", json.dumps(ENGINE)]
    done = subprocess.run([*map(str, command), *options], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "12 answers" in done.stdout
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(tmp_path / "answers").to_pylist()
    found = {row["number"]: list(row["token_ids"]) for row in rows}
    expected = tokens_of_one_engine(tiny_llm, temperature=0.0, ignore_eos=False)
    assert [found[i] for i in range(len(PROMPTS))] == expected
