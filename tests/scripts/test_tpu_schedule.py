"""The reader of a TPU kernel's schedule."""

import pytest

from scripts.compiled_code.tpu_schedule import ADDRESS, Unknown, parse, wrap


def dump(*bundles):
    return "\n".join(f" {hex(at)} LB: >> {{ {text} }} /* Start region {at} */" for at, text in enumerate(bundles))


@pytest.mark.parametrize("text", ["", "nothing here", "= control target key start\nLB: loop body\n"])
def test_an_empty_dump_is_refused(text):
    with pytest.raises(ValueError, match="no bundles in what should be a dump of packed-bundles-post-ra"):
        parse(text)


@pytest.mark.parametrize(
    "instruction",
    [
        "%s1_s1 = sfoo.u32 %s2_s2, %s3_s3",
        "%9 = dma.hbm_to_moon",
        "%9 = spark [#allocation1]",
        "%9 = sbr.rel target = $region7",
        "%s1_s1 = sadd.s32 %s2_s2",
        "%s1_s1 = sadd.s32 odd, 1",
        "%p1_p1 = scmp.almost.s32 %s2_s2, 1",
    ],
)
def test_an_instruction_that_is_unknown_is_refused_with_its_text(instruction):
    with pytest.raises(ValueError, match="unknown instruction") as caught:
        parse(dump("", instruction))
    assert instruction[:20] in str(caught.value)


def test_a_dump_of_which_a_part_is_missing_is_refused():
    whole = dump("", "", "").splitlines()
    with pytest.raises(ValueError, match="bundle 2 comes as number 0x1"):
        parse("\n".join([whole[0], whole[2]]))


def test_vectors_take_their_cycle_and_are_no_empty_bundles():
    schedule = parse(dump("%v1 = vadd.f32 %v2, %v3  ;;  %7 = vst [vmem:[%s1_s1]] sm:$0xff %v1", "", "%8 = sfence"))
    assert [(bundle.writes, bundle.effects, bundle.is_empty) for bundle in schedule.bundles] == [
        ((), (), False),
        ((), (), True),
        ((), (), False),
    ]


def test_operands_have_their_place_shape_and_memory():
    text = "%s1_s7 = inlined_call_operand.{} [shape: {}, index: {}, kind: {}, shape index: {{}}]"
    given = [
        text.format("<no memory space>", "s32[1]", 0, "input"),
        text.format("vmem", "s32[12,64]", 1, "input"),
        text.format("hbm", "bf16[64,1,4,128]", 3, "output"),
    ]
    found = [(o.index, o.dtype, o.shape, o.memory, o.is_output) for o in parse(dump("  ;;  ".join(given))).operands]
    assert found == [
        (0, "s32", (1,), "value", False),
        (1, "s32", (12, 64), "vmem", False),
        (3, "bf16", (64, 1, 4, 128), "hbm", True),
    ]


ARITHMETIC = [
    ("sadd.s32 2147483647, 1", -(1 << 31)),
    ("ssub.s32 0, 1", -1),
    ("smul.u32 65536, 65536", 0),
    ("smulhi.u32 65536, 65536", 1),
    ("sand.u32 4294967280, 255", 240),
    ("sor.u32 8, 1", 9),
    ("sxor.u32 9, 1", 8),
    ("sshll.u32 1, 31", -(1 << 31)),
    ("sshll.u32 1, 32", 0),
    ("sshrl.u32 4294967295, 28", 15),
    ("sshra.s32 4294967295, 28", -1),
    ("smin.u32 4294967295, 1", 1),
    ("smin.s32 4294967295, 1", -1),
    ("smax.u32 4294967295, 1", -1),
    ("scmp.lt.u32.totalorder 4294967295, 1", 0),
    ("scmp.lt.s32.totalorder 4294967295, 1", 1),
    ("pnand 1, 1", 0),
    ("por 0, 1", 1),
    ("pneg 0", 1),
    ("sclz 1", 31),
    ("scalar_select /*predicate=*/%s2_s2, /*on_true=*/5, /*on_false=*/6", 5),
    ("scalar_lea.hbm 5, 6", 11),
]


@pytest.mark.parametrize(("text", "result"), ARITHMETIC)
def test_arithmetic_is_that_of_32_bits(text, result):
    ((write,), _, _) = parse(dump(f"%s1_s1 = {text}")).bundles[0]
    assert write.value([Unknown("")]) == result


def test_a_result_is_unknown_where_an_operand_is_and_to_decide_by_it_raises():
    ((write,), _, _) = parse(dump("%s1_s1 = sadd.s32 %s2_s2, 1")).bundles[0]
    unknown = write.value([Unknown("a"), Unknown("b")])
    assert isinstance(unknown, Unknown)
    for decide in (bool, lambda x: x == 1, lambda x: {}.get(x), lambda x: x + 1, lambda x: x < 1):
        with pytest.raises(TypeError):
            decide(unknown)


@pytest.mark.parametrize(
    ("text", "result"),
    [("pnand %p2_p2, 0", 1), ("pand 0, %p2_p2", 0), ("por %p2_p2, 1", 1), ("pnor 1, %p2_p2", 0)]
    + [(f"{op} %p2_p2, {other}", None) for op, other in (("pnand", 1), ("pand", 1), ("por", 0), ("pnor", 0))],
)
def test_an_operand_that_decides_alone_decides_whatever_the_other_is(text, result):
    ((write,), _, _) = parse(dump(f"%p1_p1 = {text}")).bundles[0]
    found = write.value([Unknown("")] * 2)
    assert isinstance(found, Unknown) if result is None else found == result


def test_units_of_an_address_change_and_what_it_is_of_does_not():
    bundle = parse(
        dump("%s1_s1 = sshll.u32 %s2_s2, 4  ;;  %s3_s3 = int_to_ptr.vmem [resolvable:$true] %s1_s1")
    ).bundles[0]
    assert [write.kind for write in bundle.writes] == ["set", "alias"]
    assert bundle.writes[0].value([None, 7 * ADDRESS + 3]) == 7 * ADDRESS + 48
    assert wrap(7 * ADDRESS + 3) == 7 * ADDRESS + 3
