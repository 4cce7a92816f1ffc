"""The reader of a TPU kernel's final schedule, on a dump short enough to count by hand."""

import pytest

from scripts.compiled_code.llo_bundles import (
    Turn,
    busiest_turn,
    cycles_of_grid,
    inner_copying_turn,
    last_copying_turn,
    multiplying_turn,
    parse,
    steady_turn,
    turn_without_copies,
)

DMA = "%{} = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1, /*size_in_granules=*/{}, /*vmem=*/%s2"
MULTIPLY = "%9 = vmatmul.bf16.gmra.mxu0 %v3"
DELAY = ["", "", "", ""]


def dump(*bundles):
    """A dump of bundles given as "marks | instructions | comments", of which the first and last may be left out."""
    lines = ["= control target key start", "LB: loop body", ""]
    for address, bundle in enumerate(bundles):
        marks, _, rest = bundle.rpartition("| ") if bundle.count("|") else ("", "", bundle)
        instructions, _, comment = rest.partition("//")
        lines.append(f" {hex(address)} {marks}: > {{ {instructions} }} /* {comment} */")
    return "\n".join(lines)


def test_a_turn_ends_with_the_bundles_that_run_while_it_branches_back():
    loop = [
        "LB| //Start region 7",
        DMA.format(1, 4),
        f"{MULTIPLY}  ;;  {DMA.format(2, 2)}",
        f"%6 = shalt.err (!%p3) /* BoundsCheck 1 for {DMA.format(2, 99)}",
        "%5 = sbr.rel (!%p1_p0) target = $region7",
        *DELAY,
    ]
    assert steady_turn(parse(dump("", *loop, "PF| "))) == Turn(cycles=9, dma_bytes=32 * 6)


def test_of_two_exclusive_ways_the_one_that_copies_more_counts():
    loop = [
        "LB| //Start region 7",
        "%1 = sbr.rel (%p1_p0) target = $region8",
        *DELAY,
        MULTIPLY,
        DMA.format(2, 10),
        "%3 = sbr.rel (!%p1_p0) target = $region9//Start/End empty region 8",
        *DELAY,
        DMA.format(4, 9),
        "%5 = sbr.rel (!%p2_p0) target = $region7//Start/End empty region 9 :: Start region 3",
        *DELAY,
    ]
    # Taken: region 8 without its bundles. Not taken: 2 + 4 + 2 to the second branch, which then skips the last copy.
    assert steady_turn(parse(dump(*loop))) == Turn(cycles=2 + 4 + 2 + 1 + 4 + 1 + 4, dma_bytes=320)


def test_of_equal_copies_the_shorter_way_counts():
    loop = [
        f"LB| {MULTIPLY}//Start region 7",
        DMA.format(1, 1),
        "%1 = sbr.rel (%p1_p0) target = $region8",
        *DELAY,
        *["%s5 = sadd.s32 1, %s4"] * 10,
        "PF| %5 = sbr.rel (!%p2_p0) target = $region7//Start/End empty region 8",
        *DELAY,
    ]
    assert steady_turn(parse(dump(*loop))) == Turn(cycles=2 + 5 + 5, dma_bytes=32)


def test_the_innermost_loop_that_copies_and_multiplies_is_the_one():
    loop = [
        f"LB| {DMA.format(1, 100)}//Start region 1",
        f"LB| {MULTIPLY}//Start region 2",
        DMA.format(2, 1),
        f"LB| {DMA.format(3, 50)}//Start region 3",
        "%5 = sbr.rel (!%p3_p0) target = $region3",
        *DELAY,
        "%6 = sbr.rel (!%p2_p0) target = $region2",
        *DELAY,
        "%7 = sbr.rel (!%p1_p0) target = $region1",
        *DELAY,
    ]
    assert steady_turn(parse(dump(*loop))) == Turn(cycles=4 + 4 + 1 + 4, dma_bytes=32 * 51)


def test_keys_that_are_masked_are_multiplied_by_the_innermost_loop():
    loop = [
        f"LB| {DMA.format(1, 1)}  ;;  {MULTIPLY}//Start region 1",
        f"LB| {MULTIPLY}//Start region 2",
        "%5 = sbr.rel (!%p2_p0) target = $region2",
        *DELAY,
        "%6 = sbr.rel (!%p1_p0) target = $region1",
        *DELAY,
    ]
    assert multiplying_turn(parse(dump(*loop))) == Turn(cycles=2 + 4, dma_bytes=0)
    with pytest.raises(ValueError, match="no loop"):
        multiplying_turn(parse(dump(MULTIPLY)))


def test_chunks_that_share_what_was_copied_are_counted_by_the_way_that_multiplies_most():
    loop = [
        f"LB| {DMA.format(1, 1)}//Start region 1",
        "LB| %1 = sbr.rel (%p4_p0) target = $region4//Start region 2",
        *DELAY,
        *[MULTIPLY] * 3,
        "%2 = sbr.rel target = $region5",
        *DELAY,
        f"LB| {MULTIPLY}//Start region 4",
        "%5 = sbr.rel (!%p3_p0) target = $region4",
        *DELAY,
        "PF| %6 = sbr.rel (!%p2_p0) target = $region2//Start region 5",
        *DELAY,
        "%7 = sbr.rel (!%p1_p0) target = $region1",
        *DELAY,
    ]
    assert turn_without_copies(parse(dump(*loop))) == Turn(cycles=5 + 3 + 5 + 5, dma_bytes=0)
    with pytest.raises(ValueError, match="starts no copy"):
        turn_without_copies(parse(dump(MULTIPLY)))


