"""Orders of eviction on workloads that share prefixes, schedulers that are told lengths, and the page made of them."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from jpaged.benchmarks.eviction import output_lengths, page, prefix_modes
from jpaged.benchmarks.eviction.length_tables import length_table, length_verdict, seeds_of
from jpaged.benchmarks.eviction.output_lengths import Quantiles, ToldPolicy, most_held, told_workloads
from jpaged.benchmarks.eviction.workloads import LONG_BLOCK, SharedWorkload, conversations, workloads
from jpaged.benchmarks.serving_sim.hybrid_models import CASES
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE, RECENT_ENGINE
from jpaged.benchmarks.serving_sim.models import OPT_13B
from jpaged.benchmarks.serving_sim.simulation import simulate
from jpaged.benchmarks.serving_sim.workload import Ask, Workload
from jpaged.cli.main import app

ENGINES = [asdict(PAPER_ENGINE), asdict(RECENT_ENGINE)]
LLAMA = next(case.served for case in CASES if case.name == "Llama-3.1-8B")


def ask(arrival: float, tokens: list[int], output: int = 4) -> Ask:
    return Ask(arrival, len(tokens), output, tokens=tuple(tokens))


def encode(text: str) -> list[int]:
    return [sum(word.encode()) for word in text.split()]


def test_a_turn_begins_with_all_that_was_said_and_answered():
    talks = conversations(60, seed=1)
    assert len(talks.asks) == 60
    assert [a.arrival for a in talks.asks] == sorted(a.arrival for a in talks.asks)
    begun = {a.tokens[0]: a for a in talks.asks if 0 not in a.tokens}
    later = [a for a in talks.asks if 0 in a.tokens and a.tokens[0] in begun]
    assert later
    for turn in later:
        first = begun[turn.tokens[0]]
        assert turn.tokens[: first.prompt + first.output] == (*first.tokens, *[0] * first.output)


def test_what_an_endless_pool_would_find_is_counted_in_whole_blocks():
    asks = (ask(0, list(range(40)), 8), ask(1, [*range(32), *range(900, 910)]), ask(2, [*range(40), *[0] * 8, 7]))
    shared, distinct, longest = SharedWorkload("some", "beginnings", asks).sizes()
    assert (shared, longest) == (32 + 48, 53)
    assert distinct == 16 * (3 + 0 + 0)


def test_a_folders_files_make_its_workloads(tmp_path):
    rows = {
        "metagpt-some.jsonl": [{"round": r, "system": "you are", "prompt": "a b c", "output": "d"} for r in (1, 1, 2)],
        "rag-nq.jsonl": [{"question": f"q{i}", "answers": ["a"], "text": f"text {i}"} for i in range(8)],
        "mmlu.jsonl": [{"prefix": f"subject {i}", "questions": [{"q": "x"}, {"q": "y"}]} for i in range(3)],
        "alpaca.jsonl": [{"prompt": "do it", "output": "done"}, {"prompt": "", "output": "nothing"}],
    }
    for name, lines in rows.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (tmp_path / "mooncake-conversation.csv").write_text(
        "arrival_s,prompt_len,output_len,hash_ids\n0,600,5,0-1\n2.5,700,6,0 7\n", encoding="utf-8"
    )
    found = {workload.name: workload for workload in workloads(tmp_path, encode, 40, 0)}
    assert len(found) == 9
    talks = found["Mooncake, conversations"]
    assert [a.arrival for a in talks.asks] == [0.0, 2.5] and talks.block_size == LONG_BLOCK
    assert talks.asks[0].tokens[:512] == talks.asks[1].tokens[:512] != talks.asks[1].tokens[88:600]
    jobs = found["MetaGPT"].asks
    assert len({a.tokens[:2] for a in jobs}) == 1 and len({a.tokens for a in jobs}) == 14
    assert len(found["Alpaca"].asks) == 1
    assert {len(a.tokens[:2]) for a in found["MMLU, 5 shots"].asks} == {2}
    with pytest.raises(ValueError, match="columns"):
        (tmp_path / "mooncake-conversation.csv").write_text("prompt_len,hash_ids\n1,2\n", encoding="utf-8")
        workloads(tmp_path, encode, 40, 0)


def test_every_order_of_eviction_serves_all_and_finds_no_more_than_there_is():
    rng = random.Random(0)
    prefixes = [list(range(1000 * n, 1000 * n + 200)) for n in range(6)]
    asks = [ask(0.2 * i, [*rng.choice(prefixes), *range(10**6 + 100 * i, 10**6 + 100 * i + 30)]) for i in range(60)]
    workload = SharedWorkload("some", "prefixes", tuple(asks))
    shared, _, _ = workload.sizes()
    for eviction in prefix_modes.EVICTIONS:
        found = prefix_modes.measure(workload, LLAMA, 700 * LLAMA.token_bytes, eviction)
        assert 0 < found["hits"] <= shared / sum(a.prompt for a in asks)
        assert found["refused"] == 0 and found["first_token"] > 0


def test_guesses_are_of_outputs_that_were_longer_in_the_prompts_class():
    guess = Quantiles()
    assert guess.expect(100, 0) == 0
    for length in range(1, 101):
        guess.learn(100, length)
        guess.learn(1000, 10 * length)
    assert guess.expect(100, 0) == 80
    assert guess.expect(100, 50) == 90 - 50
    assert guess.expect(1000, 0) == 800
    assert guess.expect(100, 99) > 1, "too few were longer: those of all prompts tell"
    assert guess.expect(100, 10**6) == 0


def test_old_lengths_are_forgotten(monkeypatch):
    monkeypatch.setattr(output_lengths, "MOST_SEEN", 30)
    guess = Quantiles()
    for length in (*[5] * 50, *[9] * 30):
        guess.learn(100, length)
    assert guess._ordered[(100).bit_length()] == [9] * 30


def test_the_most_crowded_moment_is_before_somebody_ends():
    held, lacks = {"a": 10, "b": 20}, {"a": 5, "b": 1}
    assert most_held(["a", "b"], held.__getitem__, lacks.__getitem__) == 32  # b ends: 11 + 21, then a alone: 15
    assert most_held(["a"], held.__getitem__, lacks.__getitem__) == 15
    assert most_held([], held.__getitem__, lacks.__getitem__) == 0


def test_the_oracles_admission_preempts_nobody_and_all_requests_end():
    asks = [Ask(0.0, 400, 500)] * 40
    machine = OPT_13B.machine(PAPER_ENGINE)
    plain = simulate(ToldPolicy(None, "-", 0), machine, asks)
    assert plain.preemptions > 0
    for use in output_lengths.USES:
        told = simulate(ToldPolicy("Oracle", use, 0), machine, asks)
        assert len(told.jobs) == 40
        assert (told.preemptions == 0) == (use != "victims")


def test_hints_and_guesses_serve_all_requests_too():
    asks = Workload("small", ((300, 400), (700, 100), (30, 900))).arrivals(6.0, 150, 0)
    for source in ("quantiles", "hints"):
        assert len(simulate(ToldPolicy(source, "both", 0), OPT_13B.machine(PAPER_ENGINE), asks).jobs) == 150


def row(lru: float, predicted: float, **more) -> dict:
    modes = {"lru": lru, "aligned": lru, "predicted": predicted}
    told = {mode: {"hits": hits, "first_token": 0.5} for mode, hits in modes.items()}
    plain = {"model": "Llama-3.1-8B", "workload": "chats", "kind": "talks", "share": 0.1, "pool_gib": 2.0, "known": 0.6}
    return plain | {"modes": told} | more


def length_row(source: str, use: str, latency: float, seed: int = 0) -> dict:
    plain = {"workload": "ShareGPT", "rate": 2.0, "seed": seed, "requests": 400, "preemptions": 3}
    return plain | {"source": source, "use": use, "latency": latency}


def test_the_verdict_on_a_predictor_follows_from_every_run_of_every_seed():
    plain = [length_row("none", "-", 0.1, seed) for seed in (0, 1)]
    hints = [length_row("hints", "victims", latency, seed) for seed, latency in enumerate((0.09, 0.098))]
    told = " ".join(length_verdict([*plain, *hints]).split())
    assert "saves 5% of the latency in every run of every seed" in told
    assert "Better than nothing on the average are hints for victims (0.94). So the engine has no predictor" in told
    hints[1] |= {"latency": 0.092}
    won = length_verdict([*plain, *hints])
    assert "this holds for hints for victims, which the engine should have" in won and "no predictor" not in won
    assert "| ShareGPT, 2/s | 400 | hints | victims | 91 (90-92) | 0.91 (0.90-0.92) | 3 |" in length_table(
        [*plain, *hints]
    )
    assert seeds_of(plain) == "2 seeds" and seeds_of(plain[:1]) == "one seed"


def test_lengths_are_told_with_several_seeds_and_on_alpaca_where_a_folder_has_it(tmp_path, monkeypatch):
    (tmp_path / "alpaca-x.jsonl").write_text(json.dumps({"prompt": "a b", "output": "c d e"}), encoding="utf-8")
    words = told_workloads(tmp_path, lambda text: len(text.split()))
    assert [workload.name for workload in words] == ["ShareGPT", "Alpaca"]
    assert [workload.name for workload in told_workloads(None, len)] == ["ShareGPT"]
    monkeypatch.setattr(output_lengths, "RATES", {"small": (4.0,)})
    rows = output_lengths.run([Workload("small", ((30, 20), (60, 9)))], 5.0, 7, lambda text: None)
    assert {row["seed"] for row in rows} == {7, 8, 9}
    assert {(row["source"], row["use"]) for row in rows if row["seed"] == 8} >= {("none", "-"), ("hints", "victims")}


def test_the_page_says_where_the_default_loses(tmp_path):
    lengths = [length_row("none", "-", 0.1), length_row("Oracle", "both", 0.08)]
    good = page.page([row(0.4, 0.5), row(0.4, 0.395)], lengths, "jpaged bench eviction")
    assert "| chats (talks) | 2.0 (10%) | 60.0% | 40.0% | 40.0% | 50.0% | 1.25 |" in good
    assert "No workload loses more than 2% of LRU's hits" in good
    assert "| ShareGPT, 2/s | 400 | Oracle | both | 80 | 0.80 |" in good and "both 0.80 (0.80 to 0.80)" in good
    assert "## Where the workloads come from" in good and "| MMLU | `mmlu*.jsonl` |" in good
    bad = page.page([row(0.4, 0.3, workload="talks")], lengths, "jpaged bench eviction")
    assert "loses more than 2% of LRU's hits on talks (Llama-3.1-8B, 2.0 GiB)" in bad
    assert prefix_modes.lost(row(0.0, 0.0), "predicted") == 0.0


def test_the_page_says_where_first_tokens_come_later_by_the_default():
    lengths, late = [length_row("none", "-", 0.1), length_row("Oracle", "both", 0.08)], row(0.4, 0.4, workload="agents")
    late["modes"]["predicted"]["first_token"] = 0.65
    text = page.page([row(0.4, 0.5), late], lengths, "jpaged bench eviction")
    assert "| 0.500 | 0.500 | 0.650 |" in text
    told = " ".join(text.split())
    assert "Its mean first token takes 1.00 to 1.30 times LRU's, more than 2% longer on agents " in told
    assert "agents (Llama-3.1-8B, 2.0 GiB: 0.650 s instead of 0.500)." in told
    assert "on no workload more than 2% longer" in page.page([row(0.4, 0.5)], lengths, "jpaged bench eviction")
    none_ended = row(0.0, 0.0)
    none_ended["modes"]["lru"]["first_token"] = float("inf")
    assert prefix_modes.slower(none_ended, "predicted") == 0.0


def test_the_command_keeps_results_and_writes_a_page_with_two_plots(tmp_path):
    pytest.importorskip("matplotlib")
    kept = tmp_path / "kept.json"
    lengths = [length_row("none", "-", 0.1), length_row("Oracle", "both", 0.08)]
    parts = {"prefixes": [row(0.4, 0.5), row(0.4, 0.5, model="Gemma-3-27B")], "lengths": lengths}
    settings = {"workloads": None, "num_requests": 100, "seconds": 200, "seed": 0, "engines": ENGINES}
    kept.write_text(json.dumps({"settings": settings, "parts": parts}))
    docs = tmp_path / "docs"
    result = CliRunner().invoke(app, ["bench", "eviction", "--results", str(kept), "--docs", str(docs)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in docs.iterdir()} == {"eviction.md", "eviction.png", "eviction.svg"}
    assert "Made by `jpaged bench eviction --docs docs`" in (docs / "eviction.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "7"], "was measured with seed 0, not 7: name another file"),
        (["--num-requests", "50"], "was measured with num_requests 40, not 50"),
        (["--workloads", "."], "was measured with workloads None, not {'some.jsonl': 2}"),
    ],
)
def test_results_of_other_settings_are_refused(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_modes, "run", lambda *_: pytest.fail("measured"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.jsonl").write_text("{}")
    settings = {"workloads": None, "num_requests": 40, "seconds": 200, "seed": 0, "engines": ENGINES}
    (tmp_path / "kept.json").write_text(json.dumps({"settings": settings, "parts": {"prefixes": {}}}))
    command = ["bench", "eviction", "--results", "kept.json", "--num-requests", "40"]
    result = CliRunner().invoke(app, [*command, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_a_place_for_results_is_looked_at_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_modes, "run", lambda *_: pytest.fail("measured"))
    result = CliRunner().invoke(app, ["bench", "eviction", "--results", str(tmp_path / "missing" / "kept.json")])
    assert result.exit_code == 2 and "there is no folder" in result.output
    (tmp_path / "old.json").write_text('{"prefixes": {}}')
    result = CliRunner().invoke(app, ["bench", "eviction", "--results", str(tmp_path / "old.json")])
    assert result.exit_code == 2
    assert "does not say with which settings it was measured" in " ".join(result.output.split())
