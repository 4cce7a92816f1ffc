"""The benchmark of towers runs all of its measures on a small model."""

from types import SimpleNamespace

import pytest

from scripts.benchmarks import towers as towers_module
from scripts.benchmarks.towers import towers


def test_a_measure_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="--measures has 'speed': it takes tower, first token, questions"):
        list(towers(measures=["tower", "speed"]))


def test_an_answer_of_another_length_stops_the_benchmark_and_the_engine_has_room_for_all(monkeypatch):
    """An engine may end an answer at its longest sequence."""
    monkeypatch.setattr(towers_module, "LLM", lambda folder, **settings: settings)
    case = towers_module._Case("", "float32", None, patches=64, rounds=1, questions=2, tokens=500)
    assert towers_module._engine(case, sequences=2)["max_model_len"] >= 16 + 2 + 16 + 500
    short = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1, 2])])
    llm = SimpleNamespace(generate=lambda *_, **__: [short])
    with pytest.raises(ValueError, match="an answer has 2 tokens where --tokens asks 3"):
        towers_module._answer_all(llm, [], 3)


@pytest.mark.nightly
def test_each_measure_compares_with_transformers():
    rows = list(towers([16], ["float32"], text=[128, 1], tower=[128, 2], questions=2, tokens=2, rounds=1))
    assert [row["measure"] for row in rows] == ["tower", "first token", "questions"]
    assert all(row["times"] > 0 and row["by processor"] > 0 for row in rows)
    assert all(row["threads"] >= 1 for row in rows)
    assert [name for name in rows[2] if "uncached" in name] == ["times uncached", "by processor uncached"]
