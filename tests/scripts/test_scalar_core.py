"""The simulation of a TPU kernel's scalar core, on schedules short enough to count by hand."""

import numpy as np
import pytest

from scripts.compiled_code.scalar_core import SimulationError, run_kernel
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_schedule import parse

CHIP = CHIPS["v6e"]
LATENCY = CHIP.latency * CHIP.clock

HBM = "%s1_s1 = inlined_call_operand.hbm [shape: bf16[64,128], index: 1, kind: input, shape index: {}]"
OUT = "%s2_s2 = inlined_call_operand.hbm [shape: bf16[64,128], index: 2, kind: output, shape index: {}]"
NUMBERS = "%s3_s3 = inlined_call_operand.vmem [shape: s32[4], index: 0, kind: input, shape index: {}]"
VALUE = "%s3_s3 = inlined_call_operand.<no memory space> [shape: s32[1], index: 0, kind: input, shape index: {}]"
TO_SMEM = (
    "%9 = dma.vmem_to_smem /*vmem=*/%s3_s3, /*size_in_granules=*/1, /*smem=*/[#allocation5], "
    "/*dst_syncflagno=*/[#allocation6]"
)
READ = (
    "%10 = dma.hbm_to_vmem [thread:$0] {} /*hbm=*/%s1_s1, /*size_in_granules=*/{}, /*vmem=*/[#allocation7], "
    "/*dst_syncflagno=*/[#allocation8]{}"
)
WRITE = (
    "%11 = dma.vmem_to_hbm [thread:$0]  /*vmem=*/[#allocation7], /*size_in_granules=*/{}, /*hbm=*/%s2_s2, "
    "/*dst_syncflagno=*/[#allocation8]"
)
WAIT, TAKE = "%12 = dma.done.wait [#allocation8], {}", "%13 = vsyncadd [#allocation8], {}"
DELAY = [""] * CHIP.delay
BOTH = f"{HBM}  ;;  {OUT}"


def wait_for(granules):
    """The bundles that wait for a semaphore and take from it."""
    return [WAIT.format(granules), TAKE.format((1 << 32) - granules)]


def dump(*bundles):
    """A dump of bundles, given as their instructions."""
    lines = ["= control target key start", "LB: loop body", ""]
    return "\n".join(lines + [f" {hex(at)}   : > {{ {text} }}" for at, text in enumerate(bundles)])


def run(*bundles, chip=CHIP, **operands):
    given = {int(name[1:]): np.asarray(value, np.int32) for name, value in operands.items()}
    return run_kernel(parse(dump(*bundles)), given, chip)


def test_each_bundle_is_a_cycle_and_those_without_an_instruction_are_counted():
    done = run("%v1 = vadd.f32 %v2, %v3", "", "", "%s1_s1 = smov 1")
    assert (done.cycles, done.bundles, done.empty, done.empty_share) == (4, 4, 2, 0.5)


def loop(turns):
    """A loop of three bundles and those that run while it branches."""
    return [
        "%s4_s4 = smov 0",
        "%s5_s5 = sadd.s32 1, %s6_s4  ;;  %s6_s4 = sphi %s4_s4, %s7_s4",
        f"%p1_p0 = scmp.ge.s32.totalorder %s5_s5, {turns}  ;;  %s7_s4 = smov %s5_s5",
        "%8 = sbr.rel (!%p1_p0) target bundleno = 1 (0x1), region = 3",
        *DELAY,
        "",
    ]


def test_a_loop_turns_as_often_as_its_numbers_say_and_runs_the_bundles_after_its_branch():
    assert run(*loop(5)).bundles == 1 + 5 * (3 + CHIP.delay) + 1
    slow = CHIPS["tpu7x"]
    longer = loop(5)[:4] + [""] * slow.delay + [""]
    assert run(*longer, chip=slow).bundles == 1 + 5 * (3 + slow.delay) + 1


def test_a_wait_lasts_until_the_bytes_have_come_and_their_latency_has_passed():
    granules = 64 * 128 * 2 // 32
    done = run(BOTH, READ.format("", granules, ""), *wait_for(granules), WRITE.format(granules), *wait_for(granules))
    bytes_of_each = granules * 32
    each = bytes_of_each / CHIP.efficiency / CHIP.hbm * CHIP.clock + LATENCY
    assert (done.read, done.written) == ({1: bytes_of_each}, {2: bytes_of_each})
    assert done.copies == 2 and done.moved == 2 * bytes_of_each
    # The first copy starts with bundle 1, the second when the first has come; either wait is passed as it ends.
    assert done.cycles == pytest.approx(1 + each + 3 + each + 1, abs=1)
    assert done.stalled == pytest.approx(2 * (each - 1), abs=1)


