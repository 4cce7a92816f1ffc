"""Finds by trial the forms of contents and tool calls that a chat template takes, and gives a conversation that form.

Templates differ: some take a content as text and some as a list of parts; some write a call's arguments as JSON
themselves and some join them as text; some look at calls only where the content is none. Each template is tried once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from jpaged.text.thought_forms import Form, thought_form, without_thought

ContentForm = Literal["string", "openai", "either"]
Message = Mapping[str, Any]

_TEXT = "a text that no template has"
_NAME, _ID, _LONG_ID = "tried_name", "tried0001", "call_tried_0123456789"
_NAME_2, _ID_2 = "other_name", "other0002"
_THOUGHT = "a tried thought"
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
        next_to_both: whether the template takes calls next to a text and a thought; otherwise the thought is put before
            the text, as in GPT-OSS' template, which shows both as thoughts.
        together: whether all calls of a message are shown; otherwise each needs a message of its own, with its result
            after it, as in those of Llama 3 and GPT-OSS.
        short_ids: whether the ids of calls must have nine letters and digits, as Mistral's.
        named_ids: whether calls are shown by their ids alone, which then say the function, as in Kimi's template.
        shown: whether the template shows calls at all, or some of their arguments by name.
    """

    content: str | None = ""
    as_text: bool = False
    takes_cut_off: bool = True
    next_to_text: bool = True
    next_to_both: bool = True
    together: bool = True
    short_ids: bool = False
    named_ids: bool = False
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
        def rendered(
            content: str | None, arguments: Any, call_id: str = _ID, *, twice: bool = False, **fields: str
        ) -> str | None:
            calls = [
                {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
                for one, name in ((call_id, _NAME), (_ID_2, _NAME_2))[: 1 + twice]
            ]
            said = {"role": "assistant", "content": content, "tool_calls": calls, **fields}
            return self._rendered(tokenizer, _USER, said)

        text = json.dumps(_ARGUMENTS)
        tried = [(content, arguments) for arguments in (_ARGUMENTS, text) for content in ("", None)]
        shown = [_Shown(rendered(*form)) for form in tried]
        best = max(range(len(tried)), key=lambda i: shown[i].rank)  # the first of equal ones
        if not shown[best].rank:
            return CallForm(shown=False)
        content, arguments = tried[best]
        as_text, plain = arguments is text, shown[best]
        with_text, two = _Shown(rendered(_TEXT, arguments)), rendered(content, arguments, twice=True)
        return CallForm(
            content=content,
            as_text=as_text,
            takes_cut_off=as_text or rendered(content, _CUT_OFF) is not None,
            next_to_text=with_text.level >= plain.level,
            next_to_both=with_text.text is None or rendered(_TEXT, arguments, reasoning_content=_THOUGHT) is not None,
            together=two is not None and (_NAME_2 in two or _ID_2 in two or not plain.named),
            short_ids=rendered(content, arguments, _LONG_ID) is None,
            named_ids=plain.level > 0 and _ID in (plain.text or "") and _NAME not in (plain.text or ""),
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
        """Return a key that is larger for a better form; empty if the template raised.

        A notation of the template's own is as good as JSON, which may be a text that it copies.
        """
        return () if self.text is None else (min(self.level, 2), self.named, "None" not in self.text)


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
    messages = messages if form.together else [*_one_at_a_time(messages)]
    for message in _with_names(messages, in_ids=form.named_ids):
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
            found.append({**(shown if form.next_to_both else _with_thought_in_text(shown)), "tool_calls": calls})
        else:
            found.append({key: value for key, value in shown.items() if key != "tool_calls"})
            found.append({"role": message["role"], "content": form.content, "tool_calls": calls})
    return found


def _one_at_a_time(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield a conversation in which each call has a message of its own and, where the results follow, its result after
    it. A text stays with the first call."""
    waiting = deque(messages)
    while waiting:
        message = waiting.popleft()
        if not has_calls(message) or len(message["tool_calls"]) == 1:
            yield message
            continue
        results = []
        while waiting and waiting[0].get("role") == "tool":
            results.append(waiting.popleft())
        for number, call in enumerate(message["tool_calls"]):
            yield {**(message if not number else {"role": message["role"], "content": None}), "tool_calls": [call]}
            call_id = call.get("id") if isinstance(call, Mapping) else None
            own = next((one for one in results if one.get("tool_call_id") == call_id), None)
            if own is not None:
                results.remove(own)
                yield own
        yield from results


def _with_names(messages: Sequence[Message], *, in_ids: bool) -> Iterator[Message]:
    """Yield a conversation whose results have the names of their functions, which clients leave out and templates show.

    Args:
        in_ids: whether calls get ids as Kimi's model writes them: the function, and the call's number.
    """
    count, known = 0, dict[str, dict[str, str]]()  # what a result has of its call, by the call's id
    for message in messages:
        if message.get("role") == "tool" and isinstance(call_id := message.get("tool_call_id"), str):
            own = known.get(call_id, {})
            yield {**own, **message, **({"tool_call_id": own["tool_call_id"]} if in_ids and own else {})}
        elif not has_calls(message):
            yield message
        else:
            calls = list(message["tool_calls"])
            for i, call in enumerate(calls):
                function = call.get("function") if isinstance(call, Mapping) else None
                name = function.get("name") if isinstance(function, Mapping) else None
                if isinstance(name, str) and isinstance(call.get("id"), str):
                    shown = f"functions.{name}:{count}" if in_ids else call["id"]
                    known[call["id"]] = {"name": name, "tool_call_id": shown}
                    calls[i] = {**call, "id": shown}
                count += 1
            yield {**message, "tool_calls": calls}


def _with_thought_in_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose thought is the beginning of its text."""
    rest, thought = without_thought(message)
    if thought is None:
        return message
    content = message["content"]
    before = f"{thought}\n{content}" if isinstance(content, str) else [{"type": "text", "text": thought}, *content]
    return rest | {"content": before}


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
