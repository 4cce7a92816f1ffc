"""Has the grammar of a thought that comes before an answer, in Lark as llguidance reads it; see `reasoning`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from jpaged.server.message.reasoning import BEGIN, END

Thought = Literal["none", "may", "runs"]
"""What may come before an answer: nothing, a thought, or the rest of one that the prompt began."""
ANY = "/(.|\\n)*/"
SPACE = "[\\s\\x1c-\\x1f]"
"""What Python's str.strip takes off; a regular expression of llguidance leaves out the last four."""


def before_shape(thought: Thought) -> tuple[str, list[str]]:
    """Return what a rule has in front of an answer that is forced, and the rules that this needs."""
    if thought == "none":
        return "", []
    before = "(thought GAP?)?" if thought == "may" else "thought GAP?"
    return before, [_thought(thought), "thought[lazy]: THOUGHT", f"GAP: /{SPACE}{{1,8}}/"]


def behind_thought(schema: Mapping[str, Any], thought: Thought) -> str:
    """Return the grammar of JSON that may come behind a thought."""
    before, rules = before_shape(thought)
    return "\n".join([f"start: {before} shape", *rules, f"shape: %json {json.dumps(schema)}"])


def before_text(thought: Thought) -> tuple[str, list[str]]:
    """Return the alternatives of `start` for an answer that is free, and the rules that they need.

    The alternatives name the rules `said`, an answer behind a thought or without one, and where a thought may come but
    need not `first`, an answer that does not begin with `THINKS`. A thought need not end.
    """
    if thought == "none":
        return "said", []
    rules = [_thought(thought), "thought[lazy]: THOUGHT", f"ENDED: {ANY} {json.dumps(END)} {ANY}"]
    if thought == "runs":
        return "thought said | THINKING", [*rules, f"THINKING: {ANY} & ~ENDED"]
    rules += [f"THINKS: /{SPACE}*{BEGIN}(.|\\n)*/", "THINKING: THINKS & ~ENDED"]
    return "thought said | THINKING | first", rules


def _thought(thought: Thought) -> str:
    begun = f"/{SPACE}*{BEGIN}/ " if thought == "may" else ""
    return f"THOUGHT: {begun}{ANY} {json.dumps(END)}"
