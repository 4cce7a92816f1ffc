"""Rules of a grammar for arguments that are no JSON: literals of Python or of a family's own, and tagged values.

What a schema says of a value is followed as far as the notation can show it; texts that a grammar allows are read back
as values that fit the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.answers.marks import Marks
from jpaged.answers.notations import Literals, Tagged
from jpaged.answers.schema_types import listed_in, resolved
from jpaged.json_schema import DEFINITIONS
from jpaged.structured_outputs import MOST_CHARACTERS

_MORE = "(.|\\n)*"
ANY = f"/{_MORE}/"
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python's json.dumps writes it, which is how the families were trained."""
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_DEEPEST = 8
"""Levels of values without a schema, and of references; deeper ones are of no use to a call."""
_MOST_BRANCHES = 10_000
"""Schemas that a union may be of, those within others included."""
_NOTHING = "/[^\\s\\S]/"
_SPECIAL = re.compile(r"\\.|[/\n]", re.DOTALL)
"""Escapes, and the characters that would end a regular expression in a Lark grammar."""
_ENDED = re.compile(r"(?:[^\\]|\\.)*\$", re.DOTALL)
"""Regular expressions whose last character is an anchor, not an escaped dollar sign."""
_OF_STRINGS = ("pattern", "minLength", "maxLength", "format")


def in_lark(regex: str) -> str:
    """Return a regular expression as it stands between slashes in a Lark grammar."""
    plain = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return _SPECIAL.sub(lambda match: plain.get(match[0], match[0]), regex)


