"""Schemas are rewritten for llguidance without a change of meaning, or without what it cannot follow."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from followed_texts import compiled, follows, takes
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged import json_schema
from jpaged.json_schema import first_unfollowed, followable, followed_as_far_as_can_be, with_definitions

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
DIGITS = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*)$"


def allows(schema, value) -> bool:
    return takes(schema, json.dumps(value))


@pytest.mark.parametrize("pattern", [DECIMAL, DIGITS])
@pytest.mark.parametrize("text", ["1", "-12.50", "+0012.5", ".5", "1.", ".", "-", "", "+.", "1.2.3", "a1", "12345.678"])
def test_pydantics_pattern_of_a_decimal_is_followed(pattern, text):
    schema = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": pattern}]}
    assert allows(schema, text) is (re.search(pattern, text) is not None)


def test_an_unknown_format_is_an_annotation_and_a_known_one_is_followed():
    assert allows({"type": "string", "format": "color-hex"}, "so")
    assert not allows({"type": "string", "format": "date"}, "so") and allows(
        {"type": "string", "format": "date"}, "2026-11-26"
    )


def test_values_and_names_are_no_keywords():
    schema = {
        "properties": {"format": {"enum": [{"format": "x", "not": 1}]}, "not": {"const": {"uniqueItems": True}}},
        "default": {"oneOf": [1]},
        "additionalProperties": False,
    }
    assert followable(schema) == schema == followed_as_far_as_can_be(schema) and first_unfollowed(schema) is None


def test_a_schema_is_not_changed_in_place_however_deep_it_nests():
    schema: dict = {"type": "array", "uniqueItems": True}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    assert first_unfollowed(schema) == "uniqueItems"
    left = followed_as_far_as_can_be(schema)
    assert first_unfollowed(left) is None and first_unfollowed(schema) == "uniqueItems"


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [("a(?=b)", False), (r"\\(?:a)", True), (r"\ba", False), (r"(a)\1", False), (r"\\b", True), ("(?P<n>a)", True)],
)
def test_patterns_that_rust_does_not_know_are_found(pattern, fits):
    assert (first_unfollowed({"pattern": pattern}) is None) is fits


def nested(levels: int, inside: dict) -> dict:
    for _ in range(levels):
        inside = {"type": "object", "properties": {"a": inside}, "required": ["a"], "additionalProperties": False}
    return inside


def test_objects_nest_deeper_than_llguidances_reader_of_json():
    schema = nested(100, {"type": "integer"})
    value = 5
    for _ in range(100):
        value = {"a": value}
    assert allows(schema, value)
    assert not allows(schema, value["a"])


def test_references_of_a_schema_that_nests_deep_keep_their_targets():
    inside = {
        "type": "object",
        "properties": {"b": {"$ref": "#/$defs/one"}, "c": {"$ref": "#/properties/a/properties/a"}},
    }
    schema = nested(70, inside) | {"$defs": {"one": {"const": 1}}}
    flat = json.dumps(followable(schema))
    assert '"#/$defs/one"' not in flat and "/properties/" not in flat

    def value(inner, levels=70):
        for _ in range(levels):
            inner = {"a": inner}
        return inner

    assert allows(schema, value({"b": 1})) and not allows(schema, value({"b": 2}))
    assert allows(schema, value({"c": value({"b": 1}, 68)})) and not allows(schema, value({"c": value({"b": 1}, 67)}))


def test_a_deep_schema_whose_parts_cannot_be_moved_is_refused_with_the_limit():
    with pytest.raises(ValueError, match=r"\$id.*the limit is 100"):
        followable(nested(100, {"$id": "urn:x"}))
    value: list = []
    for _ in range(200):
        value = [value]
    with pytest.raises(ValueError, match=r"value in a schema nests .* the limit is 100"):
        followable({"const": value})


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_64_bits_and_more_are_narrowed(kind):
    bounds = {"type": kind, "minimum": -(2**63), "maximum": 2**63 - 1}
    assert allows(bounds, 10**18) and allows(bounds, -(10**18)) and allows(bounds, 0)
    assert allows({"type": kind, "exclusiveMaximum": 10**400}, 7)
    assert allows({"type": "string", "maxLength": 2**70}, "a")


NAMES = ["a", "b", "ab", "é", "x/y"]
VALUES = {"1": {"type": "integer"}, '"s"': {"type": "string"}, "null": {"type": "null"}}


@st.composite
def objects(draw):
    """A schema of an object and the text of one, some of whose letters are escapes."""
    of_values = st.sampled_from([*VALUES.values(), True])
    schema = {"type": "object", "properties": draw(st.dictionaries(st.sampled_from(NAMES), of_values))}
    schema["required"] = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=2))
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.one_of(of_values, st.just(False)))
    if draw(st.integers(0, 3)) == 0:
        schema["patternProperties"] = {"^a": draw(of_values)}
    if draw(st.integers(0, 3)) == 0:
        schema = {"allOf": [schema, {"type": "object", "properties": {"b": draw(of_values)}}]}
    members = draw(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(sorted(VALUES))), max_size=3))

    def letter(character):
        return draw(st.sampled_from([character, character, f"\\u{ord(character):04x}"]))

    return schema, members, [(f'"{"".join(map(letter, name))}"', value) for name, value in members]


@settings(max_examples=examples(80), deadline=None, derandomize=True, database=None)
@given(objects())
def test_a_name_in_escapes_is_never_another_name(drawn):
    schema, members, written = drawn
    valid = jsonschema.Draft202012Validator(schema).is_valid({name: json.loads(value) for name, value in members})
    try:
        grammar = compiled(schema)
    except ValueError as error:
        assert "Unsatisfiable" in str(error) and not valid
        return
    text = "{" + ",".join(f"{name}:{value}" for name, value in written) + "}"
    taken = follows(grammar, text)
    assert valid or not taken or len({name for name, _ in members}) < len(members)
    listed = {*schema.get("properties", ()), *schema.get("required", ())}
    assert not taken or all(sum(name == other for other, _ in members) < 2 for name in listed)
    assert not taken or "\\u" not in text
    if not members:
        assert taken is valid


def test_listed_names_hold_wherever_other_names_may_stand():
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema = {"type": "array", "items": {"$ref": "#/$defs/inner"}, "$defs": {"inner": inner}}
    grammar = compiled(schema)
    for text, fits in (
        ('[{"a":1,"b":"\\n\\t é"}]', True),
        ('[{"a":1,"b/\\"":{"\\\\":[]}}]', True),
        ('[{"\\u0061":1}]', False),
        ('[{"a":1,"\\u0061":"x"}]', False),
        ('[{"a":1,"a":2}]', False),
    ):
        assert follows(grammar, text) is fits, text
    closed = inner | {"additionalProperties": False}
    assert takes(closed | {"properties": {"a": {"type": "string"}}}, '{"a":"\\u001b"}'), "no name can be another one"
    keys = {"type": "object", "properties": {"key": {"enum": ["\x1b[A", "q"]}}}
    assert takes(keys, '{"key":"\\u001b[A"}'), "a text that is listed stays"


NOTHING = [
    False,
    {"enum": []},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "string", "enum": [1]},
    {"type": "string", "pattern": "^a$", "minLength": 2},
    {"$ref": "#/$defs/other"},  # false as well
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/other"}}, "required": ["x"]},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/it"}}, "required": ["x"]},  # without an end
    {"type": "array", "items": {"$ref": "#/$defs/it"}, "minItems": 1},
    {"anyOf": [{"$ref": "#/$defs/it"}, {"$ref": "#/$defs/other"}]},
    {"allOf": [{"type": "object", "properties": {"x": False}}, {"type": "object", "required": ["x"]}]},
]


@pytest.mark.parametrize("nothing", NOTHING, ids=json.dumps)
def test_a_reference_to_what_nothing_satisfies_refuses_that_member_only(nothing):
    definitions = {"$defs": {"it": nothing, "other": False}}
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "it": {"$ref": "#/$defs/it"}},
        "additionalProperties": False,
        **definitions,
    }
    grammar = compiled(schema)
    assert follows(grammar, '{"n":1}') and follows(grammar, "{}")
    assert not any(
        follows(grammar, f'{{"it":{value}}}') for value in ("1", '"a"', "null", "{}", '{"x":1}', "[]", "[1]")
    )
    with pytest.raises(ValueError, match="Unsatisfiable"):
        compiled(schema | {"required": ["it"]})
    with pytest.raises(ValueError, match="Unsatisfiable"):
        compiled({"$ref": "#/$defs/it", **definitions})
    either = {"anyOf": [{"$ref": "#/$defs/it"}, {"type": "null"}], **definitions}
    assert takes(either, "null") and takes({"type": "array", "items": {"$ref": "#/$defs/it"}, **definitions}, "[]")


def test_a_chain_of_definitions_is_looked_at_once_or_twice_each(monkeypatch):
    """Each look takes llguidance half a millisecond: all of them after each one would take seconds."""
    looks = []
    look = json_schema._may_be_satisfied
    monkeypatch.setattr(json_schema, "_may_be_satisfied", lambda each, *more: looks.append(each) or look(each, *more))
    first = {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}
    chain = {
        f"d{number}": {
            "type": "object",
            "properties": {"next": {"$ref": f"#/$defs/d{number + 1}"}, "first": first},
            "required": ["next", "first"],
        }
        for number in range(20)
    }
    schema = followable({"$ref": "#/$defs/d0", "$defs": chain | {"d20": {"type": "null"}}})
    assert {"enum": []} not in schema["$defs"].values()
    assert 21 <= len(looks) <= 2 * 21


def test_definitions_that_refer_to_each_other_and_end_are_followed():
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/other"}, {"type": "null"}]}, "n": {"type": "integer"}},
        "required": ["n", "next"],
        "additionalProperties": False,
    }
    other = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node, "other": other}}
    assert takes(schema, '{"next":[{"next":null,"n":1},{"next":[],"n":2}],"n":3}')
    tree = {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["children"],
    }
    assert takes(tree, '{"children":[{"children":[]}]}') and not takes(tree, '{"children":[{}]}')


def test_long_chains_of_definitions_are_looked_through_in_time():
    many = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["x"]}
        for i in range(300)
    }
    for end, fits in (({"type": "null"}, True), (False, False)):
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": {**many, "a300": end}}
        left = followable(schema)["properties"]["a"]
        assert (left == {"$ref": "#/$defs/a0"}) is fits


def test_definitions_that_have_a_made_name_stay():
    own = {"jpaged-aim-0": {"const": 1}}
    schema = {"properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/a"}}, "$defs": own}
    assert with_definitions(schema)["$defs"] == own | {"jpaged-aim-0-": {"type": "string"}}
    own = {f"jpaged-part-{i}": {"const": 1} for i in range(9)}
    flat = followable(nested(70, {"type": "string"}) | {"$defs": own})
    assert flat["$defs"].items() >= own.items()