def test_the_loop_with_most_products_is_counted_whatever_multiplies_before_it_in_a_grid():
    loop = [
        f"LB| {DMA.format(1, 9)}  ;;  {MULTIPLY}//Start region 1",
        "%1 = sbr.rel (%p4_p0) target = $region4",
        *DELAY,
        *[f"LB| {MULTIPLY}//Start region 2", MULTIPLY, "%5 = sbr.rel (!%p2_p0) target = $region2", *DELAY],
        "PF| %7 = sbr.rel (!%p1_p0) target = $region1//Start/End empty region 4",
        *DELAY,
    ]
    assert busiest_turn(parse(dump(*loop))) == Turn(cycles=3 + 4, dma_bytes=0)
    assert steady_turn(parse(dump(*loop))) == Turn(cycles=2 + 4 + 5, dma_bytes=32 * 9)
    with pytest.raises(ValueError, match="most of the matrix products"):
        busiest_turn(parse(dump(MULTIPLY)))


def test_a_kernel_that_only_copies_has_no_such_loop():
    loop = [f"LB| {DMA.format(1, 4)}//Start region 7", "%5 = sbr.rel (!%p1_p0) target = $region7", *DELAY]
    with pytest.raises(ValueError, match="no loop"):
        steady_turn(parse(dump(*loop)))


def test_of_loops_that_only_copy_the_last_one_counts_with_what_it_writes():
    write = "%4 = dma.vmem_to_hbm [thread:$0]  /*vmem=*/%s1, /*size_in_granules=*/3, /*hbm=*/%s2"
    loops = [
        *[f"LB| {DMA.format(1, 9)}//Start region 1", "%5 = sbr.rel (!%p1_p0) target = $region1", *DELAY],
        *[f"LB| {DMA.format(2, 1)}//Start region 2", write, "%6 = sbr.rel (!%p2_p0) target = $region2", *DELAY],
        *["LB| //Start region 3", "%7 = sbr.rel (!%p3_p0) target = $region3", *DELAY],
    ]
    assert last_copying_turn(parse(dump(*loops))) == Turn(cycles=3 + 4, dma_bytes=32 * (1 + 3))
    with pytest.raises(ValueError, match="no loop"):
        last_copying_turn(parse(dump(*loops[-6:])))


def test_of_loops_within_the_last_one_the_longest_that_copies_counts():
    loops = [
        *[f"LB| {DMA.format(1, 9)}//Start region 1", *[""] * 9, "%5 = sbr.rel (!%p1_p0) target = $region1", *DELAY],
        f"LB| {DMA.format(2, 1)}//Start region 2",
        *[f"LB| {DMA.format(3, 2)}//Start region 3", "%6 = sbr.rel (!%p3_p0) target = $region3", *DELAY],
        *[f"LB| {DMA.format(4, 3)}//Start region 4", "", "%7 = sbr.rel (!%p4_p0) target = $region4", *DELAY],
        *["LB| //Start region 5", *[""] * 5, "%8 = sbr.rel (!%p5_p0) target = $region5", *DELAY],
        "%9 = sbr.rel (!%p2_p0) target = $region2",
        *DELAY,
    ]
    assert inner_copying_turn(parse(dump(*loops))) == Turn(cycles=3 + 4, dma_bytes=32 * 3)
    with pytest.raises(ValueError, match="no loop that starts copies within another"):
        inner_copying_turn(parse(dump(*loops[:15])))


def test_a_grids_cycles_are_those_of_all_its_turns_and_of_what_stands_around_it():
    inner = [f"LB| {MULTIPLY}//Start region 2", "%5 = sbr.rel (!%p2_p0) target = $region2", *DELAY]
    grid = [f"LB| {DMA.format(1, 1)}//Start region 1", *inner, "%6 = sbr.rel (!%p1_p0) target = $region1", *DELAY]
    kernel = parse(dump("", *grid, "PF| "))
    assert cycles_of_grid(kernel, 3, 5) == 1 + 3 * (1 + 5 * 6 + 5) + 1
    assert cycles_of_grid(parse(dump("", *inner, "PF| ")), 1, 5) == 1 + 5 * 6 + 1
    assert cycles_of_grid(parse(dump(MULTIPLY, "PF| ")), 1, 1) == 2
    with pytest.raises(ValueError, match="2 loops"):
        cycles_of_grid(kernel, 3, 1)


def test_what_is_no_dump_is_refused():
    with pytest.raises(ValueError, match="no bundles"):
        parse("nothing here")


def test_a_copy_of_unknown_size_is_refused():
    with pytest.raises(ValueError, match="not a constant"):
        parse(dump("%1 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1, /*size_in_granules=*/%s9, /*vmem=*/%s2"))
