"""From a program to its kernels' operands, and from a simulated run to the columns of a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scripts.compiled_code.launch_operands import launch_operands
from scripts.compiled_code.scalar_core import Run, SimulationError
from scripts.compiled_code.simulated import Launch, aim_of, check_bytes, operands_of, read_schedules, row_of
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_schedule import parse

OPERAND = "%s{0}_s{0} = inlined_call_operand.hbm [shape: bf16[{1}], index: {0}, kind: input, shape index: {{}}]"


def array(shape, dtype=jnp.int32):
    here = NamedSharding(Mesh(jax.devices()[:1], "x"), P())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=here)


def twice(x, ids, name):
    """Launch a kernel that is given numbers which depend on `ids`."""

    def kernel(ids, x, out):
        out[...] = x[...]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(1,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, ids: (0, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, ids: (0, 0)),
    )
    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    return pl.pallas_call(kernel, out_shape=shape, grid_spec=spec, name=name)(jnp.cumsum(2 * ids), x)


def test_operands_of_launches_are_computed_from_what_is_known_alone():
    @jax.jit
    def inner(x, ids):
        return twice(x, ids, None)

    def function(x, ids):
        return inner(twice(x, ids, "first"), ids + 1)

    found = launch_operands(function, (array((8, 128), jnp.float32), array((3,))), {1: np.array([1, 2, 3], np.int32)})
    assert set(found) == {"first", "inner"}
    (first,), (second,) = found["first"], found["inner"]
    assert first[0].tolist() == [2, 6, 12] and set(first) == {0}
    assert second[0].tolist() == [4, 10, 18]


def test_operands_that_depend_on_what_is_not_known_are_left_out():
    def function(x, ids):
        return twice(x, ids + x[0, :3].astype(jnp.int32), "first")

    given = (array((8, 128), jnp.float32), array((3,)))
    assert launch_operands(function, given, {1: np.arange(3, dtype=np.int32)}) == {"first": [{}]}


@pytest.mark.parametrize(("moved", "right"), [(4096, True), (4095, False), (8192, False)])
def test_bytes_are_those_of_the_argument_whatever_its_shape_has_become(moved, right):
    schedule = parse(f" 0x0 : {{ {OPERAND.format(1, '64,128')}  ;;  {OPERAND.format(2, '8,128')} }}")
    run = Run(cycles=1, bundles=1)
    run.read[1], run.read[2] = 4096, 7
    launch = Launch(None, (array((8, 8, 128), jnp.bfloat16),), "k", "other", {}, {0: moved})
    if right:
        check_bytes(launch, [schedule], [run])
    else:
        with pytest.raises(SimulationError, match=f"k moves 4096 bytes of argument 0, not {moved}"):
            check_bytes(launch, [schedule], [run])


def test_a_row_says_the_time_the_bytes_and_how_wrong_such_figures_are():
    run = Run(cycles=1750, bundles=875, empty=175, stalled=875, copies=3)
    run.read[1], run.written[2] = 1000, 640
    row = row_of(run, "decode attention", "v6e")
    assert (row["us"], row["bundles, us"], row["empty"]) == (1.0, 0.5, 0.2)
    assert (row["bytes"], row["DMAs"]) == (1640, 3)
    assert row["bytes at HBM's peak, us"] == pytest.approx(1e-3)
    assert "0.7 %" in row["simulated; error of its kind"]


@pytest.mark.parametrize(
    ("bundles", "empty", "cycles", "aim"),
    [
        (1000, 500, 1090, "met: 1.09 x bytes"),
        (1000, 500, 1200, "missed: 1.20 x bytes"),
        (2000, 400, 2000, "missed: 0.20 empty"),
        (2000, 200, 3000, "met: 0.10 empty"),
    ],
)
def test_a_launchs_aim_is_that_of_its_bytes_or_that_of_its_bundles(bundles, empty, cycles, aim):
    run = Run(cycles=cycles, bundles=bundles, empty=empty)
    run.read[0] = int(1000 / CHIPS["v6e"].clock * 0.9 * CHIPS["v6e"].hbm)
    assert aim_of(run, "v6e") == aim


def test_launches_one_after_the_other_take_their_times_and_bytes_together():
    runs = [Run(10, 8, 2, 1, 3), Run(5, 4, 1, 0, 1)]
    for run in runs:
        run.read[1] += 7
    both = runs[0] + runs[1]
    assert (both.cycles, both.bundles, both.empty, both.stalled, both.copies, both.read[1]) == (15, 12, 3, 1, 4, 14)


def test_a_kernels_schedules_are_those_of_its_name_and_not_the_analysis_of_them(tmp_path):
    for name in ("2-kv_write.2-01", "1-kv_write.1-01", "1-kv_write.1-00-schedule-analysis_x", "1-kv_write_all.1-01"):
        (tmp_path / f"{name}-packed-bundles-post-ra.txt").write_text(" 0x0 : { }" * name.startswith(("1", "2")))
    (tmp_path / "1-kv_write.1-03-final_bundles.txt").write_text("")
    assert len(read_schedules(tmp_path, "kv_write")) == 2
    assert read_schedules(tmp_path, "other") == []


def test_schedules_of_several_kernels_follow_their_names_as_operands_do(tmp_path):
    """The compiler may take the second launch first."""
    for name, bundles in (("1-mla-m.2-01", 1), ("2-mla-bd.1-01", 2), ("3-mla-bd.9-01", 3)):
        text = "".join(f"{i:#x} : {{ }}\n" for i in range(bundles))
        (tmp_path / f"{name}-packed-bundles-post-ra.txt").write_text(text)
    assert [len(schedule.bundles) for schedule in read_schedules(tmp_path, "mla.*")] == [2, 3, 1]

    def function(x, ids):
        return twice(twice(x, ids + 5, "mla-m"), ids, "mla-bd")

    arguments = array((8, 128), jnp.float32), array((1,))
    launch = Launch(function, arguments, "mla.*", "other", {1: np.array([1], np.int32)}, {})
    assert [given[0].tolist() for given in operands_of(launch)] == [[2], [12]]


def test_only_chips_with_published_times_are_measured():
    assert {name for name, chip in CHIPS.items() if not chip.measured} == {"v5e", "v5p"}
    assert {name for name, chip in CHIPS.items() if chip.cores == 2} == {"v5p"}
