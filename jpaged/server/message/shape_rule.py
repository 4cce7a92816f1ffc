"""Writes a shape as a rule of a Lark grammar, so that a thought may come before it."""

from __future__ import annotations

import json
import re
from typing import Any

from jpaged.structured_outputs import StructuredOutputsParams, is_gbnf

_ENDS = re.compile(r"\\.|[/\n]", re.DOTALL)
"""What would end a regular expression in a Lark grammar, and what is escaped."""


def shape_rule(shape: StructuredOutputsParams) -> str:
    """Return what a rule of a Lark grammar has for a shape.

    Raises:
        ValueError: it is a grammar in GBNF, which no rule of another grammar can hold.
    """
    if shape.choice is not None:
        return " | ".join(json.dumps(text) for text in shape.choice)
    if shape.regex is not None:
        plain = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
        regex = _ENDS.sub(lambda match: plain.get(match[0], match[0]), shape.regex)
        return f"/{regex}/"
    if shape.grammar is not None:
        if is_gbnf(shape.grammar):
            raise ValueError("a grammar in GBNF cannot stand behind a thought: write it in Lark's syntax")
        return f"%lark {{\n{shape.grammar}\n}}"
    schema: dict[str, Any] = shape.json if shape.json is not None else {"type": "object"}
    if shape.disable_any_whitespace:
        schema = {**schema, "x-guidance": {**schema.get("x-guidance", {}), "whitespace_flexible": False}}
    return f"%json {json.dumps(schema)}"
