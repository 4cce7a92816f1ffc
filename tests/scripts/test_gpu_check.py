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

from pallas_kernels.paged_attention.gpu_shapes import read
from scripts.benchmarks.gpu_check import correctness, engine, experts, kernels, peers, products, states, tuning
from scripts.benchmarks.gpu_check import parts as gpu_parts
from scripts.benchmarks.gpu_check.device_trace import busy_share, covered

COMMAND = [sys.executable, "-m", "scripts.benchmarks.gpu_check"]
ROOT = Path(__file__).parents[2]
TINY = kernels.Sizes(
    batch=2, context=32, kv_heads=2, group=2, head_dim=64, writes=8, copies=2, prompts=1, repeats=2, gemm=16
)
LOAD = engine.Load(decode_batch=2, decode_context=8, decode_steps=4, sequences=2, max_model_len=64)


def test_without_a_gpu_it_says_so_in_one_line():
    done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "gpu_check needs an NVIDIA GPU; JAX runs on 'cpu' here"
    assert done.stdout == ""


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_right_kernels_pass_every_check(kv_dtype):
    heads = correctness.Heads(kv_heads=2, head_dim=64, soft_cap=50.0, sliding_window=30, sinks=True, kv_dtype=kv_dtype)
    lines = list(correctness.checks(1, impl="xla", context=100, cases=(heads,)))
    assert len(lines) == 4
    assert [line for line in lines if not line["error"] <= line["limit"]] == []


def test_a_wrong_kernel_fails_its_check(monkeypatch):
    right = correctness.paged_attention
    monkeypatch.setattr(correctness, "paged_attention", lambda *args, **options: right(*args, **options) * 1.1)
    (decode, *_) = correctness.checks(1, impl="reference", context=64, cases=(correctness.Heads(kv_heads=1),))
    assert decode["error"] > decode["limit"]


def test_right_products_with_codes_pass_every_check_and_wrong_ones_fail(monkeypatch):
    sizes = {"impl": "reference", "inputs": 64, "outputs": 40, "numbers": (3,)}
    lines = list(products.checks(1, **sizes))
    assert len(lines) == (1 + 1 + 2 + 2) * len(products.TOLERANCE)
    assert [line for line in lines if not line["error"] <= line["limit"]] == []
    right = products.quantised_matmul
    monkeypatch.setattr(products, "quantised_matmul", lambda *args, **options: right(*args, **options) * 1.1)
    assert all(line["error"] > line["limit"] for line in products.checks(1, held=("int4",), **sizes))


def test_right_kernels_of_states_and_latents_pass_every_check():
    lines = list(states.checks(1, impl="xla", context=100, names=("causal_conv",)))
    assert len(lines) == 4
    assert [line for line in lines if not line["error"] <= line["limit"]] == []


def test_a_state_that_is_wrong_or_written_elsewhere_fails_its_check(monkeypatch):
    kernel, *rest = states.RECURRENCES["causal_conv"]

    def check(spoil):
        def spoilt(view, *args, impl, **options):
            view, out = kernel(view, *args, impl=impl, **options)
            return (view, out) if impl == "reference" else spoil(view, out)

        monkeypatch.setitem(states.RECURRENCES, "causal_conv", (spoilt, *rest))
        return next(states.checks(1, impl="xla", names=("causal_conv",)))

    assert check(lambda view, out: (view, out * 1.1))["error"] > states.LIMIT
    assert check(lambda view, out: (view + 1, out))["error"] == float("inf")


def test_kernels_are_measured():
    sizes = replace(TINY, yardstick_bytes=1 << 16)
    figures = kernels.measure(sizes, "xla")
    assert set(figures) == {
        "decode_bytes_per_second",
        "prefill_flops",
        "kv_write_bytes_per_second",
        "block_copy_bytes_per_second",
    }
    assert all(value > 0 for value in figures.values())
    assert kernels.copy_bandwidth(sizes) > 0
    assert kernels.gemm_flops(sizes) > 0


