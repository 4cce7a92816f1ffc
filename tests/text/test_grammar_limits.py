"""Shapes that would take the compiler's stack, or more time than a request may have, are refused before it begins."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time

import pytest

from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.grammar_limits import (
    MOST_ALTERNATIVES,
    MOST_ALTERNATIVES_IN_ALL,
    MOST_CHOICES,
    MOST_INTERSECTIONS,
    MOST_LEVELS,
    check_lark,
    check_limits,
    check_schemas,
    longest_chain,
)


def schema_chain(num, link, pointer="#/$defs/a{}"):
    """A schema whose parts refer to one another, one after the other."""
    parts = {f"a{i}": link({"$ref": pointer.format(i + 1)}) for i in range(num)}
    return {"$ref": pointer.format(0), "$defs": {**parts, f"a{num}": {"type": "string"}}}


def lark_chain(num, line, name="a"):
    rules = [line.format(i, i + 1) for i in range(num)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{num}: "x"'])


def check(**shape):
    params = StructuredOutputsParams(**shape)
    check_limits(params, params.grammar)


LINKS = {
    "a reference": (lambda ref: ref, 1),
    "all of": (lambda ref: {"allOf": [ref]}, 2),
    "a property": (lambda ref: {"type": "object", "properties": {"x": ref}}, 3),
    "items": (lambda ref: {"type": "array", "items": {"items": ref}}, 3),
}


@pytest.mark.parametrize("kind", LINKS)
def test_a_schemas_references_go_so_deep_and_no_deeper(kind):
    link, levels = LINKS[kind]
    most = (MOST_LEVELS - 3) // levels  # two levels are those of the schema itself, one that of the last part
    check(json=schema_chain(most, link))
    for more in (1, 10_000):
        with pytest.raises(ValueError, match=rf"json nests \d+ levels deep, .*, the limit is {MOST_LEVELS}"):
            check(json=schema_chain(most + more, link))


@pytest.mark.parametrize("name", ["/$defs/a{}", "http://a.example/#/$defs/a{}", "#name{}", "#/%24defs/a{}"])
def test_references_by_another_name_are_no_way_around_the_limit(name):
    with pytest.raises(ValueError, match="levels deep"):
        check(json=schema_chain(MOST_LEVELS, lambda ref: ref, name))


@pytest.mark.parametrize("key", ["$id", "id"])
def test_parts_that_have_ids_are_no_way_around_the_limit(key):
    parts = {f"a{i}": {key: f"http://a.example/{i}", "$ref": f"#/$defs/a{i + 1}"} for i in range(MOST_LEVELS)}
    with pytest.raises(ValueError, match="levels deep"):
        check(json={"$ref": "#/$defs/a0", "$defs": parts})


def test_many_parts_that_do_not_refer_to_one_another_are_no_chain():
    parts = {f"a{i}": {"type": "object", "properties": {"x": {"type": "string"}}} for i in range(2000)}
    check(json={"anyOf": [{"$ref": f"#/$defs/a{i}"} for i in range(2000)], "$defs": parts})
    check(grammar="start: " + " | ".join(f"a{i}" for i in range(2000)) + "".join(f'\na{i}: "x"' for i in range(2000)))


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_alternatives_are_limited_in_one_place_and_in_all(keyword):
    parts = [True] * MOST_ALTERNATIVES
    check(json={"type": "object", keyword: parts})
    with pytest.raises(ValueError, match=rf"json has {MOST_ALTERNATIVES + 1} parts in one {keyword}, the limit is"):
        check(json={"type": "object", keyword: [*parts, True]})
    many = {f"a{i}": {keyword: parts} for i in range(1 + MOST_ALTERNATIVES_IN_ALL // MOST_ALTERNATIVES)}
    with pytest.raises(ValueError, match=rf"parts in anyOf and oneOf, the limit is {MOST_ALTERNATIVES_IN_ALL}"):
        check(json={"type": "object", "properties": many})


def test_a_schema_may_refer_to_itself():
    check(json={"$ref": "#"})
    check(json={"properties": {"next": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"items": {"$ref": "#"}}}})
    check(json={"properties": {"x": {"$ref": "#/$defs/named"}}, "$defs": {"named": True}})


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("a{}: a{}", "a"),
        ("A{}: A{}", "A"),
        ('a{}: "x" a{} | "y"', "a"),
        ("a{}.5: a{}", "a"),
        ("?a{}[lazy]: a{}", "a"),
        ('a{} :\n  a{} // "', "a"),
        ('a{}: <x"> a{} <y">', "a"),
    ],
)
def test_a_grammars_rules_go_so_deep_and_no_deeper(line, name):
    check(grammar=lark_chain(MOST_LEVELS - 2, line, name))
    with pytest.raises(
        ValueError, match=f"grammar nests {MOST_LEVELS + 1} levels deep, .*, the limit is {MOST_LEVELS}"
    ):
        check(grammar=lark_chain(MOST_LEVELS - 1, line, name))


def test_brackets_count_in_each_rule_of_a_chain():
    with pytest.raises(ValueError, match="levels deep"):
        check(grammar=lark_chain(MOST_LEVELS // 10, "a{}: " + "(" * 10 + "a{}" + ")" * 10))


def test_rules_in_a_circle_count_once():
    check(grammar=lark_chain(MOST_LEVELS - 2, "a{}: a{} | a0"))
    assert longest_chain({"a": 1, "b": 2, "c": 5, "d": 1}, {"a": "b", "b": "ac", "c": "x", "d": "a"}) == 9


def test_what_stands_in_texts_comments_and_regular_expressions_is_no_reference():
    check(grammar=lark_chain(MOST_LEVELS * 2, 'a{0}: "a{1}" /a{1}/ # a{1}'))


@pytest.mark.parametrize("shape", ["schema", "enum", "multipleOf"])
def test_schemas_within_a_grammar_have_the_limits_of_schemas(shape):
    schema = {
        "schema": schema_chain(MOST_LEVELS, lambda ref: ref),
        "enum": {"enum": list(range(MOST_CHOICES + 1))},
        "multipleOf": {"multipleOf": 999983},
    }[shape]
    with pytest.raises(ValueError, match=r"a schema of grammar (nests|has)"):
        check(grammar=f'start: "x" b\nb: %json {json.dumps(schema)}\nc: "x"')


def test_values_in_a_schema_are_no_schemas():
    leaf = {"type": "object", "examples": [{"id": "u-1", "multipleOf": 999983}], "default": {"$id": "u-1"}}
    parts = {f"a{i}": {"properties": {"x": {"$ref": "#/$defs/leaf"}}} for i in range(2000)}
    check(json={"$ref": "#/$defs/a0", "$defs": {**parts, "leaf": leaf}})
    check(json={"properties": {"examples": {"$ref": "#/%24defs/a0"}}, "$defs": {"a0": {"const": {"$id": "x"}}}})


def test_what_a_reference_to_a_value_leads_to_counts():
    parts = [{"$ref": f"#/examples/{i + 1}"} for i in range(MOST_LEVELS)]
    with pytest.raises(ValueError, match="levels deep"):
        check(json={"$ref": "#/examples/0", "examples": [*parts, {}]})


def test_a_union_of_many_parts_that_refer_to_it_is_taken():
    names = [f"n{i}" for i in range(200)]
    parts = {name: {"type": "object", "properties": {"kids": {"items": {"$ref": "#/$defs/node"}}}} for name in names}
    union = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    check(json={"$ref": "#/$defs/node", "$defs": {"node": union, **parts}})


def test_a_grammar_without_rules_is_left_to_the_compiler():
    check(grammar="start = 5")


def test_choices_values_and_intersections_are_counted():
    check(choice=["x"] * MOST_CHOICES)
    with pytest.raises(ValueError, match=f"choice has {MOST_CHOICES + 1} texts, the limit is {MOST_CHOICES}"):
        check(choice=["x"] * (MOST_CHOICES + 1))
    enums = {"anyOf": [{"enum": [0] * (MOST_CHOICES // 2)}, {"enum": [1] * (MOST_CHOICES // 2 + 1)}]}
    with pytest.raises(ValueError, match=f"json has {MOST_CHOICES + 1} values of enum, the limit is {MOST_CHOICES}"):
        check(json=enums)
    terms = ["/x/"] * (MOST_INTERSECTIONS + 1)
    check(grammar="start: A\nA: " + " & ".join(terms) + ' "&&&&&&&&&&&&&"')
    with pytest.raises(ValueError, match=rf"grammar has {MOST_INTERSECTIONS + 1} intersections \(&\), the limit is"):
        check(grammar="start: A\nA: " + " & ".join([*terms, "/x/"]))


def test_multiples_are_counted_by_their_digits_and_together():
    for step in (0.01, 0.25, 5000, 1_000_000, 9973):
        check(json={"type": "number", "multipleOf": step})
    with pytest.raises(ValueError, match=r"json has a multipleOf of 999983, by its digits, the limit is 65536"):
        check(json={"type": "integer", "multipleOf": 999983})
    with pytest.raises(ValueError, match=r"multipleOf of about 2\*\*1403, by its digits, the limit is 65536"):
        check(json={"multipleOf": 7**500})
    with pytest.raises(ValueError, match=f"of {9973 * 9967}, by its digits, the limit"):
        check(json={"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]})
    check(json={"properties": {"width": {"multipleOf": 1024}, "height": {"multipleOf": 15}}})
    check(json={"multipleOf": True})  # which the compiler refuses
    check(grammar='start: a b\na: %json {"multipleOf": 9973}\nb: %json {"multipleOf": 9967}')


def test_a_schema_too_deep_to_be_written_is_a_value_error():
    schema: dict = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="json is a schema that nests too deep"):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize("bits", [17, 90, 400, 16_000])
def test_of_many_multiples_only_as_many_are_multiplied_as_the_limit_allows(bits, monkeypatch):
    multiplied = []
    monkeypatch.setattr(math, "lcm", lambda *numbers, lcm=math.lcm: multiplied.append(numbers) or lcm(*numbers))
    steps = [{"multipleOf": (1 << bits) + 2 * i + 1} for i in range(8000)]
    with pytest.raises(ValueError, match=r"multipleOf of .* the limit is 65536") as error:
        check_schemas("json", [{"type": "number", "allOf": steps}])
    assert len(multiplied) <= 2 and len(str(error.value)) < 120
    small = [{"multipleOf": step} for step in (3, 5, 7, 11, 13, 17, 19)]
    with pytest.raises(ValueError, match=r"multipleOf of \d{6},"):
        check_schemas("json", [{"allOf": small}])


def test_a_large_multiple_is_not_rounded_to_a_small_one():
    with pytest.raises(ValueError, match="multipleOf"):
        check_schemas("json", [{"multipleOf": 10**40 + 1}])
    check_schemas("json", [{"multipleOf": 10**40}])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 2**70}, f"json has the integer {2**70} in const"),
        ({"enum": [{"a": [-(2**63)]}]}, f"json has the integer {-(2**63)} in enum"),  # it ended the process
        ({"enum": [10**4000]}, "in enum"),
        ({"type": "integer", "minimum": 2**64}, f"minimum={2**64}, the limits are"),
        ({"type": "number", "exclusiveMaximum": -(10**400)}, "exclusiveMaximum=-2**1328 and more, the limits are"),
        ({"type": "string", "minLength": 2**40}, f"minLength={2**40}, the limit is"),
    ],
)
def test_numbers_that_the_compiler_cannot_hold_are_refused_by_name(schema, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_limits(StructuredOutputsParams(json={"properties": {"x": schema}}), None)
    assert len(str(error.value)) < 200


def test_bounds_in_a_grammars_schema_are_not_narrowed_so_they_are_refused():
    with pytest.raises(ValueError, match="minimum=-9223372036854775808, the limits are"):
        check_lark('start: %json {"type": "integer", "minimum": -9223372036854775808}')


def test_an_integer_that_python_does_not_write_is_refused_without_pythons_advice():
    with pytest.raises(ValueError, match="an integer of more digits") as error:
        StructuredOutputsParams(json={"const": 10**5000})
    assert "sys" not in str(error.value)


@pytest.mark.parametrize("piece", ['\\"', "\\/", '"\\"\\', "/a", '"/', "<a", "a: ", "a{", "%json {", "# "])
def test_a_grammar_is_read_in_time_linear_in_its_length(piece):
    def seconds(characters):
        start = time.process_time()
        with contextlib.suppress(ValueError):
            check_lark(piece * (characters // len(piece)))
        return time.process_time() - start

    seconds(1000)
    assert seconds(2**18) < 5  # in quadratic time two minutes and more
