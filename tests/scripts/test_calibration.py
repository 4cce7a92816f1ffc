"""How far simulated times of TPU kernels are from published ones, and what a figure says of it."""

import re
import statistics

import pytest

from scripts.compiled_code.calibration import compared, error_text, rank_correlation


def test_simulated_times_follow_measured_ones():
    rows = compared()
    assert len(rows) == 54
    assert rank_correlation(rows) >= 0.95
    errors = [row.error for row in rows]
    assert statistics.median(errors) <= 0.10
    assert sum(error <= 0.15 for error in errors) >= 0.9 * len(errors)


def test_each_row_says_where_its_time_was_published_and_is_of_a_measured_chip():
    for row in compared():
        assert row.source and row.chip in ("v6e", "tpu7x") and row.measured > 0 and row.simulated > 0
    assert len({row.kernel for row in compared()}) == 54


@pytest.mark.parametrize(
    ("kind", "chip", "said"),
    [
        ("decode attention", "v6e", r"^0\.7 % \(worst 2\d %, 15 rows\)$"),
        ("experts", "tpu7x", r"^\d\.\d % \(worst 9 %, 5 rows\)$"),
        ("experts", "v6e", r"5 rows\) on tpu7x$"),
        ("other", "v6e", r"^kind unmeasured; others 1\.\d %"),
        ("decode attention", "v5e", r"^chip unmeasured$"),
        ("other", "v5p", r"^chip unmeasured$"),
    ],
)
def test_a_figure_says_how_wrong_those_of_its_kind_and_chip_were(kind, chip, said):
    assert re.search(said, error_text(kind, chip)), error_text(kind, chip)
