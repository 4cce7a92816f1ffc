"""Two replicas that swap and run with adapters generate what one does with room for all."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from features_of_replicas import PLACES
from lora_checkpoints import save_all
from on_devices import printed_on_devices


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Returns what the program prints, by what it is asked for."""
    model, adapters = save_all("llama", tmp_path_factory.mktemp("lora"))

    @cache
    def ask(what):
        folder = tmp_path_factory.mktemp("states")
        script = Path(__file__).with_name("features_of_replicas.py")
        return printed_on_devices(4, script, model, json.dumps(adapters), folder, what)

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
