"""The first run on a device: what its file holds, and the section that is made of such files."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from scripts import first_run
from scripts.benchmarks import first_run_report
from scripts.benchmarks.gpu_check import correctness, kernels

ROOT = Path(__file__).parents[2]
RUN = {
    "format": first_run.FORMAT,
    "mode": "device",
    "device": "TPU v5 lite",
    "devices": 8,
    "date": "2026-11-27",
    "versions": {"jax": "0.10.2"},
    "checks": [{"check": "kv_write", "error": 0.0, "limit": 0.0}, {"check": "ssd", "error": 0.5, "limit": 0.001}],
    "failed": {"latent attention": "XlaRuntimeError: no room"},
    "parts": {
        "kernels": {"copy_bytes_per_second": 7.2e11, "decode_bytes_per_second": 5.1e11},
        "demo model on 1 of 8": {
            "alone_tokens_per_second": 401.2,
            "batch_tokens_per_second": 12345.6,
            "batch": 64,
            "compile_seconds": 33.3,
        },
    },
}


def written(folder, run, name="run.json"):
    file = folder / name
    file.write_text(json.dumps(run))
    return str(file)


def record_of(folder, **options):
    return first_run.Record(folder / "run.json", {"mode": "device"}, **options)


def kept(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_check_that_raises_ends_its_own_lines_and_keeps_those_before(tmp_path):
    record = record_of(tmp_path)

    def lines():
        yield {"check": "a", "error": 0.0, "limit": 0.0}
        raise RuntimeError("no room")

    record.add_checks("some", lines)
    record.add_part("more", lambda: {"seconds": 2.5})
    found = kept(tmp_path)
    assert [line["check"] for line in found["checks"]] == ["a"]
    assert found["failed"] == {"some": "RuntimeError: no room"} and found["parts"] == {"more": {"seconds": 2.5}}


def test_nothing_begins_when_the_minutes_are_over(tmp_path):
    record = record_of(tmp_path, minutes=-1)
    record.add_part("late", lambda: pytest.fail("it began"))
    assert kept(tmp_path)["failed"] == {"late": "not begun: the minutes were over"}


def test_a_gpu_without_bfloat16_is_timed_in_float16(monkeypatch):
    """Else its own kernels would run nowhere, and XLA's be timed twice."""
    given = {"T4": ("gpu", "7.5"), "A100": ("gpu", "8.0"), "v5e": ("tpu", ""), "CPU": ("cpu", "")}
    sizes = {name: first_run.sizes_for({"platform": p, "compute_capability": c}) for name, (p, c) in given.items()}
    found = {name: one.speeds.dtype for name, one in sizes.items()}
    assert found == {"T4": "float16", "A100": "bfloat16", "v5e": "bfloat16", "CPU": "bfloat16"}
    assert sizes["CPU"] is first_run.SMALL
    timed = []
    monkeypatch.setattr(kernels, "seconds_a_call", lambda call, carry, repeats: timed.append(str(carry.dtype)) or 1.0)
    kernels.measure(replace(first_run.SMALL.speeds, dtype="float16"), "xla")
    assert timed == ["float16"] * 4


@pytest.mark.nightly
def test_every_kind_of_kernel_is_checked(tmp_path):
    record = record_of(tmp_path)
    sizes = replace(first_run.SMALL, cases=first_run.SMALL.cases[:1])
    first_run.check_kernels(record, sizes, 0)
    found = kept(tmp_path)
    assert found["failed"] == {}
    kinds = {line["check"].replace(",", " ").split()[0] for line in found["checks"]}
    kernels = {"paged_attention", "kv_write", "block_copy", "latent_attention", "product", "table", "experts"}
    assert kernels | {"causal_conv", "selective_scan", "ssd", "gated_delta"} <= kinds
    assert [line for line in found["checks"] if not line["error"] <= line["limit"]] == []


@pytest.mark.parametrize("impl", ["cpu", "tpu_interpret"])
def test_rotation_is_checked_where_there_is_a_kernel_of_it(impl, monkeypatch):
    lines = partial(correctness.checks_of_rotation, impl=impl)
    right = list(lines(np.random.default_rng(0)))
    assert right and all(line["error"] <= line["limit"] for line in right)
    rotated = correctness.rotated_heads

    def spoilt(*args, impl, **options):
        q, k, v = rotated(*args, impl=impl, **options)
        return (q, k, v) if impl == "reference" else (q * 1.1, k, v)

    monkeypatch.setattr(correctness, "rotated_heads", spoilt)
    assert all(line["error"] > line["limit"] for line in lines(np.random.default_rng(0)))
    assert not list(lines(np.random.default_rng(0), impl="xla"))


@pytest.mark.nightly
def test_a_trial_on_a_cpu_finds_nothing_wrong_and_says_that_it_is_one(tmp_path):
    file = tmp_path / "run.json"
    assert first_run.main(["--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["mode"].startswith("trial on a CPU") and found["failed"] == {}
    part = found["parts"]["demo model on 1 of 1"]
    assert part["alone_tokens_per_second"] > 0 and "Paris" in part["answer"]
    with pytest.raises(ValueError, match="is of a trial on a CPU"):
        first_run_report.read(file)


def test_the_section_has_a_row_a_run_and_what_failed(tmp_path, capsys):
    assert first_run_report.main([written(tmp_path, RUN)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        "| 8 x TPU v5 lite | 2026-11-27 | 0.10.2 | 1 of 2 | 720 | 510 | 401 alone, 12,346 in 64 | 33 s |"
    )
    assert "- latent attention: XlaRuntimeError: no room" in lines and "- ssd: error 0.5, limit 0.001" in lines


def test_the_section_is_written_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{first_run_report.BEGIN}\nold\n{first_run_report.END}\nafter\n")
    assert first_run_report.main([written(tmp_path, RUN), "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and "TPU v5 lite" in text
    page.write_text("no marks")
    assert first_run_report.main([written(tmp_path, RUN), "--write", str(page)]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 7}, "has format 7"),
        ({"mode": "trial on a CPU: x"}, "is of a trial"),
        ({"format": None}, "has format"),
    ],
)
def test_other_files_are_refused(changes, message, tmp_path, capsys):
    assert first_run_report.main([written(tmp_path, RUN | changes)]) == 2
    assert message in capsys.readouterr().err


def test_without_files_the_section_says_how_to_make_one(capsys):
    assert first_run_report.main([]) == 0
    assert "python -m scripts.first_run" in capsys.readouterr().out


def test_the_page_of_devices_has_the_section_that_the_report_writes():
    page = (ROOT / "docs" / "devices.md").read_text()
    found = page.partition(first_run_report.BEGIN)[2].partition(first_run_report.END)[0].strip()
    files = sorted((ROOT / "docs" / "first_runs").glob("*.json"))
    assert found == first_run_report.section(map(first_run_report.read, files))
