"""Times of steps: that a step is the sum of its parts, and what is known between two simulated points."""

from __future__ import annotations

import pytest

from scripts.compiled_code.step_models import MODELS
from scripts.compiled_code.step_times import Chunks, Found, StepTimes, line, simulated_chunks


class Made(Found):
    """Finds launches of 20 microseconds and 20 MB, of decodes with 1,024 keys 8."""

    def __init__(self):
        self.names = []

    def launch(self, target, name, make):
        self.names.append(name)
        return (8.0, 8e6) if "1024 keys" in name else (20.0, 2e7)

    def ragged(self, target, experts, tokens):
        return 100.0, 1e8


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prompts", [None, simulated_chunks()], ids=["decode", "mixed"])
def test_a_step_is_the_sum_of_its_parts_and_above_memorys_bound(name, prompts):
    for count in (4, 8):
        row = StepTimes("v6e", count, MODELS[name], Made()).parts(60, 4096, prompts)
        assert row["ms"] == pytest.approx(sum(row[part] for part in ("kernels", "products", "launches", "collectives")))
        assert 0 < row["bound"] < row["ms"] and row["launches"] > 0


def test_attention_takes_time_for_each_sequence_and_for_each_of_its_keys():
    made = Made()
    times = StepTimes("v6e", 8, MODELS["qwen3-8b"], made)

    def kernels(decodes, keys):
        return times.parts(decodes, keys)["kernels"] / 36e-3

    assert kernels(64, 4096) == pytest.approx(20) and made.names == [made.names[0]]
    assert kernels(64, 1024) == pytest.approx(8)
    assert kernels(128, 2560) == pytest.approx(2 * 14)
    assert kernels(32, 7168) == pytest.approx(16)


def test_prompts_take_as_long_as_they_have_pairs_of_queries_and_keys():
    times = StepTimes("v6e", 8, MODELS["qwen3-8b"], Made())
    alike = Chunks(simulated_chunks().spans[:2])
    assert times.parts(0, 0, alike)["kernels"] == pytest.approx(36e-3 * (10 + 20 * 482 / 1024))


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_pairs_are_those_that_a_window_lets_a_query_see(window):
    spans = (0, 5), (3, 20), (50, 51)
    seen = [min(at + 1, window or at + 1) for start, stop in spans for at in range(start, stop)]
    assert Chunks(spans).pairs(window) == sum(seen)
    assert Chunks(spans).tokens == len(seen)


def test_a_line_goes_through_two_points_and_is_level_through_one():
    assert line({4: (1.0, 2.0), 8: (3.0, 2.0)}, 10, 0) == 4 and line({4: (1.0, 2.0)}, 9, 1) == 2


def test_what_is_kept_in_a_file_is_not_made_again(tmp_path):
    file = tmp_path / "kept.json"
    file.write_text('{"v6e, one": [3.0, 4.0]}')
    assert Found(tmp_path, file).launch("v6e", "one", lambda: pytest.fail("made again")) == (3.0, 4.0)
    with pytest.raises(ValueError, match="another"):
        Found(tmp_path, file).launch("v6e", "two", lambda: int("another"))