def test_the_work_that_is_counted_is_the_arithmetics():
    sizes = kernels.Sizes()
    assert sizes.kv_bytes == 64 * 4096 * 8 * 128 * 2 * 2
    assert sizes.prefill_flop == 4 * 4 * 32 * 128 * sum(range(1, 4097))


def test_a_peer_that_cannot_run_is_named_with_the_reason():
    assert "missing" in peers.measure(TINY)["torch SDPA, contiguous"]


def test_the_engine_is_measured_on_random_weights(monkeypatch):
    monkeypatch.setattr(engine, "busy_share", lambda folder: 0.99)  # a CPU's trace has no device
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
    llm = engine.random_llm(config, jnp.float32, **engine.settings(LOAD))
    layer = 64 * 128 + 64 * 64 + 3 * 64 * 64 + 2 * 64
    assert engine.weight_bytes(llm) == 4 * (2 * layer + 64 + 64 * 100)
    assert engine.token_bytes(llm) == 4 * 2 * 2 * 32
    assert engine.parameters(llm) == 2 * layer + 64
    decode = engine.decode(llm, LOAD, 2, bandwidth=1e9)
    assert decode["tokens_per_second"] == 2 / decode["step_seconds"]
    assert engine.prefill(llm, LOAD, flops=1e12)["tokens_per_second"] > 0
    assert engine.throughput(llm, LOAD)["output_tokens_per_second"] > 0
    assert engine.host_gap(llm, LOAD) == {"host_gap_share": pytest.approx(0.01)}


def test_right_products_of_experts_pass_every_check_and_wrong_ones_fail(monkeypatch):
    sizes = {"impl": "reference", "inputs": 64, "outputs": 40, "counts": ("a decode",)}
    lines = list(experts.checks(1, held=("int8", "mxfp4"), **sizes))
    assert len(lines) == len(experts.TOLERANCE) + 2 * 2
    assert [line for line in lines if not line["error"] <= line["limit"]] == []
    right = experts.matmul_grouped
    monkeypatch.setattr(experts, "matmul_grouped", lambda x, *rest, **options: right(x[::-1], *rest, **options))
    wrong = list(experts.checks(1, held=(), **sizes))
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
    assert found["prefill"] == {"tokens_per_second": 1000.0, "share_of_peak": 0.5}


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
    monkeypatch.setattr(gpu_parts, "versions", lambda: {"jax": "99"})
    assert gpu_parts.Check.open(file).results["checks"] == []


def test_tiles_are_tuned_shape_by_shape_and_what_is_in_the_table_is_left(tmp_path):
    file = tmp_path / "tiles.json"
    file.write_text("{}")
    shapes, tried = (kernels.Sizes(), kernels.Sizes(group=8, head_dim=64)), []

    def timer(sizes, kernel, tiles):
        tried.append((sizes, kernel))
        return 1.0 if tiles.num_warps == 8 else 2.0

    found = list(tuning.tune("NVIDIA H200", shapes=shapes, file=file, timer=timer))
    assert len(found) == 4
    assert all(best.num_warps == 8 for _, _, best in found)
    assert read(file)["NVIDIA H200"] == {key: best for key, _, best in found}
    tried.clear()
    assert list(tuning.tune("NVIDIA H200", shapes=shapes, file=file, timer=timer)) == []
    assert tried == []


def test_a_shape_that_there_was_no_time_for_is_not_in_the_table(tmp_path):
    file, calls = tmp_path / "tiles.json", iter([True] * 3 + [False] * 9)
    file.write_text("{}")
    left = lambda: next(calls)  # noqa: E731
    assert list(tuning.tune("NVIDIA H200", file=file, timer=lambda *_: 1.0, more_time=left)) == []
    assert read(file) == {}


def test_parts_are_named_without_a_gpu():
    done = subprocess.run([*COMMAND, "--list"], cwd=ROOT, capture_output=True, text=True, check=True)
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
