"""The benchmark against vLLM's scheduler: equal requests and bytes for both sides, and its sums. No vLLM is needed."""

from __future__ import annotations

import itertools
import sys

import pytest

from jpaged.memory.layout import PoolLayout
from scripts.benchmarks.against_vllm import LOADS, POOLS, Served, Vllm, against_vllm, by_jpaged, case_of, summed
from scripts.benchmarks.shapes import shape_named
from scripts.benchmarks.workloads import Ask

SMALL = shape_named("Llama-3.1-8B", 0.5)

ANSWERS = """
import json, sys
for line in sys.stdin:
    case = json.loads(line)
    if case["match_unit"]:
        print(json.dumps({"error": "ValueError: no such unit"}), flush=True)
        continue
    if case["layout"] != "LBNHC":
        sys.exit(3)
    lengths = [len(tokens) for tokens, _ in case["asks"]]
    answer = {"asked": sum(lengths), "found": 10, "preemptions": 0, "running": [lengths], "held": [1 << 20]}
    print(json.dumps(answer | {"seconds": 0.001, "hits": lengths}), flush=True)
"""


@pytest.fixture
def env(tmp_path):
    """An environment whose interpreter answers as vLLM's half does, with made-up figures."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "answers.py").write_text(ANSWERS)
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'answers.py'}\n")
    python.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("load", LOADS)
def test_a_load_is_the_same_for_a_seed_and_its_prompts_share_beginnings(load):
    asks = LOADS[load](40, 1)
    assert len(asks) == 40 and asks == LOADS[load](40, 1) != LOADS[load](40, 2)
    assert all(len(ask.tokens) == ask.prompt and ask.output > 0 for ask in asks)
    assert any(one.tokens[:400] == other.tokens[:400] for one, other in itertools.combinations(asks, 2))


def test_a_conversation_goes_on_with_its_answer():
    first, *_, last = LOADS["conversations"](4, 0)  # one conversation
    assert last.tokens[: first.prompt + first.output] == (*first.tokens, *[0] * first.output)


@pytest.mark.parametrize("model", POOLS)
def test_both_sides_get_the_same_bytes_for_each_token(model):
    shape, asks = shape_named(model, POOLS[model]), [Ask(0.0, 3, 2, tokens=(5, 6, 7))]
    case = case_of(shape, asks, ram=0.5)
    assert case["asks"] == [[(5, 6, 7), 2]] and case["max_len"] == 5
    assert case["ram_bytes"] * 2 == case["pool_bytes"] == POOLS[model] * 2**30
    kept = [layer for layer in case["layers"] if layer["kind"] != "state"]
    assert sum(layer["number"] * layer["token_bytes"] for layer in kept) == shape.uniform_token_bytes
    assert all(layer["token_bytes"] % 256 == 0 for layer in kept)  # whole heads of vLLM's half
    states = [layer for layer in case["layers"] if layer["kind"] == "state"]
    assert sum(layer["number"] * layer["token_bytes"] for layer in states) == shape.state_bytes


@pytest.mark.parametrize("model", POOLS)
def test_a_pool_of_every_shape_has_pages_that_hold_whole_blocks_without_much_padding(model):
    shape = shape_named(model, POOLS[model])
    layout = PoolLayout.plan(shape.groups(16), int(POOLS[model] * 2**30))
    assert layout.num_pages >= 32 and all(group.padding < 0.05 for group in layout.groups)


def test_a_kind_of_layer_that_vllms_half_lacks_is_named():
    with pytest.raises(ValueError, match=r"Llama-3.2-11B-Vision: vLLM's half knows no CrossAttention"):
        case_of(shape_named("Llama-3.2-11B-Vision"), [Ask(0.0, 1, 1, tokens=(1,))])


def test_this_project_serves_every_request_and_finds_what_was_asked_before():
    asks = [Ask(0.0, 64, 4, tokens=tuple(range(64)))] * 2 + [Ask(0.0, 80, 4, tokens=tuple(range(80)))]
    served = by_jpaged(SMALL, asks, together=1)
    assert (served.asked, served.found) == (208, 48 + 64)
    assert max(map(len, served.running)) == 1 and len(served.running) == len(served.held) == 12
    with pytest.raises(ValueError, match=r"a request of 99999 tokens does not fit 0.5 GiB"):
        by_jpaged(SMALL, [Ask(0.0, 99_999, 1, tokens=tuple(range(99_999)))])


def test_sums_over_loads():
    one = Served(100, 20, 1, [[10, 20], [30]], [1 << 20, 2 << 20], 0.001, [20])
    other = Served(300, 80, 2, [[10]], [1 << 20], 0.003, [80])
    row = summed(SMALL, [one, other])
    assert (row["steps"], row["found"], row["batch"], row["preemptions"]) == (3, 0.25, 4 / 3, 3)
    assert row["held MiB"] == 2 and row["us a step"] == pytest.approx(2000)
    assert row["read / held"] == pytest.approx(70 * 32 * 4096 / (4 << 20))


def test_rows_of_both_sides_and_what_vllm_refuses(env):
    case = against_vllm(env, ["Llama-3.1-8B"], ["questions"], ["vLLM", "jpaged, aligned"], 4, 1)
    rows = list(itertools.islice(case, 3))
    case.close()
    by_system = {row["system"].removeprefix("vLLM, "): row for row in rows}
    assert by_system["jpaged, aligned"]["steps"] > 1 and by_system["vLLM"]["steps"] == 1
    assert by_system["match unit 32"]["refused"] == "ValueError: no such unit"


def test_a_process_that_ends_an_unknown_load_and_a_missing_environment_are_named(env, tmp_path):
    vllm = Vllm(env)
    with pytest.raises(RuntimeError, match="vLLM's process ended with 3"):
        vllm.serve(SMALL, [Ask(0.0, 1, 1, tokens=(1,))], layout="BLNHC")
    vllm.close()
    with pytest.raises(ValueError, match=r"loads=\['chat'\] are none of conversations, articles"):
        list(against_vllm(loads=["chat"]))
    with pytest.raises(ValueError, match="is no environment: there is no bin/python"):
        list(against_vllm(tmp_path / "bin"))
