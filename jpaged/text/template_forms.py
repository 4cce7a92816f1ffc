"""Finds by trial the forms of contents and tool calls that a chat template takes, and gives a conversation that form.

Templates differ: some take a content as text and some as a list of parts; some write a call's arguments as JSON
themselves and some join them as text; some look at calls only where the content is none. Each template is tried once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from jpaged.text.thought_forms import Form, thought_form

ContentForm = Literal["string", "openai", "either"]
Message = Mapping[str, Any]

_TEXT = "a text that no template has"
_NAME, _ID, _LONG_ID = "tried_name", "tried0001", "call_tried_0123456789"
_ARGUMENTS = {"tried_key": "tried value"}
_CUT_OFF = '{"tried_key": "tried va'
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_READ_BY_NAME = re.compile(r"arguments(?:['\"]\])?(?:\.|\[)")
"""Where a template reads an argument by its name, as in ``call.function.arguments.city``."""
_MOST = 16
"""Templates of a tokenizer that are remembered; clients may send their own."""


@dataclass(frozen=True)
class CallForm:
    """The form of an assistant's message with tool calls in which a template shows most of it.

    Attributes:
        content: the content of a message that has calls and no text.
        as_text: whether a call's arguments are JSON text; otherwise they are a mapping.
        takes_cut_off: whether arguments that are no mapping may be given as text all the same.
        next_to_text: whether calls are shown next to a text; otherwise they need a message of their own.
        short_ids: whether the ids of calls must have nine letters and digits, as Mistral's.
        shown: whether the template shows calls at all, or some of their arguments by name.
    """

    content: str | None = ""
    as_text: bool = False
    takes_cut_off: bool = True
    next_to_text: bool = True
    short_ids: bool = False
    shown: bool = True


class TemplateForms:
    """The forms that one template of a tokenizer takes.

    Args:
        tokenizer: the object whose `apply_chat_template` renders; it is not kept.
        template: a Jinja template.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._template = template
        self.content: ContentForm = self._tried_content(tokenizer)
        self._calls: CallForm | None = None
        self._thoughts: list[Form | None] = []

    def calls(self, tokenizer: Any) -> CallForm:
        """Return the form of calls, which is found when it is first needed."""
        if self._calls is None:
            self._calls = self._tried_calls(tokenizer)
        return self._calls

    def thoughts(self, tokenizer: Any) -> Form | None:
        """Return the form of thoughts, which is found when it is first needed; None: fields of the message."""
        if not self._thoughts:
            self._thoughts.append(thought_form(self._template, partial(self._rendered, tokenizer)))
        return self._thoughts[0]

    def _tried_content(self, tokenizer: Any) -> ContentForm:
        as_text = self._rendered(tokenizer, {"role": "user", "content": _TEXT}) or ""
        as_parts = self._rendered(tokenizer, {"role": "user", "content": [{"type": "text", "text": _TEXT}]}) or ""
        if _TEXT not in as_parts:
            return "string"
        if _TEXT not in as_text:
            return "openai"
        return "either" if as_text == as_parts else "string"

    def _tried_calls(self, tokenizer: Any) -> CallForm:
        def rendered(content: str | None, arguments: Any, call_id: str = _ID) -> str | None:
            call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
            return self._rendered(tokenizer, _USER, {"role": "assistant", "content": content, "tool_calls": [call]})

        text = json.dumps(_ARGUMENTS)
        tried = [(content, arguments) for arguments in (_ARGUMENTS, text) for content in ("", None)]
        shown = [_Shown(rendered(*form)) for form in tried]
        best = max(range(len(tried)), key=lambda i: shown[i].rank)  # the first of equal ones
        if not shown[best].rank:
            return CallForm(shown=False)
        content, arguments = tried[best]
        as_text, plain = arguments is text, shown[best]
        return CallForm(
            content=content,
            as_text=as_text,
            takes_cut_off=as_text or rendered(content, _CUT_OFF) is not None,
            next_to_text=_Shown(rendered(_TEXT, arguments)).level >= plain.level,
            short_ids=rendered(content, arguments, _LONG_ID) is None,
            shown=plain.level > 0 or plain.named or bool(_READ_BY_NAME.search(self._template)),
        )

    def _rendered(self, tokenizer: Any, *messages: Message) -> str | None:
        try:
            return tokenizer.apply_chat_template(list(messages), chat_template=self._template, tokenize=False)
        except Exception:  # a template is a program of the model's
            return None


_USER = {"role": "user", "content": "hello"}


