"""Finds by trial whether a chat template keeps earlier turns, so that a growing conversation's prompt only grows.

Many templates leave out the thoughts of earlier turns. The prompt of the next turn then differs from where the last
thought stood, and all after it is computed anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from jpaged.text.chat_template import ChatOptions, templated
from jpaged.text.template_rendering import variables_of

_ASKED = {"role": "user", "content": "hello"}
_AGAIN = {"role": "user", "content": "and then"}
_THOUGHT, _TEXT = "a tried thought", "a tried text"
_SAID = {"role": "assistant", "content": _TEXT, "reasoning_content": _THOUGHT}
_CALL = {"id": "tried0001", "type": "function", "function": {"name": "tried_name", "arguments": {}}}
_CALLED = {"role": "assistant", "content": "", "reasoning_content": _THOUGHT, "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "tried0001", "name": "tried_name", "content": "a result"}
_NO_SWITCH = {"messages", "conversation", "tools", "documents", "tokenize", "add_generation_prompt"}
"""Variables of templates that have other meanings, or are arguments of their own."""


@dataclass(frozen=True)
class EarlierTurns:
    """What a chat template does with turns once the user has gone on.

    Attributes:
        has_thoughts: whether it shows the thought of the last turn.
        drops_thoughts: whether it leaves that out of an earlier one.
        drops_after_calls: whether it leaves out the thought before a call once the call's result has come.
        kept_by: the variable, with its value, by which it keeps them; None: no one does.
    """

    has_thoughts: bool = False
    drops_thoughts: bool = False
    drops_after_calls: bool = False
    kept_by: tuple[str, Any] | None = None

    def __str__(self) -> str:
        if not self.has_thoughts:
            return "the chat template shows no thoughts of earlier turns"
        if not self.drops_thoughts:
            return "the chat template keeps the thoughts of earlier turns"
        where = "earlier turns, and those before a tool's result," if self.drops_after_calls else "earlier turns"
        left = f"the chat template leaves out the thoughts of {where} so that prompts change there from turn to turn"
        if self.kept_by is None:
            return f"{left}; no variable of it keeps them"
        name, value = self.kept_by
        return f"{left}; chat_template_kwargs={json.dumps({name: value})} keeps them"


def earlier_turns(tokenizer: Any) -> EarlierTurns:
    """Return what a tokenizer's chat template does with earlier turns."""
    if not getattr(tokenizer, "chat_template", None):
        return EarlierTurns()

    def shows(*messages: Mapping[str, Any], **variables: Any) -> bool:
        try:
            begins = messages[-1]["role"] != "assistant"
            options = ChatOptions(add_generation_prompt=begins, chat_template_kwargs=variables)
            return _THOUGHT in templated(messages, tokenizer, options)
        except ValueError:  # the template refuses it
            return False

    def keeps(**variables: Any) -> bool:
        return shows(_ASKED, _SAID, _AGAIN, **variables)

    last = shows(_ASKED, _SAID) or shows(_ASKED, _CALLED, _RESULT)
    if keeps():
        return EarlierTurns(has_thoughts=True)
    try:
        switches = sorted(variables_of(tokenizer.get_chat_template(None, None)) - _NO_SWITCH)
    except (ValueError, TemplateError):  # it is damaged, or has several for other purposes
        switches = []
    kept_by = next(((name, value) for name in switches for value in (True, False) if keeps(**{name: value})), None)
    if not last and kept_by is None:
        return EarlierTurns()
    drops_after_calls = not shows(_ASKED, _CALLED, _RESULT)
    return EarlierTurns(True, True, drops_after_calls, kept_by)
