"""Times of simulated kernels on a device: turns depend on each other, and one that fails leaves the others."""

from __future__ import annotations

import json
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.compiled_code import chip_times
from scripts.compiled_code.chip_times import repeated
from scripts.compiled_code.scalar_core import run_kernel
from scripts.compiled_code.simulated import Launch
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_schedule import parse


def test_a_result_takes_the_place_of_the_first_argument_of_its_shape():
    def add(total, x, y):
        return x + y + total[0, 0], total + x

    total, x, y = jax.jit(lambda *given: repeated(add, (), 5, *given))(jnp.zeros((2, 2)), jnp.ones(()), jnp.zeros(()))
    # x is 1, 1, 2, 4, 8 in the turns, and total has been added to before.
    np.testing.assert_array_equal(total, np.full((2, 2), 16.0))
    assert (x, y) == (16, 0)


def test_of_a_program_that_donates_nothing_else_changes():
    def write(x, pool, rows):
        return pool + x.sum(), x + 1

    x, pool, _ = jax.jit(lambda *given: repeated(write, (1,), 5, *given))(jnp.ones(4), jnp.zeros((2, 4)), jnp.ones(1))
    np.testing.assert_array_equal(pool, np.full((2, 4), 20.0))
    np.testing.assert_array_equal(x, np.ones(4))


def test_what_depends_on_unchanged_arguments_alone_is_computed_before_the_first_turn():
    @jax.jit
    def plan(keys):
        return jnp.sort(keys)

    def attend(x, keys):
        return jnp.cos(x) + plan(keys)[0]

    text = jax.jit(lambda *given: repeated(attend, (), 7, *given)).lower(jnp.ones(4), jnp.arange(3.0)).as_text()
    before, _, loop = text.partition("stablehlo.while")
    assert "stablehlo.sort" in before and "stablehlo.sort" not in loop
    assert "stablehlo.cosine" in loop


def test_turns_of_which_none_needs_the_one_before_are_refused():
    with pytest.raises(ValueError, match="no result has the shape and dtype of an argument"):
        repeated(lambda x: x.sum(), (), 3, jnp.ones(4))


def test_a_launch_that_fails_leaves_the_times_of_the_others(monkeypatch):
    def refuse(target):
        raise ValueError(f"no {target}")

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    launch = Launch(lambda x: x + 1, (shape,), "add", "other", {}, {}, (0,))
    monkeypatch.setattr(chip_times, "LAUNCHES", {"one": refuse, "two": lambda target: launch})
    monkeypatch.setattr(chip_times, "REPEATS", 1)
    found = chip_times.measure("v6e")
    assert found["one"] == "ValueError: no v6e"
    assert isinstance(found["two"], float)


def schedule(copies, bundles):
    """A kernel that reads 1 MiB some times, one after the other, and has more bundles."""
    operand = "%s1_s1 = inlined_call_operand.hbm [shape: bf16[512,1024], index: 0, kind: input, shape index: {}]"
    read = "%2 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1_s1, /*size_in_granules=*/32768, /*vmem=*/[#allocation7], "
    turn = [read + "/*dst_syncflagno=*/[#allocation8]", "%3 = dma.done.wait [#allocation8], 32768"]
    turn += [f"%4 = vsyncadd [#allocation8], {(1 << 32) - 32768}"]
    lines = [operand, *turn * copies, *[""] * bundles]
    return parse("\n".join(f" {hex(at)}   : > {{ {text} }}" for at, text in enumerate(lines)))


@pytest.mark.parametrize(
    ("constants", "said"),
    [
        ({"latency": 1.4e-6, "efficiency": 0.86}, "latency=1.4e-06, efficiency=0.86, clock=1.75e+09: error 0.000"),
        (
            {"latency": 0.6e-6, "efficiency": 0.92, "clock": 1.785e9},
            "latency=6.0e-07, efficiency=0.92, clock=1.78e+09: error 0.000",
        ),
    ],
)
def test_constants_are_fitted_to_a_file_of_measured_times(monkeypatch, tmp_path, constants, said):
    kernels = {"reads": schedule(40, 0), "few reads": schedule(3, 0), "computes": schedule(1, 20_000)}
    chip = CHIPS["v6e"]._replace(**constants)
    measured = {name: run_kernel(kernel, {}, chip).cycles / chip.clock * 1e6 for name, kernel in kernels.items()}
    file = tmp_path / "first_run.json"
    file.write_text(json.dumps({"parts": {chip_times.PART: measured | {"refused": "ValueError: no"}}}))
    monkeypatch.setattr(chip_times, "LAUNCHES", {name: lambda target, name=name: name for name in kernels})
    monkeypatch.setattr(chip_times, "need_compiler", lambda target: None)
    monkeypatch.setattr(chip_times, "schedule_dumps", nullcontext)
    monkeypatch.setattr(chip_times, "compile_launch", lambda name, dumps: ([kernels[name]], None))
    monkeypatch.setattr(chip_times, "operands_of", lambda name: [{}])
    *rows, refused, last = chip_times.compared(file, "v6e")
    assert [row["measured us"] for row in rows] == list(measured.values())
    assert all(row["ratio"] == pytest.approx(row["simulated us"] / row["measured us"]) for row in rows)
    assert refused["measured us"] == "ValueError: no" and refused["ratio"] is None
    assert said in last["kernel"]
