"""Places messages of the system where a chat template shows them, and joins the contents of neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MARK = "jpaged-system"
_ASKED, _SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_SYSTEM = {"role": "system", "content": _MARK}
_FIRST = [_SYSTEM, _ASKED]
_AMID = [_ASKED, _SAID, _SYSTEM, _ASKED]
Messages = Sequence[Mapping[str, Any]]
Content = str | list[dict[str, Any]]


class SystemMessages:
    """Knows where one model's chat template shows messages of the system, by rendering two short conversations."""

    def __init__(self) -> None:
        self._shown: tuple[bool, bool] | None = None

    def placed(self, messages: Messages, render: Callable[..., Mapping[str, Any]]) -> Messages:
        """Return a conversation whose messages of the system the template shows: in their places, or as the user's.

        A message that becomes the user's joins those of the user next to it, since templates want roles to alternate.

        Args:
            render: `AsyncLLM.chat_prompt`.
        """
        if all(message["role"] != "system" for message in messages):
            return messages
        if self._shown is None:
            self._shown = _shows(_FIRST, render), _shows(_AMID, render)
        found: list[Mapping[str, Any]] = []
        moved = False  # whether the last one is the system's
        for i, message in enumerate(messages):
            moves = message["role"] == "system" and not self._shown[bool(i)]
            shown = {**message, "role": "user"} if moves else message
            if found and (moves or moved) and shown["role"] == found[-1]["role"] == "user":
                shown = {**shown, "content": joined(found.pop()["content"], shown["content"], "\n\n")}
            found.append(shown)
            moved = moves
        return found


def _shows(messages: Messages, render: Callable[..., Mapping[str, Any]]) -> bool:
    try:
        return _MARK in render(messages)["prompt"]
    except ValueError:  # the template refuses it
        return False


def joined(one: Content | None, other: Content | None, between: str = "\n") -> Content | None:
    """Return two contents of messages as one: texts as a text, with `between` between them."""
    if not one or not other:
        return one or other
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}{between}{other}"
    return [*_parts(one), *_parts(other)]


def _parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
