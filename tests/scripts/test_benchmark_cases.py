"""The cases of scripts/benchmarks: their options, the baselines, and what the papers claim, at small sizes."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from scripts.benchmarks import hybrids, simulate
from scripts.benchmarks.baselines import Buddy, Contiguous, NaivePool, Regions, SmallScheduler, reservations
from scripts.benchmarks.embeddings import sentences_of_questions
from scripts.benchmarks.registry import BENCHMARKS
from scripts.benchmarks.serve_real import Gate
from scripts.benchmarks.shapes import shape_named
from scripts.benchmarks.workloads import Ask, arrivals, chatbot_turns, pairs_of
from scripts.cases import Cases
from scripts.compiled_code.registry import COMPILED


@pytest.mark.parametrize(
    ("cases", "name"), [(cases, name) for cases in (BENCHMARKS, COMPILED) for name in cases.functions]
)
def test_every_case_is_a_function_whose_arguments_are_options(cases, name, capsys):
    with pytest.raises(SystemExit, match="0"):
        cases.main([name, "--help"])
    assert cases.find(name).__doc__.splitlines()[0].split()[0] in capsys.readouterr().out


MODULE = """
from typing import Literal

def plain(number: int = 2, names: list[str] | None = None, *, kind: Literal["plain", "double"] = "plain"):
    "Rows of a kind."
    return [{"name": name, "value": (1 + (kind == "double")) * number / 3, "parts": [1, 2]} for name in names or ["a"]]