def test_copies_in_flight_share_one_engine_and_their_latencies_pass_together():
    def cycles(n):
        return run(BOTH, *[READ.format("", 1024, "")] * n, *wait_for(1024 * n)).cycles

    one = 1024 * 32 / CHIP.efficiency / CHIP.hbm * CHIP.clock
    assert cycles(8) - cycles(4) == pytest.approx(4 * one)
    assert cycles(1) == pytest.approx(LATENCY + one, abs=3)


def test_a_copy_with_a_stride_is_slower():
    strided = ", /*src_stride=*/64, /*dst_stride=*/32, /*steps_per_stride=*/2"
    plain, slower = (run(BOTH, READ.format("", 4096, s), *wait_for(4096)).stalled for s in ("", strided))
    assert (slower - LATENCY) / (plain - LATENCY) == pytest.approx(CHIP.efficiency / CHIP.strided, rel=0.01)


DECIDES = [
    f"{BOTH}  ;;  {NUMBERS}",
    TO_SMEM,
    "%14 = dma.done.wait [#allocation6], 1",
    "%15 = vsyncadd [#allocation6], 4294967295",
    "%s16_s5 = sld [smem:[#allocation5 + 0x2]]",
    "%p1_p1 = scmp.eq.s32.totalorder %s16_s5, 7",
    READ.format("(%p1_p1),", 8, ""),
    "%12 = dma.done.wait (%p1_p1), [#allocation8], 8",
    "%13 = vsyncadd (%p1_p1), [#allocation8], 4294967288",
]


@pytest.mark.parametrize(("number", "copied"), [(7, 256), (6, 0)])
def test_an_operand_in_scalar_memory_decides_what_is_copied(number, copied):
    assert run(*DECIDES, _0=[0, 0, number, 0]).moved == copied


def test_an_operand_that_is_a_value_is_read_where_it_is_used():
    bundles = [f"{BOTH}  ;;  {VALUE}", READ.format("", "%s3_s3", "")]
    waits = ["%12 = dma.done.wait [#allocation8], %s3_s3", "%s4_s4 = ssub.s32 0, %s3_s3"]
    done = run(*bundles, *waits, "%13 = vsyncadd [#allocation8], %s4_s4", _0=[3])
    assert done.moved == 96


def test_what_a_false_condition_would_have_written_is_the_other_value():
    taken = "%s5_s5 = smov (%p1_p1, 7), 9"
    size = ["%p1_p1 = scmp.eq.s32.totalorder 0, {}", taken, READ.format("", "%s5_s5", "")]
    for first, granules in ((0, 9), (1, 7)):
        first_bundle, *rest = size
        assert run(BOTH, first_bundle.format(first), *rest, *wait_for(granules)).moved == 32 * granules


@pytest.mark.parametrize(
    ("bundles", "message"),
    [
        ([BOTH, WAIT.format(4)], "nothing ends a wait, its semaphore has 0 of 4"),
        ([BOTH, READ.format("", 4, ""), WAIT.format(5)], "nothing ends a wait, its semaphore has 4 of 5"),
        ([BOTH, READ.format("", 4, "")], "semaphores that do not end at zero: allocation 2 . 0 has 4"),
        ([BOTH, READ.format("", 4, ""), WAIT.format(4)], "do not end at zero"),
        ([BOTH, TAKE.format(1)], "do not end at zero"),
        ([READ.format("", 4, ""), *wait_for(4)], "unknown: %s1_s1 was never written"),
        ([BOTH, "%2 = vsyncpa [#allocation8], 0", READ.format("", 4, ""), WAIT.format(4),
          "%2 = vsyncpa [#allocation8], 1"],
         "not zero where its use begins or ends"),
        (["%p1_p1 = scmp.eq.s32.totalorder 0, 0", "%2 = shalt.err (%p1_p1) /* bounds */"], "the kernel halts.*bounds"),
        (["%s4_s4 = sld [smem:[#allocation5]]", "%2 = sbr.rel (%p1_p1) target bundleno = 0 (0x0), region = 1"],
         "%p1_p1 was never written"),
        (["%s4_s4 = sld [smem:[#allocation5]]", "%p1_p1 = scmp.eq.s32.totalorder %s4_s4, 0",
          "%2 = sbr.rel (%p1_p1) target bundleno = 0 (0x0), region = 1"], "scalar memory at allocation 1 . 0"),
        (["%s4_s4 = vtos.a %v3", "%p1_p1 = scmp.eq.s32.totalorder %s4_s4, 0",
          "%2 = sbr.rel (%p1_p1) target bundleno = 0 (0x0), region = 1"], "%s4_s4 comes from a vector"),
        (["%2 = sbr.rel target bundleno = 4 (0x4), region = 1", "%3 = sbr.rel target bundleno = 4 (0x4), region = 1",
          "", "", "", "", "", ""], "a branch is taken while another is"),
    ],
)  # fmt: skip
def test_what_would_make_the_time_wrong_is_an_error(bundles, message):
    with pytest.raises(SimulationError, match=message):
        run(*bundles)


