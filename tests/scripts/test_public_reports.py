"""Public reports in full size: this project finds what their users missed. No vLLM is needed."""

from __future__ import annotations

import pytest

from scripts.benchmarks.against_vllm import BUDGET, by_jpaged
from scripts.benchmarks.public_reports import REPORTS, late_share, public_reports


@pytest.mark.parametrize(
    "name, share",
    [
        ("vllm #40696", 0.9),
        ("vllm #51250", 0.9),
        ("vllm #53749", 0.9),
        ("vllm #48435", 0.98),
        ("vllm #54607", 0.48),  # half of each prompt is its own
        ("sglang #39436", 0.9),
    ],
)
def test_prefixes_are_found_once_they_were_seen(name, share):
    report = REPORTS[name]
    served = by_jpaged(report.shape, report.asks(), together=report.together, **report.jpaged)
    assert late_share(report, served) >= share and served.preemptions == 0


def test_a_long_request_fits_the_kv_and_states_that_it_needs():
    report = REPORTS["tpu-inference #3483"]
    served = by_jpaged(report.shape, report.asks(), together=report.together, **report.jpaged)
    (ask,) = report.asks()
    assert len(served.running) == ask.prompt // BUDGET + 1 + ask.output - 1 and served.preemptions == 0


def test_rows_name_their_report_and_an_unknown_one_is_refused():
    (row,) = public_reports(reports=["vllm #51250"])
    assert row["system"] == "jpaged" and row["steps"] == 3 and row["found then"] > 0.9
    with pytest.raises(ValueError, match=r"reports=\['vllm #1'\] are none of vllm #40696"):
        list(public_reports(reports=["vllm #1"]))
