"""The page of serving over time: tables and sentences follow from the figures, and its command from the options."""

from __future__ import annotations

import math
import re

import pytest
from serving_real_rows import made

from jpaged.benchmarks.serving_real.experiments import curve, finite
from jpaged.benchmarks.serving_real.host import RANDOM
from jpaged.benchmarks.serving_real.page import page
from jpaged.benchmarks.serving_real.policies import MAX_OF_TWICE, POLICIES
from jpaged.benchmarks.serving_real.verdicts import DEFAULT, against_lru, ahead, goals, lengths
from jpaged.benchmarks.serving_real.workload import KINDS
from jpaged.benchmarks.serving_sim.hybrid_policies import LARGEST
from jpaged.benchmarks.serving_sim.policies import FASTER, MAX, ORACLE, PAGED
from jpaged.cli.page_command import page_command


def results():
    def system(rates, values):
        runs = [
            made(rate, seed, value, share)
            for rate, value, share in zip(rates, values, (0.5, 1.5), strict=True)
            for seed in (0, 1, 2)
        ]
        return {"saturation": rates[1]} | {"runs": runs} | curve("x", runs, 0.2)

    systems = {PAGED: system((2.0, 6.0), (0.1, 0.4)), ORACLE: system((2.0, 5.0), (0.1, 0.4))}
    systems[MAX] = system((0.5, 1.5), (0.1, math.inf))
    load = {"model": "demo", "says": "", "alone": 0.04, "limit": 0.2, "systems": systems}
    hybrid = load | {
        "model": RANDOM,
        "says": "12 layers.",
        "systems": {PAGED: systems[PAGED], LARGEST: systems[ORACLE]},
    }
    ways = [made(2.0, seed, 0.1, policy=name) for name in ("one way", "another") for seed in (0, 1, 2)]
    engines = [made(3.0, 0, 0.1, engine=PAGED), made(3.0, 0, 0.3, engine="vllm"), made(3.0, 0, 0.05, engine="openvino")]
    settings = {
        "quick": False,
        "shares": KINDS,
        "sources": {"chat": "Alpaca's prompts"},
        "prompt": 384,
        "output": 128,
        "pool_tokens": 2048,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "step_tokens": 512,
        "seconds": 6.0,
        "rates": (0.5, 1.5),
        "seeds": (0, 1, 2),
        "batch": 24,
        "slower": 5.0,
    }
    return {
        "models": [load, hybrid],
        "settings": settings,
        "mechanisms": {"model": "demo", "chunking": ways, "preemption": ways, "eviction": ways},
        "peers": {"saturation": {PAGED: 4.0, "vllm": 3.0, "openvino": 2.0}, "rate": 3.2, "runs": engines},
    }


def test_the_page_is_written_whole_from_the_figures():
    text = page(finite(results()), "jpaged bench serving --docs docs", "2 cores of a machine")
    assert text.startswith("# Serving over time, measured\n")
    assert "`jpaged bench serving --docs docs`\non 2 cores of a machine" in text
    for heading in ("## demo: latency", "## A Gemma-3-shaped", "### Chunks", "### The way back", "## Against other"):
        assert heading in text
    assert "| jpaged | 6.00 | 3.46 |  |" in text and "| Orca (Oracle) | 5.00 | 3.16 | 1.10 |" in text
    assert "a pool of 2,048 tokens" in text and "(Max) runs 2\n  at once" in text and "3 seeds" in text
    assert "which Orca (Max) reserves a region of 1,024" in " ".join(text.split())
    assert "Percentiles of a run's requests, of which there are 5 at the least, are not steady" in text
    assert "2 times Orca (Max)'s rate is reached" in text and "1.3 times Orca (Oracle)'s rate is not reached" in text
    assert "random weights: latency against rate\n\n12 layers.\n\n![" in text
    assert "\\* Requests were cut off" in text and "In steps of 128 tokens" in text
    assert "jpaged's p99 of whole answers, 0.20 s, is below vllm's (0.60 s) and above openvino's (0.10 s)" in text
    assert "The goal, to be below all of them, is not reached." in text
    assert "is 0.80 of the best one's own batch rate" in text
    assert "it is 0.80 of jpaged's, 1.07 of vllm's, 1.60 of openvino's" in text
    assert "A static split and the GCD page are not here" in text and "| HumanEval | `humaneval*.jsonl` |" in text
    for name in (PAGED, LARGEST, ORACLE, MAX):
        assert f"- **{name}**: " in text
    assert "{" not in text, "every blank is filled"


def test_how_long_requests_are_beside_what_is_reserved_is_told_with_the_papers():
    load = results()["models"][0]
    rows = load["systems"][PAGED]["runs"]
    for row in rows:
        row |= {"completed": 2, "prompt_tokens": 300, "output_tokens": 100}
    rows[0] |= {"completed": 0, "prompt_tokens": 0, "output_tokens": 0}
    assert "has 200 tokens, which is 0.39 of the longest, for which Orca (Max)" in lengths(load, 512)
    assert "have 499, 0.24 of 2,048" in lengths(load, 512)
    assert MAX_OF_TWICE not in lengths(load, 512)
    load["systems"][MAX_OF_TWICE] = load["systems"][MAX]
    assert "for which Orca (Max) reserves, and 0.20 of that of Orca (Max), twice as long. ShareGPT" in lengths(
        load, 512
    )
    del load["systems"][MAX]
    assert lengths(load, 512) == ""


def test_a_goal_against_other_engines_is_reached_where_none_is_faster():
    found = results()["peers"]
    del found["saturation"]["openvino"]
    found["runs"] = found["runs"][:2]
    assert "The goal, to be below all of them, is reached." in ahead(found)