class ValueRules:
    """Collects the rules of one call's arguments.

    Args:
        name: prefix of the rules' names.
        schema: the schema of the arguments, whose references point at its definitions; see `with_definitions`.
        options: llguidance's options for schemas.
    """

    def __init__(self, name: str, schema: Mapping[str, Any], marks: Marks, options: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._size = 0
        self._name = name
        self._root = schema
        self._marks = marks
        self._options = options

    def new(self, rule: str, *, terminal: bool = False, lazy: bool = False) -> str:
        """Add a rule and return its name.

        Raises:
            ValueError: the rules have more characters than a grammar may have.
        """
        self._count(rule)
        name = f"{self._name}_{len(self.rules)}"
        name = name.upper() if terminal else name
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {rule}")
        return name

    def fill(self, name: str, rule: str) -> None:
        """Write the rule that `new` named while it was empty.

        Raises:
            ValueError: as `new`.
        """
        self._count(rule)
        self.rules[int(name.rpartition("_")[2])] = f"{name}: {rule}"

    def _count(self, rule: str) -> None:
        self._size += len(rule)
        if self._size > MOST_CHARACTERS:
            raise ValueError(f"their rules have more than {MOST_CHARACTERS:,} characters, the limit of a grammar")

    def json(self, schema: Any) -> str:
        """Return the rule of a value in JSON, with all definitions if it refers to any."""
        own = dict(schema) if isinstance(schema, Mapping) else {}
        if '"$ref"' in json.dumps(own):
            own |= {key: self._root[key] for key in DEFINITIONS if isinstance(self._root.get(key), Mapping)}
        return self.new(f"%json {json.dumps({**own, 'x-guidance': dict(self._options)})}")

    def resolved(self, schema: Any) -> Any:
        return resolved(schema, self._root)

    def branches(self, schema: Any) -> list[Any]:
        """Return the schemas of which a value fits any: one for each type that is allowed.

        A union that is among its own branches adds nothing to itself.

        Raises:
            ValueError: there are more than `_MOST_BRANCHES`.
        """
        made: list[Any] = []
        schema = self.resolved(schema)
        waiting: list[tuple[Any, frozenset[int]]] = [(schema, frozenset({id(schema)}))]
        for _ in range(_MOST_BRANCHES):
            if not waiting:
                return made
            one, around = waiting.pop()  # `around` are the schemas that were merged into it, by their Python ids
            if not isinstance(one, Mapping):
                made += [{"type": kind} for kind in _TYPES]
                continue
            keyword = next((each for each in ("anyOf", "oneOf", "allOf") if isinstance(one.get(each), list)), None)
            if keyword is None:
                made += self._of_types(one)
                continue
            parts = [part for each in one[keyword] if id(part := self.resolved(each)) not in around]
            own = {id(part): part for part in parts if isinstance(part, Mapping)}
            if keyword == "allOf":
                merged = {key: value for key, value in one.items() if key != keyword}
                for part in own.values():
                    merged |= part
                waiting.append((merged, around | own.keys()))
                continue
            rest = {key: value for key, value in one.items() if key not in (keyword, "title", "description")}
            for part in reversed(parts):
                if part is not False:
                    more = own.get(id(part), {})
                    waiting.append(({**rest, **more}, around | {id(part)} if more else around))
        raise ValueError(f"they have a union of more than {_MOST_BRANCHES:,} schemas")

    def _of_types(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return a schema without unions once for each of its types."""
        if "enum" in schema or "const" in schema:
            return [schema]
        given = schema.get("type")
        kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else self._kinds(schema)
        return [{**schema, "type": kind} for kind in kinds]

    def _kinds(self, schema: Mapping[str, Any]) -> Sequence[str]:
        """Return the types of a schema that names none."""
        if "properties" in schema:
            return ("object",)
        return ("array",) if "items" in schema else _TYPES

    def text(self, schema: Mapping[str, Any], end: str) -> str:
        """Return the rule of a string without escapes, and of the mark after it."""
        limits = self._limits(schema)
        if self._starts_with_token(end):
            body = self.new(" & ".join([ANY, *limits]), terminal=True)
            return f"{body} {self.exact(end)}"
        shown = json.dumps(end)
        body = self.new(" & ".join([f"~({ANY} {shown} {ANY})", *limits]), terminal=True)
        whole = self.new(f"{body} {shown}", terminal=True)
        return self.new(whole, lazy=True)

    def _starts_with_token(self, text: str) -> bool:
        pieces = self._marks.pieces(text)
        return bool(pieces) and pieces[0] in self._marks.tokens

    def exact(self, text: str) -> str:
        """Return a literal text as a rule, its line breaks included."""
        tokens = self._marks.tokens
        return " ".join(
            f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece) for piece in self._marks.pieces(text)
        )

    def _limits(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the terminals that a string has to match."""
        made = []
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least or most is not None:
            made.append(f"/(.|\\n){{{least},{'' if most is None else most}}}/")
        if isinstance(pattern := schema.get("pattern"), str):
            is_ended = _ENDED.fullmatch(pattern) is not None
            begin, end = "" if pattern.startswith("^") else _MORE, "" if is_ended else _MORE
            made.append(f"/{begin}({in_lark(pattern.removeprefix('^')[: -1 if is_ended else None])}){end}/")
        return made

    def sequence(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the rule of items in order, of which some may be absent, with a separator between them.

        Args:
            items: each a rule, and whether it has to be there.
        """
        rest = then = '""'
        for rule, is_needed in reversed(items):
            after, first = rest, then
            rest = self.new(f"{separator} {rule} {after}" + ("" if is_needed else f" | {after}"))
            then = self.new(f"{rule} {after}" + ("" if is_needed else f" | {first}"))
        return then


def tagged_rules(
    notation: Tagged, name: str, schema: Mapping[str, Any], marks: Marks, options: Mapping[str, Any]
) -> list[str]:
    """Return the rules of tagged arguments, the first of them `name`."""
    made = ValueRules(name, schema, marks, options)
    before, between, after = notation.parts()
    inner = after.rstrip("\n")
    trailing = ' "\\n"?' * (len(after) - len(inner))

    def argument(key: str, value: Any) -> str:
        each = (_tagged(made, key, branch) + trailing for branch in made.branches(value))
        return made.new(" | ".join(each) or _NOTHING)

    def _tagged(made: ValueRules, key: str, value: Mapping[str, Any]) -> str:
        def head(is_string: bool) -> str:
            tag = between.replace("$string", "true" if is_string else "false")
            return f"{marks.rule(before)} {key} {made.exact(tag)}"

        listed = listed_in(value)
        if listed is not None:
            each = (
                f"{head(isinstance(one, str))} {made.exact((one if isinstance(one, str) else json.dumps(one)) + inner)}"
                for one in listed
            )
            return made.new(" | ".join(each) or _NOTHING)
        if value.get("type") == "string":
            return f"{head(True)} {made.text(value, inner)}"
        return f"{head(False)} {made.json(value)} {made.exact(inner)}"

    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    items = [argument(json.dumps(key), value) + ("" if key in required else "?") for key, value in properties.items()]
    if not properties and schema.get("additionalProperties") is not False:
        key = made.new("/[A-Za-z_][\\w.-]*/", terminal=True)
        items = [argument(key, schema.get("additionalProperties", True)) + "*"]
    return [f"{name}: {' '.join(items) or chr(34) * 2}", *made.rules]


def literal_rules(
    notation: Literals, name: str, schema: Mapping[str, Any], marks: Marks, options: Mapping[str, Any]
) -> list[str]:
    """Return the rules of arguments in literals, the first of them `name`."""
    made = ValueRules(name, schema, marks, options)
    true, false, null = notation.words
    opening, closing = notation.quotes[0]
    comma = json.dumps(notation.comma)
    known: dict[tuple[int, int], str] = {}

    def written(value: Any) -> str:
        """Return a value in the notation, as a rule."""
        if isinstance(value, bool) or value is None:
            return json.dumps(null if value is None else true if value else false)
        if isinstance(value, str):
            if notation.escapes:
                return json.dumps(json.dumps(value, ensure_ascii=False))
            return (
                f"{made.exact(opening)} {made.exact(value)} {made.exact(closing)}"
                if value
                else made.exact(opening + closing)
            )
        if isinstance(value, list):
            return " ".join(['"["', *_joined([written(each) for each in value]), '"]"'])
        if isinstance(value, Mapping):
            return " ".join(['"{"', *_joined([f"{key(name)} {written(each)}" for name, each in value.items()]), '"}"'])
        return json.dumps(json.dumps(value))

    def _joined(each: list[str]) -> list[str]:
        return [part for i, one in enumerate(each) for part in ((comma, one) if i else (one,))]

    def key(name: str) -> str:
        if notation.bare_keys:
            return json.dumps(name + notation.colon)
        return f"{json.dumps(json.dumps(name, ensure_ascii=False))} {json.dumps(notation.colon)}"

    def string(value: Mapping[str, Any]) -> str:
        if not notation.escapes:
            return f"{made.exact(opening)} {made.text(value, closing)}"
        double = made.json({k: v for k, v in value.items() if k in ("type", *_OF_STRINGS)})
        if any(keyword in value for keyword in _OF_STRINGS) or len(notation.quotes) < 2:
            return double
        single = made.new("/'([^'\\\\\\n]|\\\\[\\\\'nrt\"])*'/", terminal=True)
        return f"({double} | {single})"

    def value_rule(value: Any, depth: int) -> str:
        at = (id(made.resolved(value)), depth) if isinstance(value, Mapping) and "$ref" in value else None
        if at in known:
            return known[at]
        if at is not None:
            known[at] = name = made.new("")  # filled in below: the value may hold itself
        each = " | ".join(one for branch in made.branches(value) if (one := branch_rule(branch, depth))) or _NOTHING
        if at is None:
            return made.new(each)
        made.fill(name, each)
        return name

    def branch_rule(value: Mapping[str, Any], depth: int) -> str | None:
        listed = listed_in(value)
        if listed is not None:
            return " | ".join(map(written, listed))
        kind = value.get("type")
        if kind in ("array", "object") and depth <= 0:
            return None
        if kind == "string":
            return string(value)
        if kind == "boolean":
            return f"{json.dumps(true)} | {json.dumps(false)}"
        if kind == "null":
            return json.dumps(null)
        if kind == "array":
            return array(value, depth - 1)
        return object_rule(value, depth - 1) if kind == "object" else made.json(value)

    def array(value: Mapping[str, Any], depth: int) -> str:
        item = value_rule(value.get("items", True), min(depth, 2) if "items" not in value else depth)
        least, most = value.get("minItems", 0), value.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f"({comma} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        filled = f"{item} {more}"
        return f'"[" {filled} "]"' if least else f'"[" ({filled})? "]"'

    def object_rule(value: Mapping[str, Any], depth: int) -> str:
        properties, required = value.get("properties") or {}, value.get("required") or ()
        if properties:
            items = [(f"{key(each)} {value_rule(sub, depth)}", each in required) for each, sub in properties.items()]
            return f'"{{" {made.sequence(items, comma)} "}}"'
        if value.get("additionalProperties") is False:
            return '"{}"'
        of_more = value.get("additionalProperties", True)
        each = f"{any_key()} {value_rule(of_more, depth if isinstance(of_more, Mapping) else min(depth, 2))}"
        return f'"{{" ({each} ({comma} {each})*)? "}}"'

    def any_key() -> str:
        word = "/[A-Za-z_][A-Za-z0-9_]*/" if notation.bare_keys else '/"[A-Za-z_][A-Za-z0-9_]*"/'
        return f"{made.new(word, terminal=True)} {json.dumps(notation.colon)}"

    if not notation.keywords:
        return [f"{name}: {object_rule(schema, _DEEPEST)}", *made.rules]
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    items = [
        (f"{json.dumps(each + '=')} {value_rule(sub, _DEEPEST)}", each in required) for each, sub in properties.items()
    ]
    if not properties and schema.get("additionalProperties") is not False:
        word = made.new("/[A-Za-z_][A-Za-z0-9_]*/", terminal=True)
        each = f'{word} "=" {value_rule(schema.get("additionalProperties", True), 2)}'
        return [f"{name}: ({each} ({comma} {each})*)?", *made.rules]
    return [f"{name}: {made.sequence(items, comma)}", *made.rules]