def test_what_is_unknown_may_be_computed_with_where_nothing_depends_on_it():
    """A compiler moves loads before the branch that skips what needs them."""
    assert run("%s4_s4 = sld [smem:[#allocation5]]", "%s5_s5 = sadd.s32 %s4_s4, 1").bundles == 2


LOADED = ["%s4_s4 = sld [smem:[#allocation5]]", "%p1_p1 = scmp.gt.s32.totalorder %s4_s4, 0"]
CHOICES = [
    "%s5_s5 = scalar_select /*predicate=*/%p1_p1, /*on_true=*/1, /*on_false=*/2",
    "%s5_s5 = smov (%p1_p1, 1), 2",
    "%s5_s5 = smov (!%p1_p1, 2), 1",
]


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_chosen_by_the_unknown_is_unknown_and_may_be_unused(choice):
    """A compiler lets a load that a false condition would skip read memory that nothing writes."""
    assert run(*LOADED, choice, "%s6_s6 = sadd.s32 %s5_s5, 1").bundles == 4
    taken = "%2 = sbr.rel (%p2_p2) target bundleno = 0 (0x0), region = 1"
    with pytest.raises(SimulationError, match=r"allocation 1 \+ 0 was never written"):
        run(*LOADED, choice, "%p2_p2 = scmp.eq.s32.totalorder %s5_s5, 1", taken)


@pytest.mark.parametrize(
    ("operands", "message"),
    [({}, r"operand 0, s32\[4\], is missing"), ({"_0": [1, 2]}, r"operand 0 has the shape \[4\].*given with \[2\]")],
)
def test_an_operand_that_is_missing_or_of_another_shape_is_an_error(operands, message):
    with pytest.raises(SimulationError, match=message):
        run(*DECIDES, **operands)


CORE = "%s9_s9 = sld [smem:[#allocation0]] /* core id */"


def test_a_grid_that_is_divided_takes_as_long_as_its_slowest_core_and_moves_the_bytes_of_both():
    chip = CHIPS["v5p"]
    share = ["%s5_s5 = sadd.s32 1024, %s9_s9", "%s6_s6 = ssub.s32 0, %s5_s5"]
    copy = [READ.format("", "%s5_s5", ""), "%12 = dma.done.wait [#allocation8], %s5_s5"]
    bundles = [f"{CORE}  ;;  {BOTH}", *share, *copy, "%13 = vsyncadd [#allocation8], %s6_s6"]
    done = run(*bundles, chip=chip)
    assert done.read == {1: (1024 + 1025) * 32}
    one = run(BOTH, "%s9_s9 = smov 1", *share, *copy, "%13 = vsyncadd [#allocation8], %s6_s6", chip=chip)
    assert done.cycles == pytest.approx(one.cycles, abs=1.01) and one.read == {1: 1025 * 32}


@pytest.mark.parametrize(("kind", "granules"), [("kDiv", 5), ("kRem", 2), ("kDivAndRem", 5 * 2)])
def test_a_division_gives_its_quotient_then_its_remainder(kind, granules):
    results = ["%s6_s6 = spop.drf %5", "%s7_s7 = spop.drf %5" if kind == "kDivAndRem" else "%s7_s7 = smov 1"]
    product = "%s8_s8 = smul.u32 %s6_s6, %s7_s7"
    division = f"%5 = sdivrem.u32 17, 3 /* {kind} */"
    assert (
        run(BOTH, division, *results, product, READ.format("", "%s8_s8", ""), *wait_for(granules)).moved
        == 32 * granules
    )


def test_a_sabotaged_kernel_has_another_figure_or_is_an_error():
    turn = [READ.format("", 256, ""), *wait_for(256)]
    whole = run(BOTH, *turn, *turn)
    assert run(BOTH, *turn, *turn, *turn).moved == 3 * 256 * 32 != whole.moved  # a block read twice
    with pytest.raises(SimulationError, match="do not end at zero"):
        run(BOTH, *turn, READ.format("", 256, ""))  # a wait less
    assert run(BOTH, turn[0], turn[0], *wait_for(512)).cycles < whole.cycles  # read ahead