def slow(number: int = 2):
    "Rows that take long."
    yield from plain(number, ["a", "b"])
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Two cases of a package of this test."""
    (tmp_path / "own_cases").mkdir()
    (tmp_path / "own_cases" / "numbers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return Cases("own_cases", "Runs a case of a test.", {"plain": "numbers.plain", "slow": "numbers.slow"})


def test_a_case_prints_a_table_and_writes_json(own, tmp_path, capsys):
    own.main(["plain", "--number", "1", "--names", "x", "y", "--json", str(tmp_path / "found.json")])
    printed = capsys.readouterr()
    assert "| x | 0.3333 |" in printed.out and printed.err == ""
    assert json.loads((tmp_path / "found.json").read_text())["rows"][1] == {
        "name": "y",
        "value": 1 / 3,
        "parts": [1, 2],
    }


def test_an_option_of_several_values_may_be_given_again(own, capsys):
    own.main(["plain", "--names", "x", "--names", "y", "z"])
    assert [line[2] for line in capsys.readouterr().out.splitlines()[2:]] == ["x", "y", "z"]


def test_rows_of_a_long_case_are_printed_as_they_come(own, capsys):
    own.main(["slow"])
    assert capsys.readouterr().err == "a 0.6667\nb 0.6667\n"


def test_a_value_that_is_none_of_several_is_refused(own, capsys):
    own.main(["plain", "--kind", "double"])
    assert "| a | 1.333 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        own.main(["plain", "--kind", "triple"])
    assert "invalid choice: 'triple'" in capsys.readouterr().err


def test_a_buddy_allocator_merges_what_comes_back():
    buddy = Buddy(96)
    whole = buddy.take(64)
    small = [buddy.take(8) for _ in range(4)]
    assert buddy.take(1) is None
    for start, order in small:
        buddy.give(start, order)
    assert buddy.take(32) is not None and not buddy.fits(65)
    assert whole == (0, 6)


def test_reservations_are_those_of_the_paper():
    known = reservations(2048)
    assert [known[name](100, 65) for name in ("Orca (Oracle)", "Orca (Pow2)", "Orca (Max)")] == [165, 228, 2048]


def test_long_prompts_make_all_of_orcas_reservations_alike():
    turns, known = chatbot_turns(400, 256, seed=1), reservations(256)
    assert turns == chatbot_turns(400, 256, seed=1) and max(max(turn) for turn in turns) == 128
    whole = [turn for turn in turns if turn[0] == 128]
    assert len(whole) > 200, "most prompts are cut"
    for name in ("Orca (Oracle)", "Orca (Pow2)", "Orca (Max)"):
        assert {Buddy(1024).take(known[name](*turn)) for turn in whole} == {(0, 8)}, "half of a region is the answer's"


def test_a_batch_of_fastertransformer_ends_before_another_begins():
    memory = Contiguous(Regions(300, 100), lambda prompt, output: 100, 1)
    server = SmallScheduler("one", memory, max_num_seqs=2, budget=64, request_level=True)
    for key, output in enumerate((2, 4, 2)):
        assert server.add(key, Ask(0.0, 8, output))
    steps = [server.step() for _ in range(6)]
    assert [step.ended for step in steps] == [[], [], [], [0, 1], [], [2]]
    assert server.step() is None and memory.held_bytes() == 0


def test_the_newest_is_preempted_and_everything_ends():
    memory = hybrids.build("GCD page", shape_named("Llama-3.1-8B", 0.02), 64).memory
    server = SmallScheduler("small", memory, max_num_seqs=8, budget=256)
    for key in range(4):
        assert server.add(key, Ask(0.0, 48, 40))
    ended = []
    while (step := server.step()) is not None:
        ended += step.ended
    assert sorted(ended) == [0, 1, 2, 3] and server.preemptions and memory.held_bytes() == 0


def test_naive_placement_keeps_a_page_until_all_of_its_blocks_are_back():
    shape = shape_named("Gemma-3-27B")
    pool = NaivePool(shape.groups(), 1 << 30)
    tokens = [pool.take(0) for _ in range(3)]
    held = pool.held_bytes()
    pool.give(0, tokens[0])
    assert pool.held_bytes() in (held, held - held // len(set(tokens)))
    for token in tokens[1:]:
        pool.give(0, token)
    assert pool.held_bytes() == 0


def test_a_seed_draws_the_same_lengths_at_every_rate():
    slow, fast = (arrivals(pairs_of(None), rate, 20, seed=3) for rate in (1.0, 4.0))
    assert [(ask.prompt, ask.output) for ask in slow] == [(ask.prompt, ask.output) for ask in fast]
    assert slow[-1].arrival == pytest.approx(4 * fast[-1].arrival)
    assert {ask.arrival for ask in arrivals(pairs_of(None), math.inf, 5, 0)} == {0.0}


def test_paged_memory_holds_more_tokens_than_any_orca():
    rows = {row["system"]: row for row in simulate.memory(requests=120)}
    assert rows["jpaged"]["tokens"] > 0.85 > 0.5 > rows["Orca (Oracle)"]["tokens"] > rows["Orca (Max)"]["tokens"]


def test_one_page_size_wastes_what_the_jenga_paper_says():
    for row in hybrids.waste(["Gemma-2-9B", "Llama-3.2-11B-Vision"]):
        assert row["largest page"] == pytest.approx(row["largest page in the paper"], abs=0.001)
        assert row["jpaged"] < 0.01


def test_every_way_to_share_a_pool_serves_a_hybrid():
    rows = hybrids.hybrids(["Ministral-8B"], requests=3, mean_prompt=600, mean_output=30)
    assert [row["system"] for row in rows] == list(hybrids.SYSTEMS)
    assert all(row["requests/s"] > 0 and row["requests"] == 3 for row in rows)


def test_an_unknown_system_is_named():
    with pytest.raises(ValueError, match="name='vLLM' is not one of"):
        hybrids.build("vLLM", shape_named("Llama-3.1-8B"), 100)


def test_a_gate_admits_in_order_and_only_what_has_a_region():
    async def run() -> list[str]:
        gate, said = Gate(Buddy(64), lambda prompt, output: prompt + output), []

        async def one(name: str, tokens: int) -> None:
            region = await gate.enter(tokens, 0)
            said.append(f"{name} in")
            await asyncio.sleep(0.01)
            said.append(f"{name} out")
            gate.leave(region)

        await asyncio.gather(one("a", 40), one("b", 30), one("c", 2))
        with pytest.raises(ValueError, match=r"60 \+ 5 tokens reserves 65 slots"):
            await gate.enter(60, 5)
        return said

    said = asyncio.run(run())
    assert said[:3] == ["a in", "a out", "b in"] and len(said) == 6


def test_sentences_to_embed_are_whole_distinct_and_as_many_as_asked():
    found = sentences_of_questions(256)
    assert len(found) == 256 and len(set(found)) > 250 and min(map(len, found)) > 20
    assert sentences_of_questions(3) == found[:3] and len(sentences_of_questions(5000)) == 5000
