"""A process that is killed at any moment loses nothing: another one gives the rest of the answers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from greedy_reference import random_prompts
from served_until_killed import SETTINGS, parameters
from tiny_chat_model import make_chat_model

from jpaged import LLM

PROMPTS = random_prompts(lengths=[3 + 7 * i % 41 for i in range(40)])


@pytest.mark.nightly  # by day a server is killed, in tests/server/test_killed.py
@pytest.mark.parametrize("kills", [2, 30])
def test_every_answer_is_that_of_an_undisturbed_run(tmp_path, kills):
    model = tmp_path / "model"
    model.mkdir()
    make_chat_model(model)
    pool_bytes = 24 * LLM(str(model), **SETTINGS).memory_report().page_bytes
    llm = LLM(str(model), kv_cache_memory_bytes=pool_bytes, **SETTINGS)
    expected = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        [parameters(number) for number in range(len(PROMPTS))],
        use_tqdm=False,
    )
    requests, answers = tmp_path / "requests.json", tmp_path / "answers.jsonl"
    requests.write_text(json.dumps(PROMPTS))
    command = [sys.executable, str(Path(__file__).parent / "served_until_killed.py")]
    command += [str(model), str(tmp_path / "state"), str(answers), str(requests), str(pool_bytes)]
    rng, restored, rounds = random.Random(kills), 0, 0
    while True:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                ready = process.stdout.readline().split()
                assert ready[:1] == ["ready"], process.stderr.read()
                restored += int(ready[1])
                if rounds == kills:
                    last = process.stdout.readline().split()
                    assert last == ["leaked", "0", "0"], process.stderr.read()
                    break
                if rounds % 2 == 0:  # else it may be before the first save, or in the middle of it
                    wait_for_another_save(tmp_path / "state")
                time.sleep(rng.uniform(0, 0.5))
            finally:
                process.kill()
        rounds += 1
    found = dict(json.loads(line) for line in answers.read_text().splitlines() if line.endswith("]"))
    assert restored > 10, "there was nothing to go on with"
    assert found == {
        f"request-{number}": [one.token_ids for one in output.outputs] for number, output in enumerate(expected)
    }


def wait_for_another_save(state):
    def newest():
        return max((int(path.name) for path in state.glob("[0-9]*") if path.name.isdecimal()), default=0)

    before, start = newest(), time.monotonic()
    while newest() == before:
        assert time.monotonic() - start < 60, "no save for a minute"
        time.sleep(0.01)
