"""Bounds and steps of numbers hold in every text that llguidance takes, whatever floats it makes of them."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from fractions import Fraction

import pytest
from followed_texts import compiled, follows, takes
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged.json_numbers import decimal_of, reach, unfollowed_step
from jpaged.json_schema import first_unfollowed, followable, followed_as_far_as_can_be

FAR = [2**53 + 1, 2**60 - 1, 2**60 + 1, 10**18, 2**63 - 1, 2**63, 10**30]
EDGES = [sign * edge for edge in FAR for sign in (1, -1)]
STEPS = [0.25, 0.1, 0.01, 1e-3, 1.5, 2.5, 0.125, 0.04, 0.07, 0.5, 0.375, 3, 10, 1e-05]
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def fits(schema: dict, value: Fraction) -> bool:
    """What the standard says, in exact numbers; the package jsonschema divides floats."""
    bound = {key: Fraction(Decimal(str(number))) for key, number in schema.items() if key != "type"}
    return (
        bound.get("minimum", value) <= value <= bound.get("maximum", value)
        and not ("exclusiveMinimum" in bound and value <= bound["exclusiveMinimum"])
        and not ("exclusiveMaximum" in bound and value >= bound["exclusiveMaximum"])
        and (value / bound.get("multipleOf", value or 1)).denominator == 1
    )


def written(digits: int, decimals: int) -> str:
    text = str(abs(digits)).rjust(decimals + 1, "0")
    return "-" * (digits < 0) + (f"{text[:-decimals]}.{text[-decimals:]}" if decimals else text)


@st.composite
def bounds_of_decimals(draw):
    """A schema of bounds and a step, and numbers around its bounds in their shortest form."""
    decimal = st.builds(
        lambda digits, places: float(written(digits, places)), st.integers(-9999, 9999), st.integers(0, 3)
    )
    low, high = sorted((draw(decimal), draw(decimal)))
    schema = {"type": draw(st.sampled_from(["number", "number", "integer"]))}
    for keywords, bound in ((LOWER, low), (UPPER, high)):
        if draw(st.booleans()):
            schema[draw(st.sampled_from(keywords))] = bound
    if draw(st.booleans()):
        schema["multipleOf"] = draw(st.sampled_from(STEPS))
    places = decimal_of(schema["multipleOf"])[1] if "multipleOf" in schema else 3
    numbers = []
    for _ in range(20):
        decimals = 0 if schema["type"] == "integer" else draw(st.integers(0, places))
        near = draw(st.sampled_from([low, high, 0])) + draw(st.integers(-30, 30)) / 10**decimals
        digits = int(near * 10**decimals)
        while decimals and digits % 10 == 0:
            digits, decimals = digits // 10, decimals - 1
        numbers.append((digits, decimals))
    return schema, numbers


@settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
@given(bounds_of_decimals())
def test_a_number_is_taken_if_its_bounds_and_its_step_allow_it(drawn):
    schema, numbers = drawn
    wanted = {written(*number): fits(schema, Fraction(number[0], 10 ** number[1])) for number in numbers}
    try:
        grammar = compiled(schema)
    except ValueError as error:
        assert "Unsatisfiable" in str(error) and not any(wanted.values())
        return
    assert {text: follows(grammar, text) for text in wanted} == wanted


@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"], None])
def test_no_bound_is_rounded_outwards_and_64_bits_stay_within_reach(kind):
    for bound, keyword in itertools.product(EDGES, LOWER + UPPER):
        schema = {keyword: bound} if kind is None else {"type": kind, keyword: bound}
        least, most = reach(schema)
        try:
            grammar = compiled(schema)
        except ValueError as error:
            refused = f"the limits are {least} and {most}" in str(error) or "Unsatisfiable" in str(error)
            assert refused and abs(bound) >= min(-least, most)
            continue
        for value in (bound - 2048, bound - 1, bound, bound + 1, bound + 2048, 5, -(10**30)):
            taken, fit = follows(grammar, str(value)), fits(schema, Fraction(value))
            assert fit or not taken, (schema, value)
            far = not least <= value <= most or abs(value - bound) < 2048  # floats there are up to 1,024 apart
            assert taken or not fit or far, (schema, value)


@pytest.mark.parametrize(
    ("bounds", "least", "most"),
    [
        ({"minimum": 0, "maximum": 2**63 - 1}, 0, 2**63 - 1),
        ({"minimum": 10**18}, 10**18, 2**63 - 1),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": 2**63}, 0, 2**63 - 1),
        ({"minimum": 2**63 - 1, "maximum": 2**63 - 1}, 2**63 - 1, 2**63 - 1),
        ({"minimum": -(2**63) + 1024, "maximum": 2**53}, -(2**63) + 1024, 2**53),
        ({"minimum": -(2**53) + 1, "maximum": 2**53 - 1}, -(2**53) + 1, 2**53 - 1),
        ({"exclusiveMinimum": 2**53, "maximum": 2**64}, 2**53 + 2, 2**63 - 1),
        ({"exclusiveMinimum": 2**60, "maximum": 2**62}, 2**60 + 256, 2**62),
        ({"minimum": 2**60, "exclusiveMinimum": True, "maximum": 2**62}, 2**60 + 256, 2**62),
    ],
)
def test_bounds_of_64_bits_are_exact_where_floats_are(bounds, least, most):
    grammar = compiled({"type": "integer", **bounds})
    assert follows(grammar, str(least)) and follows(grammar, str(most))
    assert not follows(grammar, str(most + 1)) and not follows(grammar, str(least - 1))


def test_a_step_that_a_float_misses_by_a_hair_is_followed_and_one_that_none_reads_as_is_named():
    assert takes({"type": "number", "multipleOf": 0.07}, "0.21") and not takes(
        {"type": "number", "multipleOf": 0.07}, "0.2"
    )
    lost = {"type": "number", "multipleOf": 19.99}
    with pytest.raises(ValueError, match=r"multipleOf=19\.99 of numbers, which cannot be followed"):
        takes(lost, "19.99")
    assert first_unfollowed(lost) == "multipleOf 19.99" and followed_as_far_as_can_be(lost) == {"type": "number"}
    assert takes({"type": "integer", "multipleOf": 19.99}, "1999") and unfollowed_step({"multipleOf": 19.99})


def test_other_types_and_other_unions_stay_with_a_step():
    schema = {"multipleOf": 0.25, "anyOf": [{"maximum": 5}, {"type": "string"}]}
    assert takes(schema, "0.5") and takes(schema, '"a"') and not takes(schema, "0.3") and not takes(schema, "5.5")
    assert takes({"multipleOf": 0.25}, json.dumps([0.3])) and takes(
        {"allOf": [{"multipleOf": 0.5}, {"multipleOf": 0.2}]}, "1"
    )


def test_both_bounds_of_a_side_hold():
    for bounds in ({"maximum": 12.25, "exclusiveMaximum": 10}, {"maximum": 12.25, "exclusiveMaximum": 10.55}):
        grammar = compiled({"type": "number", **bounds})
        assert follows(grammar, "9.5") and not follows(grammar, "12") and not follows(grammar, "12.2")


def test_a_schema_that_was_rewritten_means_the_same_once_more():
    schema = {"type": "number", "multipleOf": 0.07, "maximum": 12.25, "exclusiveMinimum": -(2**60)}
    again = followable(followable(schema))
    for text, fit in (("0.7", True), ("0.14", True), ("12.18", True), ("12.2", False), ("0.1", False), ("-7", True)):
        assert takes(schema, text) is takes(again, text) is fit, text


@pytest.mark.parametrize("odd", [{"allOf": 5}, {"allOf": None}, {"minimum": 10**400}, {"maximum": -(10**400)}])
def test_what_is_no_schema_is_left_to_be_refused(odd):
    for more in ({"multipleOf": 0.25}, {"maximum": 12.25}, {"minimum": -12.25, "multipleOf": "a"}):
        assert followable({"type": "number", **more, **odd}) and followed_as_far_as_can_be({**more, **odd})