def test_the_default_order_of_eviction_is_told_beside_lru():
    def run(policy, seed, mean, cached):
        return {"policy": policy, "seed": seed, "normalised": {"mean": mean, "all": True}} | {
            "cached": cached,
            "prompt_tokens": 100,
        }

    rows = [run("lru", 0, 0.1, 40), run(DEFAULT, 0, 0.09, 50), run("lru", 1, 0.1, 40), run(DEFAULT, 1, 0.1, 60)]
    told = against_lru(rows)
    assert "takes 0.95 (0.90-1.00) times as long a token" in told and "55 % of the prompts' tokens against 40 %" in told
    assert against_lru(rows[:1]) == ""


def test_batches_and_reservations_of_the_longest_are_told_to_be_alike_where_one_region_fits():
    found = results()
    systems = found["models"][0]["systems"]
    systems[FASTER] = systems[MAX]
    assert "let in the same ones" not in page(finite(found), "x", "y")
    found["settings"]["pool_tokens"] = 1024
    text = page(finite(found), "x", "y")
    assert "FasterTransformer and Orca (Max) let in the same ones" in text


def test_a_rate_that_is_known_from_below_only_decides_no_goal():
    found = results()
    systems = found["models"][0]["systems"]
    systems[MAX]["is_least"] = True
    text = page(finite(found), "x", "y")
    assert "whether 2 times Orca (Max)'s rate is reached is not known" in text
    assert re.search(r"\\| Orca \\(Max\\) \\| 1\\.50 \\| at least [0-9.]+ \\|  \\|", text)
    systems[PAGED]["is_least"] = True
    text = page(finite(found), "x", "y")
    assert "1.3 times Orca (Oracle)'s rate is not known (at least 1.10)" in text
    assert "| Orca (Oracle) | 5.00 | 3.16 | at least 1.10 |" in text


def test_a_goal_says_of_how_many_seeds_its_ratio_is():
    found = results()
    assert "seeds, as" not in page(finite(found), "x", "y")
    found["models"][0]["systems"][ORACLE]["sustained_by_seed"][1] = 0.0
    text = page(finite(found), "x", "y")
    assert (
        "1.3 times Orca (Oracle)'s rate is not reached (1.10, of 2 of 3 seeds, as Orca (Oracle) sustains less than its "
        "lowest rate by the others)"
    ) in text


def goal_said(rates, mine=(2.0, 2.0, 2.0)):
    load = results()["models"][0]
    del load["systems"][MAX]
    for name, by_seed in ((PAGED, mine), (ORACLE, rates)):
        load["systems"][name] |= {"sustained_by_seed": list(by_seed), "is_least": False}
    return goals(load)


def test_a_goal_that_only_the_mean_of_the_seeds_reaches_says_so_with_the_seeds():
    said = goal_said((1.6, 1.4, 1.3))
    assert (
        "1.3 times Orca (Oracle)'s rate is reached by the mean of the seeds and not by each of them "
        "(1.41, by seed 1.25 to 1.54: 1 of 3 is below it)."
    ) in said
    assert "(1.31, by seed 1.25 to 1.43: 2 of 3 are below it)." in goal_said((1.6, 1.6, 1.4))
    said = goal_said((1.8, 1.7, 1.5))
    assert (
        "is not reached by the mean of the seeds (1.21, by seed 1.11 to 1.33: 1 of 3 reaches it)."
    ) in said and "not by each" not in said


def test_a_goal_of_which_all_seeds_say_the_same_is_told_with_how_far_they_lie_apart():
    assert "Orca (Oracle)'s rate is reached (1.48, by seed 1.43 to 1.54)." in goal_said((1.4, 1.3, 1.35))
    assert "Orca (Oracle)'s rate is not reached (1.04, by seed 1.00 to 1.11)." in goal_said((2.0, 1.8, 2.0))
    assert "is reached (2.00)." in goal_said((1.0, 1.0, 1.0)), "seeds that agree need no range"


@pytest.mark.parametrize(("pool", "longest", "told"), [(1024, 512, "512 w.* runs 2"), (1024, 300, "512 w.* runs 2")])
def test_how_many_run_by_reservations_of_the_longest_follows_from_the_sizes(pool, longest, told):
    found = results()
    found["settings"] |= {"pool_tokens": pool, "max_model_len": longest}
    text = " ".join(page(finite(found), "x", "y").split())
    assert re.search(rf"a request may have {longest} tokens, .* a region of {told} at once", text)


def test_the_page_without_other_engines_and_mechanisms_has_no_such_headings():
    found = results()
    del found["mechanisms"], found["peers"]
    text = page(finite(found), "x", "y")
    assert "no number here" not in text
    found["settings"] |= {"quick": True}
    assert "no number here is a\nmeasurement" in page(finite(found), "x", "y")
    assert "Against other engines" not in text and "each mechanism" not in text and "What this does not say" in text


def test_every_policy_is_explained_on_the_page():
    from jpaged.benchmarks.serving_real.page import POLICIES as told

    assert set(told) == set(POLICIES)


def test_what_json_lacks_becomes_null():
    assert finite({"a": [math.inf, (1.0, math.nan)], "b": "x"}) == {"a": [None, [1.0, None]], "b": "x"}


def test_a_pages_command_names_what_is_not_the_default(tmp_path):
    given = [("workloads", tmp_path, None), ("seconds", 6.0, 6.0), ("quick", True, False), ("share", 0.5, None)]
    assert (
        page_command("serving", given)
        == f"jpaged bench serving --workloads {tmp_path.name} --quick --share 0.5 --docs docs"
    )
