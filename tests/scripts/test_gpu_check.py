"""The GPU check without a GPU: what it says, and its parts on the CPU at small sizes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from transformers import LlamaConfig

from jpaged.benchmarks import (
    gpu_correctness,
    gpu_engine,
    gpu_experts,
    gpu_kernels,
    gpu_parts,
    gpu_peers,
    gpu_products,
    gpu_report,
    gpu_states,
    gpu_tuning,
)
from jpaged.benchmarks.device_trace import busy_share, covered
from pallas_kernels.paged_attention.gpu_tiles import read

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
TINY = gpu_kernels.Sizes(
    batch=2, context=32, kv_heads=2, group=2, head_dim=64, writes=8, copies=2, prompts=1, repeats=2, gemm=16
)
LOAD = gpu_engine.Load(decode_batch=2, decode_context=8, decode_steps=4, sequences=2, max_model_len=64)


def test_without_a_gpu_it_says_so_in_one_line():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "gpu_check needs an NVIDIA GPU; JAX runs on 'cpu' here"
    assert done.stdout == ""


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_right_kernels_pass_every_check(kv_dtype):
    heads = gpu_correctness.Heads(
        kv_heads=2, head_dim=64, soft_cap=50.0, sliding_window=30, sinks=True, kv_dtype=kv_dtype
    )
    lines = list(gpu_correctness.checks(1, impl="xla", context=100, cases=(heads,)))
    assert len(lines) == 10
    assert [line for line in lines if not line["error"] <= line["limit"]] == []


def test_a_wrong_kernel_fails_its_check(monkeypatch):
    right = gpu_correctness.paged_attention
    monkeypatch.setattr(gpu_correctness, "paged_attention", lambda *args, **options: right(*args, **options) * 1.1)
    (decode, *_) = gpu_correctness.checks(1, impl="reference", context=64, cases=(gpu_correctness.Heads(kv_heads=1),))
    assert decode["error"] > decode["limit"]


def test_right_products_with_codes_pass_every_check_and_wrong_ones_fail(monkeypatch):
    sizes = {"impl": "reference", "inputs": 64, "outputs": 40, "numbers": (3,)}
    lines = list(gpu_products.checks(1, **sizes))
    assert len(lines) == (1 + 1 + 2 + 2) * len(gpu_products.TOLERANCE)
    assert [line for line in lines if not line["error"] <= line["limit"]] == []
    right = gpu_products.quantised_matmul
    monkeypatch.setattr(gpu_products, "quantised_matmul", lambda *args, **options: right(*args, **options) * 1.1)
    assert all(line["error"] > line["limit"] for line in gpu_products.checks(1, held=("int4",), **sizes))


def test_right_kernels_of_states_and_latents_pass_every_check():
    lines = list(gpu_states.checks(1, impl="xla", context=100, names=("causal_conv",)))
    assert len(lines) == 4
    assert [line for line in lines if not line["error"] <= line["limit"]] == []


def test_a_state_that_is_wrong_or_written_elsewhere_fails_its_check(monkeypatch):
    kernel, *rest = gpu_states.RECURRENCES["causal_conv"]

    def check(spoil):
        def spoilt(view, *args, impl, **options):
            view, out = kernel(view, *args, impl=impl, **options)
            return (view, out) if impl == "reference" else spoil(view, out)

        monkeypatch.setitem(gpu_states.RECURRENCES, "causal_conv", (spoilt, *rest))
        return next(gpu_states.checks(1, impl="xla", names=("causal_conv",)))

    assert check(lambda view, out: (view, out * 1.1))["error"] > gpu_states.LIMIT
    assert check(lambda view, out: (view + 1, out))["error"] == float("inf")


def test_kernels_are_measured():
    sizes = replace(TINY, yardstick_bytes=1 << 16)
    figures = gpu_kernels.measure(sizes, "xla")
    assert set(figures) == set(gpu_report.COLUMNS)
    assert all(value > 0 for value in figures.values())
    assert gpu_kernels.copy_bandwidth(sizes) > 0
    assert gpu_kernels.gemm_flops(sizes) > 0


def test_the_work_that_is_counted_is_the_arithmetics():
    sizes = gpu_kernels.Sizes()
    assert sizes.kv_bytes == 64 * 4096 * 8 * 128 * 2 * 2
    assert sizes.prefill_flop == 4 * 4 * 32 * 128 * sum(range(1, 4097))


def test_a_peer_that_cannot_run_is_named_with_the_reason():
    assert "missing" in gpu_peers.measure(TINY)["torch SDPA, contiguous"]


def test_the_engine_is_measured_on_random_weights(monkeypatch):
    monkeypatch.setattr(gpu_engine, "busy_share", lambda folder: 0.99)  # a CPU's trace has no device
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=100,
        tie_word_embeddings=False,
    )
    llm = gpu_engine.random_llm(config, jnp.float32, **gpu_engine.settings(LOAD))
    layer = 64 * 128 + 64 * 64 + 3 * 64 * 64 + 2 * 64
    assert gpu_engine.weight_bytes(llm) == 4 * (2 * layer + 64 + 64 * 100)
    assert gpu_engine.token_bytes(llm) == 4 * 2 * 2 * 32
    assert gpu_engine.parameters(llm) == 2 * layer + 64
    decode = gpu_engine.decode(llm, LOAD, 2, bandwidth=1e9)
    assert decode["tokens_per_second"] == 2 / decode["step_seconds"]
    assert gpu_engine.prefill(llm, LOAD, flops=1e12)["tokens_per_second"] > 0
    assert gpu_engine.throughput(llm, LOAD)["output_tokens_per_second"] > 0
    assert gpu_engine.host_gap(llm, LOAD) == {"host_gap_share": pytest.approx(0.01)}


def test_right_products_of_experts_pass_every_check_and_wrong_ones_fail(monkeypatch):
    sizes = {"impl": "reference", "inputs": 64, "outputs": 40, "counts": ("a decode",)}
    lines = list(gpu_experts.checks(1, held=("int8", "mxfp4"), **sizes))
    assert len(lines) == len(gpu_experts.TOLERANCE) + 2 * 2
    assert [line for line in lines if not line["error"] <= line["limit"]] == []
    right = gpu_experts.matmul_grouped
    monkeypatch.setattr(gpu_experts, "matmul_grouped", lambda x, *rest, **options: right(x[::-1], *rest, **options))
    wrong = list(gpu_experts.checks(1, held=(), **sizes))
    assert all(line["error"] > line["limit"] for line in wrong)


def some_checks(number):
    return [{"check": f"check {n}", "error": 0.0, "limit": 0.0} for n in range(number)]


@pytest.fixture
def parts(monkeypatch):
    """Three parts in the place of the real ones: one that checks, one that fails, one that measures."""

    def fails(check):
        raise RuntimeError("out of memory\nand more")

    def measures(check):
        check.put("prefill", {"tokens_per_second": 1000.0, "share_of_peak": 0.5})
        return True

    monkeypatch.setattr(
        gpu_parts, "PARTS", {"a": lambda check: check.add_checks(some_checks(3)), "b": fails, "c": measures}
    )


def test_what_fails_is_told_and_the_next_part_follows(parts, tmp_path):
    check = gpu_parts.Check.open(tmp_path / "found.json", seed=1)
    check.run(["a", "b", "c"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["done"] == ["a", "c"]
    assert found["failed"] == {"b": "RuntimeError: out of memory"}
    assert not check.succeeded
    text = gpu_report.section(found)
    assert "3 checks against float64, 0 failed." in text
    assert "- prompts: 1000 tokens/s, 0.50 of the peak" in text
    assert "Failed: b: RuntimeError: out of memory." in text


def test_a_later_call_goes_on_where_the_time_ended(parts, tmp_path, capsys):
    file, now = tmp_path / "found.json", iter(range(100))
    check = gpu_parts.Check.open(file, seed=1)
    check.clock, check.end = lambda: next(now), 3  # asked before the part, at its start, after the first check, ...
    check.run(["a", "c"])
    assert [line["check"] for line in json.loads(file.read_text())["checks"]] == ["check 0", "check 1"]
    assert "a: to be continued" in capsys.readouterr().out
    again = gpu_parts.Check.open(file)
    assert again.results["seed"] == 1
    again.run(["a", "c"])
    out = capsys.readouterr().out
    assert "check 1" not in out
    assert "ok    check 2" in out
    assert json.loads(file.read_text())["done"] == ["a", "c"]
    gpu_parts.Check.open(file).run(["a", "c"])
    assert capsys.readouterr().out.splitlines()[1:] == ["a: done before", "c: done before"]


def test_results_of_other_versions_are_not_gone_on_from(parts, tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    gpu_parts.Check.open(file, seed=1).run(["a"])
    monkeypatch.setattr(gpu_report, "versions", lambda: {"jax": "99"})
    assert gpu_parts.Check.open(file).results["checks"] == []


def test_tiles_are_tuned_shape_by_shape_and_what_is_in_the_table_is_left(tmp_path):
    file = tmp_path / "tiles.json"
    file.write_text("{}")
    shapes, tried = (gpu_kernels.Sizes(), gpu_kernels.Sizes(group=8, head_dim=64)), []

    def timer(sizes, kernel, tiles):
        tried.append((sizes, kernel))
        return 1.0 if tiles.num_warps == 8 else 2.0

    found = list(gpu_tuning.tune("NVIDIA H200", shapes=shapes, file=file, timer=timer))
    assert len(found) == 4
    assert all(best.num_warps == 8 for _, _, best in found)
    assert read(file)["NVIDIA H200"] == {key: best for key, _, best in found}
    tried.clear()
    assert list(gpu_tuning.tune("NVIDIA H200", shapes=shapes, file=file, timer=timer)) == []
    assert tried == []


def test_a_shape_that_there_was_no_time_for_is_not_in_the_table(tmp_path):
    file, calls = tmp_path / "tiles.json", iter([True] * 3 + [False] * 9)
    file.write_text("{}")
    left = lambda: next(calls)  # noqa: E731
    assert list(gpu_tuning.tune("NVIDIA H200", file=file, timer=lambda *_: 1.0, more_time=left)) == []
    assert read(file) == {}


def test_parts_are_named_without_a_gpu():
    done = subprocess.run([sys.executable, SCRIPT, "--list"], capture_output=True, text=True, check=True)
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(gpu_parts.PARTS)


def test_a_device_is_busy_while_any_of_its_events_runs(tmp_path):
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    events = [
        {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "/device:GPU:0"}},
        {"name": "process_name", "ph": "M", "pid": 8, "args": {"name": "/host:CPU"}},
        {"ph": "X", "pid": 7, "ts": 10, "dur": 6},
        {"ph": "X", "pid": 7, "ts": 18, "dur": 2},
        {"ph": "X", "pid": 8, "ts": 0, "dur": 100},
    ]
    with gzip.open(tmp_path / "perfetto_trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert busy_share(tmp_path) == 0.8


def test_a_report_takes_the_place_of_the_one_before(tmp_path):
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\nbefore\n")
    results = {
        "device": "Some GPU",
        "date": "2026-01-01",
        "command": "python scripts/gpu_check.py",
        "versions": {"jax": "0.11"},
        "copy_bytes_per_second": 4e12,
        "gemm_flops": 8e14,
        "checks": [{"check": "a", "error": 0.0, "limit": 0.0}, {"check": "b", "error": 2.0, "limit": 1.0}],
        "kernels": {"jpaged (gpu)": {"decode_bytes_per_second": 3.6e12}, "torch": {"missing": "not there"}},
    }
    gpu_report.write(page, results)
    gpu_report.write(page, results | {"device": "Another GPU"})
    text = page.read_text()
    assert text.startswith("# Performance\n\nbefore\n\n")
    assert text.count("| jpaged (gpu) | 3600 (0.90) |  |  |  |") == 1
    assert "| torch | not there | | | |" in text
    assert "2 checks against float64, 1 failed. b" in text
    assert "On Another GPU" in text
    assert "Some GPU" not in text
