"""Counting machine instructions of GPU kernels: the main loop of a listing, and what a multiprocessor holds."""

from collections import Counter

import pytest

from scripts.compiled_code.sass import MULTIPROCESSORS, main_loop, read_sass

LISTING = """
	.target	sm_90a
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
.L_x_1:
        /*0030*/                   LDSM.16.M88.4 R8, [R9] ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0050*/             @!UP0 UIADD3 UR4, UR5, 0x1, URZ ;
        /*0060*/              @!P0 BRA `(.L_x_3) ;
        /*0070*/                   MUFU.EX2 R7, R7 ;
.L_x_3:
        /*0080*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0090*/               @P1 BRA `(.L_x_1) ;
        /*00a0*/               @P2 BRA `(.L_x_2) ;
        /*00b0*/                   EXIT ;
.L_x_4:
        /*00c0*/                   BRA `(.L_x_4);
        /*00d0*/                   NOP;
"""


def test_the_main_loop_is_the_innermost_of_those_with_the_most_products():
    loop = main_loop(read_sass(LISTING))  # the outer one has a product more
    assert loop == {"IADD3": 1, "HMMA": 3, "LDSM": 1, "UIADD3": 1, "BRA": 3, "MUFU": 1}
    inner = main_loop(read_sass(LISTING.replace("/*0020*/                   HMMA", "/*0020*/                   FFMA")))
    assert inner == {"LDSM": 1, "HMMA": 2, "UIADD3": 1, "BRA": 2, "MUFU": 1}


def test_without_matrix_products_float_products_tell_the_main_loop():
    loop = main_loop(read_sass(LISTING.replace("HMMA.16816.F32.BF16", "FFMA")))
    assert loop["FFMA"] == 3


def test_a_path_of_threads_that_part_is_no_part_of_the_loop():
    apart = LISTING.replace("MUFU.EX2 R7, R7 ;", "BRA.DIV `(.L_x_5) ;").replace(
        "/*00d0*/                   NOP;",
        "NOP;\n.L_x_5:\n        /*00e0*/    FADD R1, R1, R1 ;\n        /*00f0*/    BRA `(.L_x_3) ;",
    )
    assert main_loop(read_sass(apart)) == main_loop(read_sass(LISTING)) - Counter(MUFU=1) + Counter(BRA=1)


def test_code_that_stands_in_a_loop_and_leaves_it_does_not_count():
    leaves = LISTING.replace("@!P0 BRA `(.L_x_3)", "@!P0 BRA `(.L_x_6)").replace(
        "/*00d0*/                   NOP;",
        "NOP;\n.L_x_6:\n        /*00e0*/    FADD R1, R1, R1 ;\n        /*00f0*/    EXIT ;",
    )
    assert main_loop(read_sass(leaves)) == main_loop(read_sass(LISTING))


@pytest.mark.parametrize("branch", ["BRA.U UP0, `(.L_x_1)", "@!P0 BRA `(.L_x_1)", "BRA P1, `(.L_x_1)"])
def test_a_condition_may_be_an_operand(branch):
    listing = f".L_x_1:\n  /*0000*/  HMMA R1 ;\n  /*0010*/  {branch} ;\n  /*0020*/  EXIT ;\n"
    blocks = read_sass(listing)
    assert main_loop(blocks) == {"HMMA": 1, "BRA": 1}
    assert sorted(blocks[0].after) == [0, 1]


def test_a_listing_without_a_loop_is_an_error():
    with pytest.raises(ValueError, match="no loop in"):
        main_loop(read_sass("  /*0000*/  EXIT ;\n.L_x_0:\n  /*0010*/  BRA `(.L_x_0);\n"))


@pytest.mark.parametrize(
    ("capability", "registers", "shared", "warps", "share"),
    [
        (80, 32, 0, 4, 1.0),
        (90, 255, 0, 8, 0.125),  # 8,192 registers a warp: two in each quarter
        (90, 168, 0, 4, 0.1875),  # 5,376 a warp: three in each quarter
        (80, 32, 80 << 10, 4, 0.125),  # two programs' shared memory
        (89, 64, 0, 1, 0.5),  # 24 programs of one warp
        (75, 64, 65 << 10, 4, 0.0),  # one program's shared memory does not fit
    ],
)
def test_occupancy_follows_from_the_scarcest_resource(capability, registers, shared, warps, share):
    place = MULTIPROCESSORS[capability]
    assert place.occupancy(registers=registers, shared=shared, warps=warps) == share