@dataclass(frozen=True)
class _Shown:
    """A rendered conversation with a tried call; None: the template raised."""

    text: str | None

    @cached_property
    def level(self) -> int:
        """Return how much of the arguments is there: 3 their JSON, 2 names and values in another notation, 1 the same
        as a string in a string or as Python writes it, 0 nothing."""
        text = "".join((self.text or "").split())
        names_and_values = [part.replace(" ", "") for pair in _ARGUMENTS.items() for part in pair]
        if json.dumps(_ARGUMENTS).replace(" ", "") in text:
            return 3
        if not all(part in text for part in names_and_values):
            return 0
        return 1 if any(mark in text for mark in ("'tried_key'", '\\"tried_key')) else 2

    @property
    def named(self) -> bool:
        return self.text is not None and (_NAME in self.text or _ID in self.text)

    @property
    def rank(self) -> tuple[int, ...]:
        """Return a key that is larger for a better form; empty if the template raised."""
        return () if self.text is None else (self.level, self.named, "None" not in self.text)


_FORMS: WeakKeyDictionary[Any, dict[str, TemplateForms]] = WeakKeyDictionary()
"""Forms by tokenizer and template; an entry lives as long as its tokenizer."""


def forms_of(tokenizer: Any, template: str) -> TemplateForms:
    """Return the forms that a template takes."""
    known = _FORMS.setdefault(tokenizer, {})
    if (forms := known.get(template)) is None:
        if len(known) >= _MOST:
            known.clear()
        forms = known[template] = TemplateForms(tokenizer, template)
    return forms


def has_calls(message: Message) -> bool:
    """Tell whether a message has tool calls."""
    return isinstance(message.get("tool_calls"), Sequence) and bool(message["tool_calls"])


def with_calls_in(messages: Sequence[Message], form: CallForm) -> list[dict[str, Any]]:
    """Return a conversation whose calls have the form that its template shows.

    Arguments that are cut off, or are JSON of something else than a mapping, stay the text that they are.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        shown = dict(message)
        if form.short_ids and isinstance(message.get("tool_call_id"), str):
            shown["tool_call_id"] = _short(message["tool_call_id"])
        if not has_calls(message):
            found.append(shown)
            continue
        if not form.shown:
            found.append(_in_words(shown))
            continue
        calls = [_call(call, form) for call in message["tool_calls"]]
        if _is_empty(message.get("content")):
            found.append({**shown, "content": form.content, "tool_calls": calls})
        elif form.next_to_text:
            found.append({**shown, "tool_calls": calls})
        else:
            found.append({key: value for key, value in shown.items() if key != "tool_calls"})
            found.append({"role": message["role"], "content": form.content, "tool_calls": calls})
    return found


def _is_empty(content: Any) -> bool:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return all(isinstance(part, Mapping) and part.get("text") == "" for part in content)
    return not content


def _call(call: Any, form: CallForm) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    known = {"type": "function", **call}
    if form.short_ids and isinstance(call.get("id"), str):
        known["id"] = _short(call["id"])
    known["function"] = {**function, "arguments": _arguments(function.get("arguments"), form)}
    return known


def _arguments(arguments: Any, form: CallForm) -> Any:
    if _is_nothing(arguments):
        return "{}" if form.as_text else {}
    if not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False) if form.as_text else arguments
    if form.as_text:
        return arguments
    meant = _mapping(arguments)
    if meant is not None:
        return meant
    return arguments if form.takes_cut_off else {"arguments": arguments}


def _is_nothing(arguments: Any) -> bool:
    """Tell whether a call has no arguments: it says so, or says nothing."""
    return arguments is None or (isinstance(arguments, str) and not arguments.strip())


def _mapping(text: str) -> dict[str, Any] | None:
    try:
        meant = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return meant if isinstance(meant, dict) else None


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls are part of its text, in Hermes' notation, for a template that shows none."""
    calls = []
    for call in message.pop("tool_calls"):
        function = call.get("function") if isinstance(call, Mapping) else None
        said: Any = call if not isinstance(function, Mapping) else dict(function)
        if isinstance(function, Mapping):
            given = said.get("arguments")
            meant = _mapping(given) if isinstance(given, str) else None
            said["arguments"] = {} if _is_nothing(given) else given if meant is None else meant
        calls.append(f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>")
    content = message.get("content")
    if isinstance(content, list) and content:
        kept = [] if _is_empty(content) else content
        return {**message, "content": [*kept, {"type": "text", "text": "\n".join(calls)}]}
    return {**message, "content": "\n".join([content, *calls] if content else calls)}


def _short(call_id: str) -> str:
    """Return an id of nine letters and digits, the same one for the same id."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
