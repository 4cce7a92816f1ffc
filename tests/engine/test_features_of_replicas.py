"""Two replicas that swap and run with adapters generate what one does with room for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from features_of_replicas import PLACES
from lora_checkpoints import save_all
from test_data_parallel import FOUR_DEVICES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Returns what the program prints, by what it is asked for."""
    model, adapters = save_all("llama", tmp_path_factory.mktemp("lora"))

    @cache
    def ask(what):
        folder = tmp_path_factory.mktemp("states")
        script = str(HERE / "features_of_replicas.py")
        command = [sys.executable, script, model, json.dumps(adapters), str(folder), what]
        done = subprocess.run(command, env=os.environ | FOUR_DEVICES, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask


@pytest.fixture
def found(asked):
    return asked("tokens")


def test_swapping_and_adapters_change_no_token(found):
    assert found["two"] == found["one"]
    assert len(set(map(str, found["one"]["tokens"][:6]))) == 6
    assert min(found["swaps"]) > 0 and found["loads"] >= 4, "each replica loads its own adapters"


def test_a_replica_swaps_while_the_other_one_is_idle(found):
    assert found["alone"] == found["one"]["tokens"][::2]


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_in_any_work_or_between_the_calls_changes_no_later_token(asked, place):
    found = asked("failures")
    for after in (False, True):
        raised, tokens = found["failed"][f"{place} {after}"]
        assert raised == [place], "the load is to come there"
        assert tokens == found["one"]["mixed"]


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["states", "adapters' states"])
@pytest.mark.parametrize("state", ["1 to 1", "1 to 2", "2 to 1", "2 to 2"])
def test_a_saved_state_goes_on_on_any_number_of_replicas(asked, state, what):
    found = asked(what)
    saved = found["saved"][state]
    assert saved["tokens"] == found["one"]["tokens"]
    swapped, kept = saved["kept"]
    assert swapped > 0 and (kept == swapped or state[0] != state[-1] or what != "states")
